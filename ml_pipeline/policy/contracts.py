"""Records and protocols of a policy: what it reads, what it returns, what others may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union, runtime_checkable

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

Obs = Union["Tensor", "dict[str, Tensor]"]  # a tensor, or one per leaf: "camera", "arm/angle", "0"
NetworkBuilder = Callable[["gym.Space[Any]"], "nn.Module"]


@dataclass(frozen=True)
class Networks:
    """Builders for an agent whose critic has another network than its actor."""

    actor: NetworkBuilder
    critic: NetworkBuilder

    def __call__(self, space: gym.Space[Any]) -> nn.Module:
        """The actor's: what an agent without a critic asks for."""
        return self.actor(space)


class Spaces(NamedTuple):
    """The spaces of one env."""

    observation: gym.Space[Any]
    action: gym.Space[Any]


class PolicyInput(NamedTuple):
    """The input of a policy for one step of B envs, or T steps if it is recurrent.

    A recurrent policy takes ``obs``, ``action_mask`` and ``episode_start`` with a leading T.
    An agent that ``takes_arrays`` acts on arrays in the place of tensors.
    """

    obs: Obs  # [B, *obs], or one such tensor per leaf of a Dict or Tuple observation
    action_mask: Tensor | None  # [B, n] bool; None: every action is allowed
    memory: Tensor | None  # [B, memory_size], recurrent state before the first step, or None
    episode_start: Tensor | None  # [B] bool: reset the memory here; None: no memory

    def mapped(self, function: Callable[[Tensor], Tensor], memory: Tensor | None) -> PolicyInput:
        """Apply ``function`` to every field with a step axis; ``memory`` has none."""
        obs, mask, _, start = self
        return PolicyInput(
            {name: function(leaf) for name, leaf in obs.items()}
            if isinstance(obs, dict)
            else function(obs),
            None if mask is None else function(mask),
            memory,
            None if start is None else function(start),
        )


class PolicySample(NamedTuple):
    """The actions of a policy in one step of all envs."""

    action: Tensor  # [n_envs, *act], as sampled: not clipped; an array if the noise is one
    memory: Tensor | None  # [n_envs, memory_size] after the step


class Policy(Protocol):
    """Acts. Evaluation, play and serve need nothing else."""

    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], ready for ``env.step``; updates ``memory`` in place.

        For a Tuple or Dict action space it returns a tuple or dict of such arrays.
        """

    def new_memory(self, n_envs: int) -> Tensor | None:
        """Recurrent state at the start of ``n_envs`` episodes, or None without one."""

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The action masks in the infos, or None if this policy does not read masks there."""


@runtime_checkable
class ActsOnPart(Protocol):
    """A policy whose critic reads leaves of the observation that acting does not need."""

    @property
    def acting_space(self) -> gym.Space[Any]:
        """The part of the observation space that acting reads."""
