"""CrowdedKeys: many keys, of which few work at a time; only the action mask shows which.

The observation is the wanted tone. The nearest working key gives the highest reward. A key that
does not work ends the episode, so a policy without the mask fails, however long it learns.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from ml_pipeline.envs.kinds import AnyEnv, Info


class CrowdedKeys(AnyEnv):
    """``n_keys`` actions, ``n_working`` of them allowed; the best return is about ``length``."""

    def __init__(self, n_keys: int = 32, n_working: int = 6, length: int = 32) -> None:
        if not 1 <= n_working <= n_keys:
            raise ValueError(f"n_working must be between 1 and n_keys={n_keys}, got {n_working}")
        self.observation_space = spaces.Discrete(n_keys)
        self.action_space = spaces.Discrete(n_keys)
        self.n_keys = n_keys
        self.n_working = n_working
        self.length = length
        self._step = 0
        self._tone = 0
        self._mask = np.zeros(n_keys, dtype=np.int8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._next()

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        self._step += 1
        works = bool(self._mask[action])
        nearest = int(np.abs(np.flatnonzero(self._mask) - self._tone).min())
        excess = abs(int(action) - self._tone) - nearest
        reward = 1.0 - excess / self.n_keys if works else 0.0
        obs, info = self._next()
        return obs, reward, not works, self._step >= self.length, info

    def _next(self) -> tuple[int, Info]:
        self._tone = int(self.np_random.integers(self.n_keys))
        self._mask = np.zeros(self.n_keys, dtype=np.int8)
        self._mask[self.np_random.permutation(self.n_keys)[: self.n_working]] = 1
        return self._tone, {"action_mask": self._mask.copy()}
