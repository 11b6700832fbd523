"""Advantages and explained variance of a rollout, in NumPy, where loops over time are faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float32]


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    done: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
) -> Array:
    """Generalised advantage estimate over a rollout; every array is [T, n_envs].

    ``next_value`` is the value of each step's true successor: 0 where the episode terminated,
    V(final observation) where it was truncated. So the recursion needs no special cases.
    """
    delta = reward + np.float32(gamma) * next_value - value
    carry = np.float32(gamma * lam) * ~done
    advantage: Array = np.empty_like(delta)
    running = np.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage


def explained_variance(value: Any, value_target: Any) -> Any:
    """1 for a perfect critic, 0 for a constant one, and 0 if all targets are equal.

    Takes arrays or tensors. For tensors it returns a tensor, so nothing waits for the device.
    """
    if isinstance(value, Tensor):
        variance = value_target.var(correction=0)
        unexplained = (value_target - value).var(correction=0)
        return torch.where(variance > 0, 1.0 - unexplained / variance, 0.0)
    variance, unexplained = float(value_target.var()), float((value_target - value).var())
    return 1.0 - unexplained / variance if variance > 0 else 0.0
