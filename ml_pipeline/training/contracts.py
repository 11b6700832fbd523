"""What the parts of a training ask of each other: agent, trainer, algorithm, callback, logger.

Spawned workers import the script of a user, which may import this module: it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ml_pipeline.policy.contracts import (
    NetworkBuilder,
    Policy,
    PolicyInput,
    PolicySample,
    Spaces,
)
from ml_pipeline.records import Metrics, StateDict

if TYPE_CHECKING:
    import torch
    from gymnasium.vector import VectorEnv
    from numpy.typing import NDArray
    from torch import Tensor

    from ml_pipeline.config.agent import AgentConfig
    from ml_pipeline.policy.distributions import Distribution
    from ml_pipeline.policy.masks import ActionMasks, Mask
    from ml_pipeline.policy.observations import ObservationReader
    from ml_pipeline.ranks.world import World
    from ml_pipeline.signals import Hold
    from ml_pipeline.training.graphs import Programs


class Envs(NamedTuple):
    """The envs of a run, as passed to a trainer."""

    parts: Sequence[VectorEnv[Any, Any, Any]]  # one, or two halves of a double-buffered collector
    first_seed: int  # env i is reset with first_seed + i
    infos_have_episodes: bool  # an inner wrapper reports true episodes in infos["episode"]


class RunContext(NamedTuple):
    """Where and how the agent and the trainer of a run compute."""

    device: torch.device
    seed: int
    precision: str  # of matrix products on a GPU: float32, tf32 or bf16
    programs: Programs  # compiles and captures the work on a GPU
    world: World

    @classmethod
    def alone(
        cls, device: torch.device | str = "cpu", *, seed: int = 1, precision: str = "float32"
    ) -> RunContext:
        """One process that compiles nothing, for use without Hydra."""
        import torch

        from ml_pipeline.ranks.world import World
        from ml_pipeline.training.graphs import Programs

        device = torch.device(device)
        return cls(device, seed, precision, Programs(device), World())

    def __str__(self) -> str:
        return self.world.where(self.device)


class Observer(Protocol):
    """Reads observations and masks for all envs at once, and draws noise for its actions."""

    device: torch.device
    reader: ObservationReader
    memory_size: int  # 0: not recurrent

    @property
    def masks(self) -> ActionMasks: ...

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

    def train_episode_vectorized(self, hold: Hold = ...) -> Metrics:
        """One iteration. A stop signal may interrupt it at any point, except after ``hold()``.

        ``with hold():`` protects only its block: a gradient step must not be left half done.
        """

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


@runtime_checkable
class ResumesEpisodes(Protocol):
    """A trainer whose envs continue within their episodes when a run is resumed."""

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; empty if ``state_dict`` holds them, None while they are busy."""

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None: ...


class FileStore(Protocol):
    """Files beside the checkpoints of a run; see ``runs.large_files``."""

    salvages: bool  # continue without the files that ``read`` refuses

    def write(self, name: str, content: StateDict) -> None: ...

    def read(self, name: str) -> StateDict: ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A trainer whose transitions are too large for a checkpoint, which names files instead."""

    def save_files(self, files: FileStore) -> None:
        """Write what is in no file yet; the next ``state_dict`` names the files."""

    def load_files(self, files: FileStore, state: StateDict) -> None:
        """Read the files of ``state``, which was loaded before."""

    def files_in(self, state: StateDict) -> set[str]:
        """The files that a checkpoint of all ranks names."""


@runtime_checkable
class NeedsDisk(Protocol):
    """A trainer that knows how large its files become, so that a run can say it at the start."""

    def disk_need(self, env_steps: int) -> tuple[int, str]:
        """Bytes of the files of all ranks after ``env_steps``, and how to need fewer."""


@runtime_checkable
class DiffersOnRanks(Protocol):
    """A trainer with state that differs between ranks, such as the positions of their envs."""

    def own_state(self) -> StateDict:
        """These entries of ``state_dict``; a checkpoint holds those of every rank."""


@runtime_checkable
class Forgets(Protocol):
    """A trainer that can drop what it has collected, for a new phase of a curriculum."""

    def forget(self) -> None: ...


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
    make_agent: Callable[[Spaces, NetworkBuilder, Any, RunContext], Agent]
    make_trainer: Callable[[Any, Envs, Any, RunContext], Trainer]
    # Explains what needs memory and how to reduce it: (agent, config, n_envs, tensor_envs) -> text
    memory_advice: Callable[[Any, Any, int, bool], str] = lambda *_: "use fewer envs"
    # Loads what another agent has learnt from its state; the optimiser stays new. For init_from=
    start_from: Callable[[Any, StateDict], None] | None = None
    trains_on_ranks: bool = False  # its trainer uses ``RunContext.world``
    # What a rank loads of a checkpoint: (state, parts of the ranks that saved it, world, n_envs)
    state_of_rank: Callable[[StateDict, Sequence[StateDict], World, int], StateDict] = (
        lambda state, *_: state
    )


class RunningLoop(Protocol):
    """The loop of a run, as callbacks see it; ``training.loop.Loop`` is one."""

    trainer: Trainer
    callbacks: dict[str, Callback]
    loggers: list[Logger]
    iteration: int
    env_steps: int
    stop_reason: str | None

    @property
    def agent(self) -> Agent: ...

    @property
    def envs(self) -> Sequence[VectorEnv[Any, Any, Any]]: ...

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint would be complete now."""

    def is_last_iteration(self) -> bool:
        """Whether training ends after the iteration that was counted last."""

    def request_stop(self, reason: str) -> None:
        """End training after this iteration."""

    def resize(self, n_envs: int) -> int:
        """Train in about ``n_envs`` envs from the next iteration on; returns the actual number."""

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Arrays of the last rollout, for histograms; empty if the trainer has none."""

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes, or None if they cannot be saved now."""

    def state_dict(self) -> StateDict:
        """Everything that a resumed run continues from."""


_SB3_HOOKS = {  # of Stable-Baselines3, and the closest hook here
    "_on_training_start": "on_train_start",
    "_on_rollout_start": "on_iteration_end",
    "_on_step": "on_iteration_end",
    "_on_rollout_end": "on_iteration_end",
    "_on_training_end": "on_train_end",
}


class Callback:
    """Reacts to events of a run; override the hooks you need.

    A callback in the config gets its keys as arguments. Its constructor may also have the
    parameters ``make_env`` (an ``EnvFactory``), ``vec_env`` (a ``VecEnvConfig``), ``run`` (a
    ``RunFolder``), ``seed``, ``device``, ``best_metric`` and ``load_policy``: the run passes them
    by name. ``load_policy(name)`` returns the policy of a checkpoint of the run, on the CPU.
    """

    def __init_subclass__(cls) -> None:
        """Refuse a method that looks like a hook but would never be called."""
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(cls):
            is_foreign = name in _SB3_HOOKS
            is_like_one = is_foreign or (name.startswith("on_") and name not in hooks)
            if is_like_one and callable(getattr(cls, name)):
                close = [_SB3_HOOKS[name]] if is_foreign else get_close_matches(name, hooks, n=1)
                fix = f"did you mean {close[0]}?" if close else f"hooks are {', '.join(hooks)}"
                raise TypeError(f"{cls.__name__}.{name} is not a hook of Callback; {fix}")

    def on_train_start(self, loop: RunningLoop) -> None:
        """Before the first iteration, also of a resumed run."""

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> bool | None:
        """After each iteration; may add to ``metrics``. Returning False ends training."""
        return None

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        """After the metrics of this iteration were written; a hook may save the run here."""

    def on_train_end(self, loop: RunningLoop) -> None:
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
