"""WithoutText: leaves texts out of Dict observations, because networks take numbers.

MiniGrid's mission is such a text. ``EnvFactory`` applies it to every env that needs it.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium import spaces

from ml_pipeline.envs.kinds import AnyEnv, AnySpace


def text_keys(space: AnySpace) -> list[str]:
    """The keys of the texts in a Dict space."""
    if not isinstance(space, spaces.Dict):
        return []
    # MiniGrid has a class of its own instead of spaces.Text.
    return [key for key, part in space.items() if part.dtype is not None and part.dtype.kind == "U"]


class WithoutText(gym.ObservationWrapper[dict[str, Any], Any, dict[str, Any]]):
    """Leaves out ``left_out``, all texts of a Dict observation."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"WithoutText needs a Dict observation, got {space}")
        self.left_out = text_keys(space)
        self._kept = [key for key in space if key not in self.left_out]
        self.observation_space = spaces.Dict({key: space[key] for key in self._kept})

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {key: observation[key] for key in self._kept}
