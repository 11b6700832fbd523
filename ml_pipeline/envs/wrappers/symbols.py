"""SymbolBounds: declares the highest symbols of an image whose Box claims 255 for all of them.

MiniGrid's images hold kinds from 0 to 10, colours from 0 to 5 and states from 0 to 3. As pixels
they would be divided by 255, and nearly equal for a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ml_pipeline.envs.kinds import AnyEnv


class SymbolBounds(gym.Wrapper[Any, Any, Any, Any]):
    """Changes the bounds of an image, not its values; the policy divides by these bounds."""

    def __init__(self, env: AnyEnv, highest: Sequence[int], key: str | None = "image") -> None:
        """``highest``: one per channel. ``key``: of the image in a Dict observation."""
        super().__init__(env)
        space = env.observation_space
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
        image = parts.get(str(key), space)
        if not isinstance(image, spaces.Box) or image.dtype != np.uint8:
            raise ValueError(f"key={key}: names no image of bytes in {space}")
        if image.shape[-1:] != (len(highest),):
            raise ValueError(
                f"highest={list(highest)}: needs one number for each of the last axis of an image "
                f"of shape {image.shape}"
            )
        if not all(0 < each <= 255 for each in highest):
            raise ValueError(f"highest={list(highest)}: must be from 1 to 255")
        high = np.broadcast_to(np.array(highest, dtype=np.uint8), image.shape)
        bounded = spaces.Box(np.zeros_like(high), high.copy(), dtype=np.uint8)
        self.observation_space = bounded
        if image is not space:
            self.observation_space = spaces.Dict({**parts, str(key): bounded})
