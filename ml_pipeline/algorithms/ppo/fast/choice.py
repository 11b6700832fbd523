"""Chooses the backend for PPO's arithmetic: plain torch, or a faster one that fits the model."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.fast.numpy_ppo import NumpyPPO
from ml_pipeline.algorithms.ppo.records import Minibatch, Rates, UpdateResult
from ml_pipeline.policy.contracts import PolicyInput, PolicySample

if TYPE_CHECKING:
    from ml_pipeline.algorithms.ppo.agent import TorchPPO


class PPOBackend(Protocol):
    """``TorchPPO`` describes what each method computes."""

    acts_faster_on_cpu: bool  # in few envs
    takes_arrays: bool  # methods for acting take NumPy arrays in the place of tensors
    config: PPOConfig

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]: ...

    def sample(self, inputs: PolicyInput, noise: Tensor, out: Tensor | None) -> PolicySample: ...

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]: ...

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor: ...

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult: ...

    def refresh(self) -> None: ...


class FastPPO(PPOBackend, Protocol):
    """Runs a whole epoch in one call."""

    def epoch(self, rollout: Minibatch, order: Tensor, rates: Rates) -> Tensor: ...


def fastest(plain: TorchPPO, *, masked: bool) -> FastPPO | None:
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
