"""fastest: the fast backend for PPO's arithmetic that fits a model and its device."""

from __future__ import annotations

import importlib.util

import torch

from ml_pipeline.algorithms.ppo.contracts import FastPPO, PlainPPO
from ml_pipeline.algorithms.ppo.fast.numpy_ppo import NumpyPPO


def fastest(plain: PlainPPO, *, masked: bool) -> FastPPO | None:
    """The fast backend that covers ``plain``'s model on its device, or None."""
    device = plain.adam.values.device
    if device.type == "cpu" and NumpyPPO.covers(plain.model):
        return NumpyPPO(plain.model, plain.adam, plain.config)
    # Triton comes with torch's CUDA builds; its kernels have no masks, and ROCm is untested.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or masked or importlib.util.find_spec("triton") is None:
        return None
    from ml_pipeline.algorithms.ppo.fast.triton_ppo import TritonPPO

    return TritonPPO(plain) if TritonPPO.covers(plain.model) else None
