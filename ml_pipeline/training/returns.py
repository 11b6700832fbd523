"""Advantages, discounted returns and explained variance of a rollout; [T, n_envs] each.

Every function takes arrays, for envs in host memory, or tensors, for tensor envs. There is no
second version of any of them, so an edit here takes effect everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.errors import UserError

Numbers = TypeVar("Numbers", NDArray[Any], Tensor)


def gae(
    reward: Numbers,
    value: Numbers,
    next_value: Numbers,
    ongoing: Numbers,
    *,
    gamma: float,
    lam: float,
) -> Numbers:
    """Generalised advantage estimate over a rollout.

    ``next_value`` is the value of each step's true successor: 0 where the episode terminated,
    V(final observation) where it was truncated. ``ongoing`` is 1.0, and 0.0 in the last step of an
    episode. So the recursion needs no special cases.
    """
    advantage: Numbers = reward + gamma * next_value - value
    carry = gamma * lam * ongoing
    for t in range(len(advantage) - 2, -1, -1):
        advantage[t] += carry[t] * advantage[t + 1]
    return advantage


# Arguments as ``gae``; returns the advantage, or a pair: the advantage and the critic's target.
Estimator = Callable[..., Any]


class RolloutOutcome(NamedTuple):
    """How each step of a rollout ended, and the values of its successors; arrays or tensors."""

    reward: Any
    value: Any
    last_value: Any  # [n_envs], after the last row
    final_value: Any  # of the final observation; used where truncated
    terminated: Any  # bool
    truncated: Any  # bool

    def estimate(self, estimator: Estimator, *, gamma: float, lam: float) -> tuple[Any, Any]:
        """Advantages and targets of the critic, from the value of each step's true successor."""
        library: Any = torch if isinstance(self.reward, Tensor) else np
        zero, one = library.zeros_like(self.value), library.ones_like(self.value)
        following = library.concatenate([self.value[1:], self.last_value[None]])
        following = library.where(self.truncated, self.final_value, following)
        following = library.where(self.terminated, zero, following)
        ongoing = library.where(self.terminated | self.truncated, zero, one)
        ends = self.reward, self.value, following, ongoing
        found = estimator(*ends, gamma=gamma, lam=lam)
        advantage, target = found if isinstance(found, tuple) else (found, found + self.value)
        shapes, wanted = (tuple(advantage.shape), tuple(target.shape)), tuple(self.reward.shape)
        if shapes != (wanted, wanted):
            raise UserError(f"returned shapes {shapes} for advantage and target, not {wanted}")
        return advantage, target


def discounted_returns(
    reward: Numbers, done: Numbers, start: Numbers, *, gamma: float
) -> tuple[Numbers, Numbers]:
    """The discounted return of each episode so far, and that of the episodes that go on.

    ``start`` [n_envs] is that before the first row.
    """
    library: Any = torch if isinstance(reward, Tensor) else np
    rows, running = [], start
    for t in range(len(reward)):
        running = running * gamma + reward[t]
        rows.append(running)
        running = library.where(done[t], 0.0, running)
    return library.stack(rows), running


def explained_variance(value: Any, value_target: Any) -> Any:
    """1 for a perfect critic, 0 for a constant one, and 0 if all targets are equal.

    For tensors it returns a tensor, so nothing waits for the device.
    """
    if isinstance(value, Tensor):
        variance = value_target.var(correction=0)
        unexplained = (value_target - value).var(correction=0)
        return torch.where(variance > 0, 1.0 - unexplained / variance, 0.0)
    variance, unexplained = float(value_target.var()), float((value_target - value).var())
    return 1.0 - unexplained / variance if variance > 0 else 0.0
