"""CameraAndFlag: a task that needs both an image and a vector.

The image shows a spot in one of four quarters. The vector says whether to point at it or at the
opposite quarter. A policy that uses only one of them gets at most half of the return.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, Info

Obs = dict[str, "NDArray[np.generic]"]


class CameraAndFlag(AnyEnv):
    """Dict(camera, flag) observations; the best return is ``length``, random play gets 1/4."""

    def __init__(self, size: int = 12, length: int = 32) -> None:
        if size < 4 or size % 2:
            raise ValueError(f"size must be even and at least 4, got {size}")
        camera = spaces.Box(0, 255, (size, size, 1), np.uint8)
        flag = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"camera": camera, "flag": flag})
        self.action_space = spaces.Discrete(4)
        self.size = size
        self.length = length
        self._step = 0
        self._wanted = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._next(), {}

    def step(self, action: int) -> tuple[Obs, float, bool, bool, Info]:
        self._step += 1
        reward = float(int(action) == self._wanted)
        return self._next(), reward, False, self._step >= self.length, {}

    def _next(self) -> Obs:
        row, column = self.np_random.integers(self.size, size=2)
        half = self.size // 2
        quarter = 2 * int(row >= half) + int(column >= half)
        flag = float(self.np_random.choice([-1.0, 1.0]))
        self._wanted = quarter if flag > 0 else 3 - quarter
        camera = np.zeros((self.size, self.size, 1), dtype=np.uint8)
        camera[row, column] = 255
        return {"camera": camera, "flag": np.array([flag], dtype=np.float32)}
