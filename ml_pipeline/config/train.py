"""The typed schema of a run: one dataclass per config group, checked where it is made.

Each class belongs to one path of the config, so its errors name the full key. Workers import this
module through the entry script: it imports neither torch nor Hydra. Nothing writes to a config.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Optional

from ml_pipeline.config.checks import check, integer_steps, number_to_write
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.errors import shorten
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN

if TYPE_CHECKING:
    from ml_pipeline.config.agent import AgentConfig
    from ml_pipeline.config.curriculum import CurriculumConfig
else:  # OmegaConf reads types; checked_config checks these two against classes of their own
    AgentConfig = CurriculumConfig = Any

VEC_ENV_MODES = ("auto", "serial", "parallel", "shared")
START_METHODS = ("spawn", "fork", "forkserver")
COLLECTORS = ("sync", "double")
ENV_SEEDS = ("spread", "adjacent")
COMPILE_MODES = ("auto", "off", "graph")
PRECISIONS = ("float32", "tf32", "bf16")
RUN_ROOT = "runs"

_LONGEST_NAME = 50  # characters of up to 4 bytes; a file name has at most 255 bytes
_LONGEST_TAG = 64  # W&B accepts no longer one


@dataclass
class EnvConfig:
    """One environment: a registered id, or a class by dotted path, which takes precedence."""

    id: Optional[str] = "CartPole-v1"  # of any env registered with Gymnasium
    target: Optional[str] = None  # dotted path of a class, which takes precedence
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the env
    wrappers: dict[str, Any] = field(default_factory=dict)  # name -> `_target_` entry, in order
    # Make the id by gymnasium.make_vec; a target that makes a vector env needs no key
    vector: bool = False
    # Its name in messages and of the folder of its runs; null: the id or the class
    label: Optional[str] = None

    def __post_init__(self) -> None:
        if not self.id and not self.target:
            raise ValueError("env.id and env.target are both empty; set one of them")
        if self.vector and self.target:
            raise ValueError("env.vector is for an env.id; remove it beside env.target")

    @property
    def name(self) -> str:
        """The label, or the class name of the target, or the id."""
        of_class = (self.target or "").rpartition(".")[2]
        return self.label or of_class or str(self.id).rpartition(":")[2]


@dataclass
class EvalEnvConfig:
    """What differs in the env of evaluations, videos and play: held-out data, unshaped rewards."""

    id: Optional[str] = None  # with id or target, env.kwargs are not used
    target: Optional[str] = None
    # Replace those of env, key by key: +eval_env.kwargs.split=test
    kwargs: dict[str, Any] = field(default_factory=dict)
    # As kwargs; null removes a wrapper of env: +eval_env.wrappers.shaping=null
    wrappers: dict[str, Any] = field(default_factory=dict)

    def applied_to(self, env: EnvConfig) -> EnvConfig:
        """The env of evaluations, if ``env`` is that of training."""
        wrappers = {**env.wrappers, **self.wrappers}
        wrappers = {name: entry for name, entry in wrappers.items() if entry is not None}
        if self.id or self.target:
            return EnvConfig(self.id, self.target, self.kwargs, wrappers)
        kwargs = {**env.kwargs, **self.kwargs}
        return replace(env, kwargs=kwargs, wrappers=wrappers)


@dataclass
class VecEnvConfig:
    """Envs run in this process, in workers, or in both; see ``ParallelEnv`` for the keys."""

    mode: str = "auto"  # auto: time the others and pick one | serial | parallel | shared
    # Processes that step envs; null: one per core that this process may use
    n_workers: Optional[int] = None
    # spawn | fork | forkserver; null: spawn, which is safe with torch's threads
    start_method: Optional[str] = None
    # Raise an error if a worker takes longer; null: wait forever, but not for a dead worker
    step_timeout_seconds: Optional[float] = 300.0
    # all | final: only infos of ended episodes; faster, and enough unless masks are in infos
    infos: str = "final"
    check_finite: bool = False  # raise an error on NaN or infinity in obs, rewards or actions
    # raise | restart: replace a dead or stuck worker and truncate its envs
    on_worker_death: str = "raise"
    max_restarts: int = 10  # for all workers together

    def __post_init__(self) -> None:
        modes, methods = " | ".join(VEC_ENV_MODES), " | ".join(START_METHODS)
        check(self.mode in VEC_ENV_MODES, "vec_env.mode", modes, self.mode)
        if self.n_workers is not None:
            check(self.n_workers >= 1, "vec_env.n_workers", "at least 1", self.n_workers)
        if self.start_method is not None:
            known = self.start_method in START_METHODS
            check(known, "vec_env.start_method", methods, self.start_method)
        if self.step_timeout_seconds is not None:
            timeout = self.step_timeout_seconds
            check(timeout > 0, "vec_env.step_timeout_seconds", "positive", timeout)
        check(self.infos in ("all", "final"), "vec_env.infos", "all | final", self.infos)
        known = self.on_worker_death in ("raise", "restart")
        check(known, "vec_env.on_worker_death", "raise | restart", self.on_worker_death)
        check(self.max_restarts >= 0, "vec_env.max_restarts", "at least 0", self.max_restarts)


@dataclass
class TrainConfig:
    """A whole run; conf/train.yaml chooses the option of each group."""

    n_envs: Any = 8  # or auto: measure and pick a number
    seed: int = 1
    # spread: runs with different seeds share no env | adjacent: env i is reset with seed + i
    env_seeds: str = "spread"
    total_steps: float = 100_000  # env steps over all envs, rounded down to whole rollouts
    # Number of iterations (calls of train_episode_vectorized), instead of total_steps
    num_episodes: Optional[int] = None
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    # Of torch on the CPU; auto: one, or one per core for convolutions unless workers are forked
    cpu_threads: Any = "auto"
    compile: str = "auto"  # auto | off | graph: on a GPU, compile and capture repeated work
    # float32 | tf32 | bf16 for matrix products on a GPU, from exact to fast
    precision: str = "float32"
    # With torchrun: how long ranks wait for each other; also for an evaluation
    rank_timeout_seconds: float = 300.0
    init_from: Optional[str] = None  # run folder, or latest: start a new run with its weights
    resume: Optional[str] = None  # run folder to continue
    salvage: bool = False  # with resume: continue without the replay files that are damaged
    trust: bool = False  # with resume: accept a folder of another user that can run any code
    objective: str = MEAN_RETURN  # the metric that a sweep reports
    best_metric: str = EVAL_RETURN  # the metric that selects the best checkpoint
    name: Optional[str] = None  # of the run: part of its folder's name, and its name at W&B
    notes: Optional[str] = None  # any text about the run
    tags: list[str] = field(default_factory=list)  # words to find the run by
    run_root: str = RUN_ROOT  # folder of the run folders
    env: EnvConfig = field(default_factory=EnvConfig)
    eval_env: EvalEnvConfig = field(default_factory=EvalEnvConfig)
    opponent: Optional[OpponentConfig] = None  # self-play in a two-player env
    # Of the class of its algorithm
    agent: AgentConfig = field(default_factory=dict)  # type: ignore[assignment]
    network: dict[str, Any] = field(default_factory=dict)  # a `_target_` entry
    vec_env: VecEnvConfig = field(default_factory=VecEnvConfig)
    # sync | double: act in one half of the envs while the other half steps
    collector: str = "sync"
    logger: dict[str, Any] = field(default_factory=dict)  # name -> `_target_` entry
    callbacks: dict[str, Any] = field(default_factory=dict)  # name -> `_target_` entry
    curriculum: Optional[CurriculumConfig] = None  # phases of training

    def __post_init__(self) -> None:
        _check_count("n_envs", self.n_envs)
        _check_count("cpu_threads", self.cpu_threads)
        check(0 <= self.seed < 2**31, "seed", "between 0 and 2147483647", self.seed)
        known = self.env_seeds in ENV_SEEDS
        check(known, "env_seeds", " | ".join(ENV_SEEDS), self.env_seeds)
        self.total_steps = integer_steps("total_steps", self.total_steps)
        if self.num_episodes is not None:
            check(self.num_episodes >= 1, "num_episodes", "at least 1", self.num_episodes)
        known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None
        fix = "; write device=cuda" if re.match("gpu|nvidia|cuda", self.device, re.I) else ""
        check(known, "device", f"auto | cpu | cuda | cuda:N | mps{fix}", self.device)
        if self.compile == "False":  # YAML reads an unquoted off as false
            self.compile = "off"
        check(self.compile in COMPILE_MODES, "compile", " | ".join(COMPILE_MODES), self.compile)
        timeout = self.rank_timeout_seconds
        check(0 < timeout < math.inf, "rank_timeout_seconds", "positive", timeout)
        known = self.precision in PRECISIONS
        check(known, "precision", " | ".join(PRECISIONS), self.precision)
        check(self.collector in COLLECTORS, "collector", " | ".join(COLLECTORS), self.collector)
        self._check_labels()
        if self.collector == "double":
            even = self.n_envs != "auto" and self.n_envs % 2 == 0
            check(even, "n_envs", "even with collector=double", self.n_envs)
            if reason := self.agent.why_not_double():
                raise ValueError(f"collector=double: {reason}; use collector=sync")
        if self.n_envs != "auto":
            reason = self.agent.why_not(self.n_envs)
            if reason is not None:
                raise ValueError(reason)

    def _check_labels(self) -> None:
        if self.name is not None:  # it becomes part of a file name
            rule = f"1 to {_LONGEST_NAME} letters, digits, and . _ -"
            fits = re.fullmatch(rf"[\w.-]{{1,{_LONGEST_NAME}}}", self.name) is not None
            check(fits, "name", rule, shorten(self.name))
        for tag in self.tags:
            fits = 1 <= len(tag) <= _LONGEST_TAG and tag.isprintable()
            check(fits, "tags", f"a list of texts of 1 to {_LONGEST_TAG} characters", self.tags)
        # A shell replaces ~; otherwise a folder of that name would appear here.
        fits = bool(self.run_root.strip()) and not self.run_root.startswith("~")
        check(fits, "run_root", "the path of a folder, without ~", self.run_root)

    @property
    def evaluated_env(self) -> EnvConfig:
        """The env of evaluations: ``env`` with the changes of ``eval_env``."""
        return self.eval_env.applied_to(self.env)

    @property
    def needs_two_players(self) -> bool:
        """Whether the env of evaluations has no opponent of its own."""
        return self.opponent is not None and self.evaluated_env.kwargs.get("opponent") is None

    def suits(self, n_envs: int, *, recurrent: bool = False) -> bool:
        """Whether ``n_envs`` fits the minibatches and leaves the run at least ten iterations."""
        budget = math.inf if self.num_episodes is not None else self.total_steps
        fits = self.agent.why_not(n_envs, recurrent=recurrent) is None
        return fits and 10 * self.agent.iteration_steps(n_envs) <= budget

    @property
    def wanted_steps(self) -> int:
        """Env steps of the complete run: the whole iterations that fit, at least one."""
        return self.wanted_steps_in(int(self.n_envs))

    def wanted_steps_in(self, n_envs: int) -> int:
        """``wanted_steps`` if all ranks together have ``n_envs``."""
        iteration = self.agent.iteration_steps(n_envs)
        if self.num_episodes is not None:
            return self.num_episodes * iteration
        return max(int(self.total_steps) // iteration, 1) * iteration


def _check_count(key: str, count: object) -> None:
    fits = type(count) is int and 1 <= count < 2**31
    rule = f"auto, or at least 1{number_to_write(count)}"
    check(fits or count == "auto", key, rule, count)
