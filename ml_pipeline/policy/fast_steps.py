"""fast_linear_steps: ``min_gru.linear_steps`` as one Triton kernel on an NVIDIA GPU.

The kernel runs only while the code that it repeats is unchanged.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor

from ml_pipeline.errors import type_and_line
from ml_pipeline.mirrors import Mirrored, why_not

MIRRORED: Mirrored = {
    "ml_pipeline.policy.min_gru.linear_steps": "fefc33875e9e",
}


def fast_linear_steps(kept: Tensor, new: Tensor, backwards: bool) -> Tensor | None:
    """The states after all steps, or None if no kernel computes them here."""
    if not new.is_cuda or not _is_mirrored() or not _is_built(new.device):
        return None
    from ml_pipeline.policy.steps_kernel import linear_steps_in_one_kernel

    return linear_steps_in_one_kernel(kept, new, backwards)


def _is_mirrored() -> bool:
    """Whether the kernel repeats today's code; not cached, since a notebook may patch it."""
    reason = why_not(MIRRORED)
    if reason is not None:
        warnings.warn(f"MinGRU launches several kernels: {reason}", RuntimeWarning, stacklevel=3)
    return reason is None


@cache
def _is_built(device: torch.device) -> bool:
    """Whether Triton can build the kernel: that needs a C compiler and Python's headers."""
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    try:
        from ml_pipeline.policy.steps_kernel import linear_steps_in_one_kernel

        for backwards in (False, True):
            linear_steps_in_one_kernel(
                torch.zeros(1, 16, device=device), torch.zeros(2, 16, device=device), backwards
            )
    except Exception as error:  # Triton raises many kinds
        why = type_and_line(error)
        warnings.warn(f"MinGRU launches several kernels: {why}", RuntimeWarning, stacklevel=3)
        return False
    return True
