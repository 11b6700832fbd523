"""RewardScaler: rewards divided by the running standard deviation of the discounted return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.moments import merge_moments
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict
from ml_pipeline.training.returns import Numbers, discounted_returns


class RewardScaler(Generic[Numbers]):
    """Scales rewards and clips them, without waiting for a device.

    It does not subtract the mean: a reward that is always positive must stay positive.
    """

    def __init__(self, start: Numbers, *, gamma: float, clip: float, world: World = ALONE) -> None:
        """``start`` is zero for each env: float64 in host memory, float32 for tensor envs."""
        self.gamma = gamma
        self.clip = clip
        self._world = world
        self._return: Numbers = start  # discounted, of the current episode in each env
        self._moments: Numbers = _like(start, [0.0, 1.0, 0.0])  # mean, variance, count

    def scaled(
        self, reward: Numbers, done: Numbers, counted: NDArray[np.bool_] | None = None
    ) -> Numbers:
        """Add a rollout, [T, n_envs], to the moments, then scale it by them.

        ``counted``: the steps to add, None: all. Others must have the reward 0.
        """
        library: Any = torch if isinstance(reward, Tensor) else np
        returns, running = discounted_returns(reward, done, self._return, gamma=self.gamma)
        added = returns if counted is None else returns[counted][np.newaxis]
        is_finite = self._learn(added, library)
        # A rollout that is not finite is skipped, and must not change later ones. In place: a
        # captured graph reads and writes the same tensors again.
        self._return[:] = library.where(is_finite, running, 0.0)
        scale = 1.0 / library.sqrt(self._moments[1] + 1e-8)
        if not isinstance(reward, Tensor):
            scale = np.float32(scale)  # the moments have double precision here
        scaled: Numbers = library.clip(reward * scale, -self.clip, self.clip)
        return scaled

    def _learn(self, returns: Numbers, library: Any) -> Any:
        """Merge the moments of a rollout on all ranks, if they are finite; returns whether."""
        mean = returns.mean()
        centred = returns - mean
        variance = (centred * centred).mean()
        n_returns = returns.shape[0] * returns.shape[1]
        batches: list[Any]
        if isinstance(returns, Tensor):
            batches = [self._world.moments(mean, variance, n_returns)]
        else:
            batches = self._world.gathered((float(mean), float(variance), n_returns))
        merged = tuple(self._moments)
        for batch in batches:
            merged = merge_moments(*merged, *batch)
        is_finite = library.isfinite(merged[1])
        self._moments[:] = library.where(is_finite, library.stack(merged), self._moments)
        return is_finite

    def resize(self, n_envs: int) -> None:
        """Remaining envs keep their returns; new ones start at zero."""
        if isinstance(self._return, Tensor):
            raise TypeError("tensor envs cannot change their number")
        kept = self._return[:n_envs]
        self._return = np.concatenate([kept, np.zeros(n_envs - len(kept))])

    def begin_episodes(self) -> None:
        """Call after all envs were reset."""
        self._return[:] = 0.0

    def state_dict(self) -> StateDict:
        return {"moments": self._moments.tolist(), "return": self._return.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self._moments[:] = _like(self._moments, state["moments"])
        if len(state["return"]) == len(self._return):
            self._return[:] = _like(self._return, state["return"])


def _like(given: Any, values: Sequence[float]) -> Any:
    """An array, or a tensor on the same device, with the dtype of ``given``."""
    if isinstance(given, Tensor):
        return given.new_tensor(values)
    return np.array(values, dtype=given.dtype)
