"""Returns and advantages of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Generalised advantage estimate over a rollout; every tensor is [T, n_envs].

    ``next_value`` is the value of each step's true successor: 0 where the episode terminated,
    V(final observation) where it was truncated. So the recursion needs no special cases.
    """
    delta = reward + gamma * next_value - value
    carry = gamma * lam * (~done)
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage


def explained_variance(value: Tensor, value_target: Tensor) -> Tensor:
    """1 for a perfect critic, 0 for one no better than a constant; 0-d.

    Targets that are all the same explain nothing: the result is then 0, not a NaN.
    """
    variance = value_target.var(correction=0)
    residual = (value_target - value).var(correction=0)
    return torch.where(variance > 0, 1.0 - residual / variance.clamp_min(1e-12), 0.0)
