"""HideVelocity: shows a policy positions only, so that it must remember to know where things go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class HideVelocity(gym.ObservationWrapper[Any, Any, Any]):
    """Leaves out some numbers of a vector observation; for CartPole the second and the fourth."""

    def __init__(self, env: gym.Env[Any, Any], hidden: Sequence[int] = (1, 3)) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, spaces.Box) or len(box.shape) != 1:
            raise ValueError(f"hidden numbers must be those of a vector, this env has {box}")
        self._shown = np.setdiff1d(np.arange(box.shape[0]), hidden)
        low, high = box.low[self._shown], box.high[self._shown]
        self.observation_space = spaces.Box(low, high, dtype=box.dtype.type)

    def observation(self, observation: Any) -> Any:
        return observation[self._shown]
