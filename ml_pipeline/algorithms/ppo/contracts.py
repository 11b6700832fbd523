"""Protocols between the parts of PPO that have several implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.records import Minibatch, Rates, UpdateResult
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.policy.actor_critic import ActorCritic
from ml_pipeline.policy.contracts import Obs, PolicyInput, PolicySample
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.records import StateDict


class Learner(Protocol):
    """Learns from a rollout, one epoch at a time."""

    device: torch.device

    def epoch(self, rollout: Minibatch, order: Tensor, rates: Rates) -> Tensor: ...


class RolloutQuality(NamedTuple):
    """How well the critic fits a finished rollout, and whether the envs returned finite values."""

    explained_variance: float
    is_finite: bool  # all observations and rewards


class Rollout(Protocol):
    """``RolloutBuffer``, or ``TensorBuffer`` for tensor envs."""

    n_steps: int
    n_envs: int

    def finish(self, last: PolicyInput, *, gamma: float, lam: float, scaler: Any) -> None: ...

    def finished(self) -> Minibatch: ...

    def shuffle(self, generator: torch.Generator, n_orders: int) -> None: ...

    def order(self, epoch: int) -> Tensor: ...

    def new_order(self, n: int, generator: torch.Generator) -> Tensor: ...

    def quality(self) -> RolloutQuality: ...

    def observations(self) -> Obs: ...

    def arrays(self) -> dict[str, NDArray[Any]]: ...


class Stats(Protocol):
    """What happened in a rollout; ``TensorRolloutStats`` reads it from the device on demand."""

    @property
    def episodes(self) -> list[Episode]: ...

    @property
    def seconds(self) -> float: ...


class RolloutCollector(Protocol):
    """``Collector``, or ``TensorCollector`` for tensor envs."""

    n_envs: int
    on_host: bool  # whether the rollout is collected in host memory

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]: ...

    @property
    def is_between_rollouts(self) -> bool: ...

    def new_buffer(self, n_steps: int, agent: Any) -> Any: ...

    def new_scaler(self, *, gamma: float, clip: float) -> Any: ...

    def collect(self, agent: Any, buffer: Any) -> Stats: ...

    def commit(self, n_steps: int) -> None: ...

    def last_inputs(self, agent: Any) -> PolicyInput: ...

    def resize(self, n_envs: int, agent: Any) -> None: ...

    def snapshots(self) -> list[bytes]: ...

    def resume_at(self, positions: Any, snapshots: Sequence[bytes], agent: Any) -> None: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


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
    adam: FlatAdam
    precision: str


class FastPPO(PPOBackend, Protocol):
    """Runs a whole epoch in one call."""

    def why_not(self) -> str | None:
        """Why it does not work for this model on this machine, or None if it does."""

    def epoch(self, rollout: Minibatch, order: Tensor, rates: Rates) -> Tensor: ...
