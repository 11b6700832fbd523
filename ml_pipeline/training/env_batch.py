"""EnvBatch: n envs stepped together, wherever they live; a collector needs to know no more.

``HostEnvs`` are envs in this process or in workers, with arrays in host memory. ``DeviceEnvs`` are
those of a tensor env, with tensors on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.masks import Mask
from ml_pipeline.records import StateDict

if TYPE_CHECKING:
    from ml_pipeline.training.contracts import Observer

ArrayOrTensor = Any  # an array in host memory, or a tensor on a device
Choose = Callable[..., PolicySample]  # (inputs, noise, out=None): the actions of all envs


class Seen(NamedTuple):
    """Where the policy's input of some envs goes."""

    obs: dict[str, ArrayOrTensor]
    mask: ArrayOrTensor | None
    episode_start: ArrayOrTensor | None


class Row(NamedTuple):
    """Where a step of some envs goes."""

    action: ArrayOrTensor
    reward: ArrayOrTensor
    terminated: ArrayOrTensor
    truncated: ArrayOrTensor
    final: Seen | None  # before the autoreset; for tensor envs only
    final_memory: Tensor | None  # recurrent state before it
    following: Seen  # what the policy sees after the step


class FinalObservation(NamedTuple):
    """The last observation of a truncated episode, in host memory."""

    env: int
    leaves: dict[str, ArrayOrTensor]
    mask: Mask | None
    memory: Tensor | None = None  # recurrent state before it


class EnvStep(NamedTuple):
    """What all envs returned for one action each."""

    obs: dict[str, ArrayOrTensor]  # after the autoreset
    mask: ArrayOrTensor | None
    reward: ArrayOrTensor
    terminated: ArrayOrTensor
    truncated: ArrayOrTensor
    final: Seen | None = None  # before the autoreset, of every env, if it is on a device
    finals: Sequence[FinalObservation] = ()  # else of the episodes that were truncated
    episodes: Sequence[Episode] = ()  # that ended, unless ``ended_episodes`` counts them
    is_reset: NDArray[np.bool_] | None = None  # steps that only reset an env: no transitions


class EnvBatch(Protocol):
    """Call ``begin``; then, perhaps as a captured program, ``show``, ``act``, ``receive``, ``end``.

    A reset observation is never the result of a step.
    """

    env: VectorEnv[Any, Any, Any]
    place: slice  # the columns of these envs among all of a run
    on_host: bool  # arrays in host memory
    has_reset_rows: bool  # some steps only reset an env, see ``EnvStep.is_reset``
    memory: Tensor | None  # recurrent state of the policy

    @property
    def can_be_captured(self) -> bool:
        """Whether a program with steps of these envs can be captured as a CUDA graph."""

    @property
    def has_started(self) -> bool: ...

    def begin(self, agent: Observer) -> bool:
        """Reset the envs if they have not started; returns whether it did."""

    def seen(self) -> tuple[dict[str, ArrayOrTensor], ArrayOrTensor | None]:
        """What all envs observe now, and the masks of their actions."""

    def show(self, seen: Seen | None = None) -> None:
        """Before the first step of a program: write what the policy sees now."""

    def act(
        self,
        agent: Observer,
        choose: Choose,
        noise: ArrayOrTensor,
        out: ArrayOrTensor | None = None,
    ) -> ArrayOrTensor:
        """Choose actions, write them to ``out``, and let the envs take them; returns them."""

    def receive(self, agent: Observer, t: int, row: Row | None = None) -> EnvStep | None:
        """The result of the step; a device writes it to ``row``, if there is one, and returns None.

        ``t`` counts the steps since ``begin``, for messages.
        """

    def end(self) -> None:
        """After the last step of a program."""

    def abandon(self) -> None:
        """An interrupt left the steps since ``begin`` half done."""

    def inputs(self, agent: Observer) -> PolicyInput:
        """What the policy sees now."""

    def ended_episodes(self) -> list[Episode]:
        """The mean of those since ``begin`` that no ``EnvStep`` had; may wait for a device."""

    def snapshots(self) -> list[bytes]:
        """All envs as bytes; empty if ``state_dict`` holds them."""

    def state_dict(self) -> StateDict: ...

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue within the episodes of ``snapshots``."""

    def resume_at(self, state: StateDict, agent: Observer) -> None:
        """Continue at the step of ``state_dict``; call ``restore`` first."""


def saved_positions(batches: Sequence[EnvBatch]) -> list[StateDict] | StateDict | None:
    """The current step of all envs, for a checkpoint; None before the first."""
    if batches[0].on_host:
        return [each.state_dict() for each in batches]
    return batches[0].state_dict() if batches[0].has_started else None


def restore_positions(
    batches: Sequence[EnvBatch], positions: Any, snapshots: Sequence[bytes], agent: Observer
) -> None:
    """Continue at saved positions; ``ValueError`` if they do not fit these envs and agent."""
    if not isinstance(positions, list if batches[0].on_host else dict):
        raise ValueError("the checkpoint holds no env positions, or those of another kind of env")
    if isinstance(positions, dict):
        _check_memory(positions, agent)
        batches[0].resume_at(positions, agent)
        return
    if len(positions) != len(batches):
        raise ValueError("the collector setting has changed")
    for position in positions:
        if (position["mask"] is not None) != agent.masks.are_used:
            raise ValueError("agent.action_mask has changed")
        _check_memory(position, agent)
    # All envs first: if one cannot be restored, every batch starts new episodes.
    for batch in batches:
        first = batch.place.start
        batch.restore(snapshots[first : first + batch.env.num_envs])
    for batch, position in zip(batches, positions, strict=True):
        batch.resume_at(position, agent)


def _check_memory(position: StateDict, agent: Observer) -> None:
    # Positions of tensor envs have no such key without a recurrent policy.
    if (position.get("state") is not None) != bool(agent.memory_size):
        raise ValueError("the network has changed")


def new_table(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, on_host: bool
) -> ArrayOrTensor:
    """Zeros; an array is pinned for a GPU, so that copies to it are asynchronous."""
    if not on_host:
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = np.zeros(shape, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    return torch.from_numpy(zeros).pin_memory().numpy() if device.type == "cuda" else zeros


def torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    # torch has no public function from NumPy's dtypes to its own.
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
