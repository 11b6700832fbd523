"""RewardScaler: rewards divided by the running standard deviation of the discounted return."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.moments import merge_moments
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict

Array = NDArray[np.float32]


class RewardScaler:
    """Scales rewards and clips them.

    It does not subtract the mean: a reward that is always positive must stay positive.
    """

    def __init__(self, n_envs: int, *, gamma: float, clip: float, world: World = ALONE) -> None:
        self.gamma = gamma
        self.clip = clip
        self._world = world
        self._return = np.zeros(n_envs)  # discounted, of the current episode in each env
        self._mean, self._variance, self._count = 0.0, 1.0, 0

    def scaled(self, reward: Array, done: NDArray[np.bool_]) -> Array:
        """Add a rollout, [T, n_envs], to the moments, then scale it by them."""
        returns = np.empty(reward.shape)
        for t in range(len(reward)):
            self._return = self._return * self.gamma + reward[t]
            returns[t] = self._return
            self._return = np.where(done[t], 0.0, self._return)
        n_bad = int(not np.isfinite(returns).all())
        if self._world.max([n_bad]) == [0]:
            self._take_in(returns)
        else:  # this rollout is skipped, and must not change later ones
            self._return = np.zeros_like(self._return)
        scale = np.float32(1.0 / np.sqrt(self._variance + 1e-8))
        scaled: Array = np.clip(reward * scale, -self.clip, self.clip).astype(np.float32)
        return scaled

    def _take_in(self, returns: NDArray[np.float64]) -> None:
        own = float(returns.mean()), float(returns.var()), returns.size
        for moments in self._world.gathered(own):
            self._mean, self._variance, self._count = merge_moments(
                self._mean, self._variance, self._count, *moments
            )

    def resize(self, n_envs: int) -> None:
        """Remaining envs keep their returns; new ones start at zero."""
        kept = self._return[:n_envs]
        self._return = np.concatenate([kept, np.zeros(n_envs - len(kept))])

    def begin_episodes(self) -> None:
        """Call after all envs were reset."""
        self._return = np.zeros_like(self._return)

    def state_dict(self) -> StateDict:
        moments: list[Any] = [self._mean, self._variance, self._count]
        return {"moments": moments, "return": self._return.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self._mean, self._variance, self._count = state["moments"]
        if len(state["return"]) == len(self._return):
            self._return = np.array(state["return"])
