"""estimate: ``RolloutOutcome.estimate``; ``gae`` is one Triton kernel on a GPU, not hundreds.

The kernel runs only while the code that it repeats is unchanged.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.errors import type_and_line
from ml_pipeline.mirrors import Mirrored, why_not
from ml_pipeline.training.returns import Estimator, RolloutOutcome, gae

MIRRORED: Mirrored = {
    "ml_pipeline.training.returns.gae": "76cd00bcdf7b",
    "ml_pipeline.training.returns.RolloutOutcome.estimate": "8a995fc7390b",
}


def estimate(
    outcome: RolloutOutcome, estimator: Estimator, *, gamma: float, lam: float
) -> tuple[Any, Any]:
    """Advantages and targets, [T, n_envs]; arrays or tensors, as ``outcome`` has them."""
    reward = outcome.reward
    is_on_gpu = isinstance(reward, Tensor) and reward.is_cuda
    if is_on_gpu and estimator is gae and _is_mirrored() and _is_built(reward.device):
        from ml_pipeline.training.gae_kernel import gae_in_one_kernel

        advantage = gae_in_one_kernel(*outcome, gamma=gamma, lam=lam)
        return advantage, advantage + outcome.value
    return outcome.estimate(estimator, gamma=gamma, lam=lam)


def _is_mirrored() -> bool:
    """Whether the kernel repeats today's code; not cached, since a notebook may patch it."""
    reason = why_not(MIRRORED)
    if reason is not None:
        warnings.warn(f"GAE launches a kernel per step: {reason}", RuntimeWarning, stacklevel=3)
    return reason is None


@cache
def _is_built(device: torch.device) -> bool:
    """Whether Triton can build the kernel: that needs a C compiler and Python's headers."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from ml_pipeline.training.gae_kernel import gae_in_one_kernel

        numbers, flags = torch.zeros(1, 16, device=device), torch.zeros(1, 16, device=device)
        tried = RolloutOutcome(numbers, numbers, numbers[0], numbers, flags.bool(), flags.bool())
        gae_in_one_kernel(*tried, gamma=1.0, lam=1.0)
    except Exception as error:  # Triton raises many kinds
        why = type_and_line(error)
        warnings.warn(f"GAE launches a kernel per step: {why}", RuntimeWarning, stacklevel=3)
        return False
    return True
