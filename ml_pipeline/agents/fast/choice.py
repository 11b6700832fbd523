"""Chooses the backend for PPO's arithmetic: plain torch, or a faster one that fits the model."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ml_pipeline.agents.fast.numpy_ppo import NumpyPPO
from ml_pipeline.protocols import Minibatch, PolicyInput, PolicySample, Rates, UpdateResult

if TYPE_CHECKING:
    from ml_pipeline.agents.ppo import TorchPPO


class PPOBackend(Protocol):
    """``TorchPPO`` describes what each method computes."""

    acts_faster_on_cpu: bool  # in few envs

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]: ...

    def sample(self, inputs: PolicyInput, noise: Tensor, out: Tensor | None) -> PolicySample: ...

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]: ...

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor: ...

    def epoch(self, rollout: Minibatch, order: Tensor, rates: Rates) -> Tensor: ...

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult: ...

    def refresh(self) -> None: ...


def fastest(plain: TorchPPO, *, masked: bool) -> tuple[PPOBackend, str]:
    """The backend for ``plain``'s model, and the reason why a faster one fails here, if any."""
    device = plain.adam.values.device
    if device.type == "cpu" and NumpyPPO.covers(plain.model):
        return NumpyPPO(plain.model, plain.adam, plain.config), ""
    # Triton comes with torch's CUDA builds; its kernels have no masks, and ROCm is untested.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or masked or importlib.util.find_spec("triton") is None:
        return plain, ""
    from ml_pipeline.agents.fast.triton_ppo import TritonPPO

    if not TritonPPO.covers(plain.model):
        return plain, ""
    triton_ppo = TritonPPO(plain)
    reason = triton_ppo.why_not()
    if reason is None:
        return triton_ppo, ""
    return plain, f"small MLPs run in plain torch, not in Triton kernels: {reason}"
