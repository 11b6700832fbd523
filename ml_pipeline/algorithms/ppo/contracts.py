"""Protocols between the parts of PPO that have several implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import LossTerms, Minibatch, Rates, UpdateResult
from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy.actor_critic import ActorCritic
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.optimiser import Optimiser


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


class PlainPPO(PPOBackend, Protocol):
    """The readable backend, and what a fast one shares with it."""

    model: ActorCritic
    adam: Optimiser
    precision: str

    def evaluated(
        self, batch: Minibatch, rates: Rates, key: Tensor
    ) -> tuple[LossTerms, tuple[Tensor, Tensor]]: ...

    def update(
        self,
        batch: Minibatch,
        rates: Rates,
        evaluated: Callable[..., tuple[LossTerms, tuple[Tensor, Tensor]]] | None = None,
    ) -> UpdateResult: ...


class FastPPO(PPOBackend, Protocol):
    """Runs a whole epoch in one call."""

    also_mirrored: ClassVar[Mirrored]  # beyond what all fast backends repeat

    def why_not(self) -> str | None:
        """Why it does not work for this model on this machine, or None if it does."""

    def epoch(
        self,
        rollout: Minibatch,
        order: Sequence[Tensor] | Tensor,
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> Tensor: ...
