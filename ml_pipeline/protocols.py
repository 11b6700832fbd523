"""The records and protocols that cross modules; shapes are noted beside each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union, runtime_checkable

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy as np
    import torch
    from gymnasium.vector import VectorEnv
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from ml_pipeline.config.agent import AgentConfig
    from ml_pipeline.distributed import World
    from ml_pipeline.training.gpu.programs import Programs
    from ml_pipeline.training.loop import Loop

Metrics = dict[str, float]  # "group/name" -> value; a metric without a value is absent
Obs = Union["Tensor", "dict[str, Tensor]"]  # a tensor, or one per leaf: "camera", "arm/angle", "0"
StateDict = dict[str, Any]  # tensors, numbers, strings, and lists and dicts of these: no code


class Episode(NamedTuple):
    """A finished episode, or the mean of ``n`` of them."""

    episode_return: float  # undiscounted sum of the env's rewards
    length: float
    n: int = 1
    infos: Mapping[str, float] = MappingProxyType({})  # the numbers in the info of its last step


class RolloutStats(NamedTuple):
    """What happened while a rollout was collected."""

    episodes: list[Episode]  # those that ended, in order of time
    seconds: float


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


class Minibatch(NamedTuple):
    """Transitions for one gradient step of an on-policy agent.

    For a recurrent policy each field has the shape [T, B, ...]: whole sequences.
    """

    inputs: PolicyInput
    action: Tensor  # [B, *act]
    log_prob: Tensor  # [B], at sampling time
    value: Tensor  # [B], at sampling time
    advantage: Tensor  # [B], not normalised
    value_target: Tensor  # [B]

    def mapped(self, function: Callable[[Tensor], Tensor], memory: Tensor | None) -> Minibatch:
        """Apply ``function`` to every field with a step axis; ``memory`` has none."""
        inputs = self.inputs.mapped(function, memory)
        return Minibatch(inputs, *(function(field) for field in self[1:]))

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        obs, *rest = self.inputs
        leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
        return [*leaves, *(each for each in rest if each is not None), *self[1:]]

    def take(self, index: Tensor) -> Minibatch:
        """The transitions, or for a recurrent policy the sequences, at ``index``."""
        memory = self.inputs.memory
        if memory is None:
            return self.mapped(lambda field: field[index], None)
        return self.mapped(lambda field: field[:, index], memory[index])


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


class Rates(NamedTuple):
    """The annealed settings at their current values.

    On a device they are views of one tensor, which a captured graph reads in every replay.
    """

    learning_rate: Any
    clip_range: Any
    entropy_coef: Any


class UpdateResult(NamedTuple):
    """Metrics of one gradient step; ``epoch`` returns one row per step instead.

    0-d tensors, or plain numbers if the gradient step has waited for the result anyway.
    """

    policy_loss: Any
    value_loss: Any
    entropy: Any
    approx_kl: Any
    clip_fraction: Any
    grad_norm: Any
    finite: Any  # 0 if loss or gradient was not finite; such a step changes nothing


class Spaces(NamedTuple):
    """The spaces of one env."""

    observation: gym.Space[Any]
    action: gym.Space[Any]


class Envs(NamedTuple):
    """The envs of a run, as passed to a trainer."""

    parts: Sequence[VectorEnv[Any, Any, Any]]  # one, or two halves of a double-buffered collector
    first_seed: int  # env i is reset with first_seed + i
    infos_have_episodes: bool  # an inner wrapper reports true episodes in infos["episode"]


class Place(NamedTuple):
    """Where and how the parts of a run compute."""

    device: torch.device
    seed: int
    precision: str  # of matrix products on a GPU: float32, tf32 or bf16
    programs: Programs  # compiles and captures the work on a GPU
    world: World

    def __str__(self) -> str:
        n_ranks = self.world.size
        return f"{self.device}" if n_ranks == 1 else f"{n_ranks} ranks, {self.device}"


NetworkBuilder = Callable[["gym.Space[Any]"], "nn.Module"]


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
        """[n_envs, *obs] -> [n_envs, *act], ready for ``env.step``; updates ``memory`` in place."""

    def new_memory(self, n_envs: int) -> Tensor | None:
        """Recurrent state at the start of ``n_envs`` episodes, or None without one."""

    def mask_of(self, infos: Mapping[str, Any]) -> NDArray[np.bool_] | None:
        """The action masks in the infos, or None if this policy does not read masks there."""


class Scripted(Protocol):
    """A player without a network; the class of a two-player env names its own in ``scripted``."""

    def act_batch(self, obs: Any, deterministic: bool = True) -> NDArray[Any]: ...


class Agent(Policy, Protocol):
    """A Policy that can also be trained, exported, saved and loaded."""

    def update(self, batch: Any, rates: Any) -> Any:
        """One gradient step."""

    def greedy(self) -> Any:
        """The ``agents.policy.GreedyPolicy`` that export writes."""

    def for_playing(self) -> Policy:
        """The fastest policy for a few envs: this agent, or a copy on the CPU."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Trainer(Protocol):
    """Runs one iteration at a time: collects, then improves the agent."""

    progress: float  # 0 at the start of the run, 1 at its end; the loop sets it for schedules

    @property
    def agent(self) -> Agent: ...

    @property
    def envs(self) -> Sequence[VectorEnv[Any, Any, Any]]: ...

    @property
    def iteration_steps(self) -> int:
        """Env steps of the next iteration."""

    def train_episode_vectorized(self, hold: Callable[[], None] = ...) -> Metrics:
        """One iteration. Call ``hold`` before the first change that must not be left half done."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class ResumesEpisodes(Protocol):
    """A trainer whose envs continue within their episodes when a run is resumed."""

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; empty if ``state_dict`` holds them, None while they are busy."""

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None: ...


