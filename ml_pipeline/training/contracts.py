"""Protocols between agent, collector and buffer, which have several implementations each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.protocols import (
    Agent,
    BatchPart,
    Episode,
    Minibatch,
    Obs,
    PolicyInput,
    PolicySample,
    Rates,
    ReplayBatch,
    StateDict,
)

if TYPE_CHECKING:
    from ml_pipeline.agents.distributions import Distribution
    from ml_pipeline.agents.masks import ActionMasks, Mask
    from ml_pipeline.agents.observations import ObservationReader
    from ml_pipeline.distributed import World


class Observer(Protocol):
    """Reads observations and masks for all envs at once, and draws noise for its actions."""

    device: torch.device
    reader: ObservationReader
    masks: ActionMasks
    memory_size: int  # 0: not recurrent

    @property
    def takes_arrays(self) -> bool:
        """Whether the methods for acting take NumPy arrays in the place of tensors."""

    @property
    def distribution(self) -> Distribution: ...

    def new_memory(self, n_envs: int) -> Tensor | None: ...

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor: ...

    def inputs(
        self,
        leaves: dict[str, NDArray[Any]],
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
        episode_start: Tensor | None = None,
    ) -> PolicyInput: ...


class Actor(Observer, Protocol):
    """Samples actions for all envs at once, from noise that the collector draws."""

    def sample_batch(
        self, inputs: PolicyInput, noise: Tensor, out: Tensor | None = None
    ) -> PolicySample: ...


class ReplayAgent(Agent, Observer, Protocol):
    """Learns from a replay buffer."""

    # Field of the result of ``update`` -> name in the log.
    metric_names: ClassVar[dict[str, str]]
    config: Any  # OffPolicyConfig

    @property
    def takes_arrays(self) -> bool:
        """Whether ``explore`` and ``gradient_step`` take NumPy arrays in the place of tensors."""

    @property
    def update_generator(self) -> torch.Generator | None:
        """For the noise of updates, on the agent's device."""

    def rates(self, progress: float, learning_rate: float) -> Any: ...

    def new_memory(self, n_envs: int) -> None: ...

    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: Any, *, is_random: bool
    ) -> PolicySample: ...

    def begin_update(self) -> bool:
        """Count an update; returns whether it has the part that only some updates have."""

    def gradient_step(self, batch: ReplayBatch, rates: Any, is_turn: bool, /) -> Any:
        """One update that only changes tensors, with or without that part."""

    def learn_moments(self, obs: Obs) -> None: ...


class RankAgent(ReplayAgent, Protocol):
    """Learns together with other ranks; ``Algorithm.trains_on_ranks`` requires it of replay."""

    def join(self, world: World) -> None:
        """Start from the state of rank 0, and average gradients with the others from now on."""

    def take_part(self, part: BatchPart) -> None:
        """The next batch consists of these rows of the whole batch."""

    def learnt(self) -> list[Tensor]:
        """All float32 tensors that must be equal on all ranks."""


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
