"""RewardScaler: rewards divided by the running standard deviation of the discounted return."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np
import torch
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
        self._moments = torch.as_tensor(start).new_tensor([0.0, 1.0, 0.0])  # mean, variance, count

    def scaled(self, reward: Numbers, done: Numbers) -> Numbers:
        """Add a rollout, [T, n_envs], to the moments, then scale it by them."""
        returns, running = discounted_returns(reward, done, self._return, gamma=self.gamma)
        is_finite = self._learn(returns)
        library: Any = torch if isinstance(reward, Tensor) else np
        # A rollout that is not finite is skipped, and must not change later ones. In place: a
        # captured graph reads and writes the same tensors again.
        self._return[:] = library.where(is_finite, running, 0.0)
        scale = (1.0 / (self._moments[1] + 1e-8).sqrt()).float()
        scaled: Numbers = library.clip(
            reward * (scale if library is torch else scale.numpy()), -self.clip, self.clip
        )
        return scaled

    def _learn(self, returns: Numbers) -> Tensor:
        """Merge the moments of a rollout on all ranks, if they are finite; returns whether."""
        mean = returns.mean()
        centred = returns - mean
        own = torch.as_tensor(mean), torch.as_tensor((centred * centred).mean())
        n_returns = returns.shape[0] * returns.shape[1]
        batch = self._world.moments(*own, n_returns)
        is_finite = torch.isfinite(batch[1])
        old_mean, variance, count = self._moments.unbind()
        merged = torch.stack(merge_moments(old_mean, variance, count, *batch))
        self._moments.copy_(torch.where(is_finite, merged, self._moments))
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
        self._moments.copy_(self._moments.new_tensor(state["moments"]))
        if len(state["return"]) == len(self._return):
            held = torch.as_tensor(self._return)  # shares the memory of an array
            held.copy_(held.new_tensor(state["return"]))