@runtime_checkable
class KeepsReplay(Protocol):
    """A trainer whose transitions are too large for a checkpoint; see ``runs.replay_files``."""

    replay: Any  # training.replay_buffer.ReplayBuffer


@runtime_checkable
class Resizes(Protocol):
    """A trainer that can change its number of envs between two iterations."""

    def resize(self, n_envs: int) -> int: ...


@runtime_checkable
class ShowsRollouts(Protocol):
    """A trainer that provides arrays of its last rollout, for histograms."""

    def last_rollout(self) -> dict[str, NDArray[Any]]: ...


class Algorithm(NamedTuple):
    """How an algorithm builds its parts; ``agent.algorithm`` names one by dotted path."""

    config: type[AgentConfig]
    make_agent: Callable[[Spaces, NetworkBuilder, Any, Place], Agent]
    make_trainer: Callable[[Any, Envs, Any, Place], Trainer]
    # Explains what needs memory and how to reduce it: (agent, config, n_envs, tensor_envs) -> text
    memory_advice: Callable[[Any, Any, int, bool], str] = lambda *_: "use fewer envs"
    # Loads what another agent has learnt from its state; the optimiser stays new. For init_from=
    start_from: Callable[[Any, StateDict], None] | None = None
    trains_on_ranks: bool = False  # its trainer uses ``Place.world``


class Callback:
    """Reacts to events of a run; override the hooks you need.

    A callback in the config gets its keys as arguments. Its constructor may also have the
    parameters ``make_env`` (an ``EnvFactory``), ``vec_env`` (a ``VecEnvConfig``), ``run`` (a
    ``RunFolder``), ``seed``, ``device`` and ``best_metric``: the run passes them by name.
    """

    def __init_subclass__(cls) -> None:
        """Refuse a method that looks like a hook but would never be called."""
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(cls):
            if name.startswith("on_") and name not in hooks and callable(getattr(cls, name)):
                close = get_close_matches(name, hooks, n=1)
                fix = f"did you mean {close[0]}?" if close else f"hooks are {', '.join(hooks)}"
                raise TypeError(f"{cls.__name__}.{name} is not a hook of Callback; {fix}")

    def on_train_start(self, loop: Loop) -> None:
        """Before the first iteration, also of a resumed run."""

    def on_iteration_end(self, loop: Loop, metrics: Metrics) -> None:
        """After each iteration; may add to ``metrics`` before they are logged."""

    def on_iteration_logged(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        """After the metrics of this iteration were written; a hook may save the run here."""

    def on_train_end(self, loop: Loop) -> None:
        """After the last iteration; not after an error."""

    def close(self) -> None:
        """The run is over, also after an error."""

    def state_dict(self) -> StateDict:
        """In every checkpoint; returns what a resumed run needs."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Before ``on_train_start`` when a run is resumed."""


class Logger(Protocol):
    """Receives metrics; ``env_steps`` is the x-axis of every plot.

    Two methods are optional: ``log_histograms(values, *, env_steps)`` takes arrays by name, and
    ``log_file(path, *, kind, env_steps)`` takes a "checkpoint" or a "video".
    """

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None: ...

    def close(self) -> None: ...
