"""Records and protocols of off-policy learning: the batch, and the agent that learns from it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ml_pipeline.policy.contracts import Obs, PolicyInput, PolicySample
from ml_pipeline.ranks.world import World
from ml_pipeline.training.contracts import Agent, Observer


class ReplayBatch(NamedTuple):
    """Transitions from a replay buffer, for one gradient step of an off-policy agent."""

    inputs: PolicyInput  # [B]
    action: Tensor  # [B, *act]
    reward: Tensor  # [B], discounted sum over the n steps of the window, or fewer
    next_inputs: PolicyInput  # [B], after the window; never a reset observation
    discount: Tensor  # [B], gamma**k after k steps; 0 where the episode terminated
    weight: Tensor  # [B], importance weights of prioritised replay, else 1


class BatchPart(NamedTuple):
    """The rows of a batch that one of several ranks has."""

    rows: Tensor  # [n], at least one; an array if the agent takes arrays
    size: int  # of the whole batch
    share: float  # of this rank in the batch; 0: it has no row, and its result does not count


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
