"""Protocols between PPO's trainer, its collectors and its buffers: one of each per kind of env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.records import Minibatch, Rates
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.policy.contracts import Obs, PolicyInput
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
