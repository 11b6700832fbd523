"""The records and promises that cross rooms; shapes stand beside each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union

if TYPE_CHECKING:
    import numpy as np
    from gymnasium.vector import VectorEnv
    from numpy.typing import NDArray
    from torch import Tensor

Metrics = dict[str, float]  # "group/name" -> value; absent where there is nothing to tell
Obs = Union["Tensor", "dict[str, Tensor]"]  # a tensor, or one per leaf: "camera", "arm/angle", "0"
StateDict = dict[str, Any]  # tensors, numbers, strings, and lists and dicts of these: no code


class Episode(NamedTuple):
    """A finished episode, or the mean of ``n`` of them."""

    episode_return: float  # undiscounted sum of the rewards the env gave
    length: float
    n: int = 1


class PolicyInput(NamedTuple):
    """What a policy sees in one step of B envs, or, if it has a memory, in T steps of them.

    A policy with a memory takes ``obs``, ``action_mask`` and ``episode_start`` with a leading T.
    """

    obs: Obs  # [B, *obs], or one such tensor per leaf of a Dict or Tuple observation
    action_mask: Tensor | None  # [B, n] bool; None: every action is allowed
    state: Tensor | None  # [B, state_size] before the first step; None: no memory
    episode_start: Tensor | None  # [B] bool: the state does not count; None: no memory


class PolicySample(NamedTuple):
    """What a policy did in one step of all envs."""

    action: Tensor  # [n_envs, *act], as it was sampled: not yet clipped to the action space
    state: Tensor | None  # [n_envs, state_size] after the step


class Minibatch(NamedTuple):
    """Transitions for one gradient step of an on-policy agent.

    For a policy with a memory each field has the shape [T, B, ...]: whole sequences.
    """

    inputs: PolicyInput
    action: Tensor  # [B, *act]
    log_prob: Tensor  # [B], at the time of sampling
    value: Tensor  # [B], at the time of sampling
    advantage: Tensor  # [B], not normalised
    value_target: Tensor  # [B]

    def mapped(self, function: Callable[[Tensor], Tensor], state: Tensor | None) -> Minibatch:
        """``function`` of every field that has a place for each step; ``state`` has none."""
        obs, mask, _, start = self.inputs
        inputs = PolicyInput(
            {name: function(leaf) for name, leaf in obs.items()}
            if isinstance(obs, dict)
            else function(obs),
            None if mask is None else function(mask),
            state,
            None if start is None else function(start),
        )
        return Minibatch(inputs, *(function(field) for field in self[1:]))

    def rows(self, rows: Tensor) -> Minibatch:
        """Some transitions, or of a policy with a memory, some sequences."""
        state = self.inputs.state
        if state is None:
            return self.mapped(lambda field: field[rows], None)
        return self.mapped(lambda field: field[:, rows], state[rows])


class RolloutStats(NamedTuple):
    """What happened while a rollout was collected."""

    episodes: list[Episode]  # those that ended, in order of time
    seconds: float


class Policy(Protocol):
    """All that playing takes."""

    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], fit for ``env.step``; ``memory`` goes on in place."""

    def new_memory(self, n_envs: int) -> Tensor | None:
        """The memory of a policy that has one, at the beginning of ``n_envs`` episodes."""

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The action mask in the infos of a reset or step; None where there is none to heed."""


class Agent(Policy, Protocol):
    """All that evaluation, self-play and notebooks may assume of an agent."""

    def for_playing(self) -> Policy:
        """The same policy, where it acts fastest for a few envs: itself, or a copy elsewhere."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Trainer(Protocol):
    """What a callback may read and ask of the trainer."""

    iteration: int
    env_steps: int

    @property
    def agent(self) -> Agent: ...

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        """What is trained in: one vector env, or the two halves of a double-buffered collector."""

    @property
    def loggers(self) -> Sequence[Logger]: ...

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages of the last rollout, to be shown."""

    def resize(self, n_envs: int) -> int:
        """Train in about so many envs from the next rollout on; gives the number it will be."""

    def request_stop(self, reason: str) -> None: ...

    def is_last_iteration(self) -> bool: ...

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes, if their episodes can go on from them; a resume needs them."""

    def state_dict(self) -> StateDict: ...


class Callback:
    """A habit of a run: override a hook.

    A callback named in the config gets its keys as arguments, and by name what it asks for of
    ``make_env`` (an ``EnvFactory``), ``run`` (a ``RunFolder``), ``seed`` and ``device`` (the
    run's).
    """

    def on_train_start(self, trainer: Trainer) -> None:
        """Before the first iteration, also of a resumed run."""

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        """May add to ``metrics`` before they are logged."""

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """The record of this iteration is written."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last iteration; not after an error."""

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Called before ``on_train_start`` when a run is resumed."""


class Logger(Protocol):
    """Where metrics go; ``env_steps`` is the x-axis of every plot.

    One that can show more may have ``log_histograms(values, *, env_steps)`` with arrays by name,
    and ``log_file(path, *, kind, env_steps)`` for a "checkpoint" or a "video".
    """

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None: ...

    def close(self) -> None: ...
