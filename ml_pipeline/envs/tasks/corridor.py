"""Corridor: a task that needs memory; only the first observation shows which action is right.

A T-maze whose walker moves by itself. The last action must repeat what the first observation said.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, Info

Obs = NDArray[np.float32]


class Corridor(AnyEnv):
    """Return 1 or 0 after ``length`` steps; without memory the mean is 0.5."""

    def __init__(self, length: int = 16) -> None:
        if length < 2:
            raise ValueError(f"length must be at least 2, got {length}")
        # The sign, -1 or 1, in the first step; 1 in the last one, at the junction.
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self._step = 0
        self._right = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        self._step = 0
        self._right = int(self.np_random.integers(2))
        return np.array([2 * self._right - 1, 0], dtype=np.float32), {}

    def step(self, action: int) -> tuple[Obs, float, bool, bool, Info]:
        self._step += 1
        is_over = self._step == self.length
        reward = float(is_over and int(action) == self._right)
        obs = np.array([0, self._step == self.length - 1], dtype=np.float32)
        return obs, reward, is_over, False, {}
