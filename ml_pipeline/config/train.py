"""The typed schema of a run: one dataclass per config group, its checks in ``__post_init__``.

Each class stands at one path of the config, so its errors name the full key. Workers import
this module through the entry script: it knows neither torch nor Hydra. Nothing writes to a
config once it is made.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Optional

VEC_ENV_MODES = ("auto", "serial", "parallel", "shared")
START_METHODS = ("spawn", "fork", "forkserver")
SCHEDULES = ("constant", "linear", "cosine")
BOX_POLICIES = ("gaussian", "squashed", "gsde")
COLLECTORS = ("sync", "double")
COMPILE_MODES = ("auto", "off", "graph")
PRECISIONS = ("float32", "tf32", "bf16")


def check(fact: bool, key: str, rule: str, value: Any) -> None:
    """Refuse ``value`` with its full key unless ``fact`` holds."""
    if not fact:
        raise ValueError(f"{key} must be {rule}, got {value}")


def whole_steps(key: str, value: float) -> int:
    """A positive whole number of steps; 1e5 is a float to YAML, so steps come as floats."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    whole = is_number and value >= 1 and float(value).is_integer()
    check(whole, key, "a whole number of at least 1", value)
    return int(value)


@dataclass
class EnvConfig:
    """One environment: a registered id, or a class by dotted path, which wins over the id."""

    id: Optional[str] = "CartPole-v1"
    target: Optional[str] = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: dict[str, Any] = field(default_factory=dict)  # name -> _target_ entry, in order

    def __post_init__(self) -> None:
        if not self.id and not self.target:
            raise ValueError("env.id and env.target are both empty; give one of them")

    @property
    def name(self) -> str:
        """What people call this env: the id, or the class name of the target."""
        return (self.target or "").rpartition(".")[2] or str(self.id).rpartition(":")[2]


@dataclass
class PPOConfig:
    """Hyperparameters of PPO; conf/agent/ppo.yaml spells out the same defaults.

    A ``_schedule`` says how its value goes from the start of the run to its end: it stays, or
    falls to zero along a line or half a cosine. ``adaptive``, for the learning rate alone,
    follows ``target_kl`` instead.
    """

    learning_rate: float = 1e-3
    learning_rate_schedule: str = "linear"
    target_kl: float = 0.01  # what learning_rate_schedule=adaptive steers for
    adam_eps: float = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    n_steps: int = 128  # per env and rollout
    n_epochs: int = 10
    n_minibatches: int = 8
    clip_range: float = 0.2
    clip_range_schedule: str = "constant"
    dual_clip: Optional[float] = None  # bound of the ratio where the advantage is negative
    entropy_coef: float = 0.0
    entropy_coef_schedule: str = "constant"
    value_coef: float = 0.5
    clip_value_loss: bool = False  # by clip_range, around the value at the time of sampling
    max_grad_norm: float = 0.5
    max_kl: Optional[float] = None  # an epoch with a larger approx_kl is the iteration's last
    normalize_advantage: bool = True  # per minibatch
    orthogonal_init: bool = True
    shared_trunk: bool = False  # one network below policy and value
    normalize_obs: bool = False  # by running mean and deviation
    clip_obs: float = 10.0  # deviations
    scale_reward: bool = False  # by the running deviation of the discounted return
    clip_reward: float = 10.0  # of the scaled reward
    box_policy: str = "gaussian"
    log_std_init: float = 0.0
    gsde_every_steps: int = 4  # how long gsde keeps its noise; 0: a whole rollout
    action_mask: str = "auto"  # or none, info, or the key of a Dict observation
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)):
                check(math.isfinite(value), f"agent.{name}", "finite", value)
        for name in ("learning_rate", "target_kl", "clip_range", "max_grad_norm"):
            self._check(getattr(self, name) > 0, name, "positive")
        for name in ("adam_eps", "clip_obs", "clip_reward"):
            self._check(getattr(self, name) > 0, name, "positive")
        for name in ("gamma", "gae_lambda"):
            self._check(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("n_steps", "n_epochs", "n_minibatches"):
            self._check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("entropy_coef", "value_coef", "gsde_every_steps"):
            self._check(getattr(self, name) >= 0, name, "at least 0")
        for name in ("learning_rate", "clip_range", "entropy_coef"):
            adaptive = ("adaptive",) if name == "learning_rate" else ()
            self._check_choice(f"{name}_schedule", SCHEDULES + adaptive)
        self._check_choice("box_policy", BOX_POLICIES)
        self._check_choice("on_nonfinite", ("stop", "skip"))
        self._check(self.dual_clip is None or self.dual_clip > 1, "dual_clip", "above 1, or null")
        self._check(self.max_kl is None or self.max_kl > 0, "max_kl", "positive, or null")

    def _check(self, fact: bool, name: str, rule: str) -> None:
        check(fact, f"agent.{name}", rule, getattr(self, name))

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        self._check(getattr(self, name) in choices, name, " | ".join(choices))


@dataclass
class VecEnvConfig:
    """How the envs run: in this process, in workers, or in both; the keys are ParallelEnv's."""

    mode: str = "auto"
    n_workers: Optional[int] = None  # None: one per core that this process may use
    start_method: Optional[str] = None  # None: spawn, which is safe beside torch's threads
    step_timeout_seconds: Optional[float] = 300.0  # None waits for ever, but sees a death
    infos: str = "final"  # PPO reads those of ended episodes only, and of all for action masks
    check_finite: bool = False
    on_worker_death: str = "raise"
    max_restarts: int = 10

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
    """A whole run; conf/train.yaml composes it."""

    n_envs: Any = 8  # or "auto", until the door has found a number by measuring
    seed: int = 1
    total_steps: float = 100_000  # env steps over all envs: a budget, see wanted_steps
    num_episodes: Optional[int] = None  # calls of train_episode_vectorized, instead of total_steps
    device: str = "auto"
    compile: str = "auto"  # or off, or graph: compile and capture what runs on a GPU
    precision: str = "float32"  # of products on a GPU, or tf32 or bf16: faster, less exact
    resume: Optional[str] = None  # a run folder to go on in
    trust: bool = False  # resume envs that another user has saved: that can run any code
    objective: str = "rollout/episode_return_mean_100"  # the metric that sweepers maximise
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: PPOConfig = field(default_factory=PPOConfig)
    network: dict[str, Any] = field(default_factory=dict)  # a _target_ entry
    vec_env: VecEnvConfig = field(default_factory=VecEnvConfig)
    collector: str = "sync"  # or double: act in one half of the envs while the other half works
    logger: dict[str, Any] = field(default_factory=dict)  # name -> _target_ entry
    callbacks: dict[str, Any] = field(default_factory=dict)  # name -> _target_ entry

    def __post_init__(self) -> None:
        self.n_envs = self._checked_n_envs()
        check(0 <= self.seed < 2**31, "seed", "between 0 and 2147483647", self.seed)
        self.total_steps = whole_steps("total_steps", self.total_steps)
        if self.num_episodes is not None:
            check(self.num_episodes >= 1, "num_episodes", "at least 1", self.num_episodes)
        named = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None
        check(named, "device", "auto | cpu | cuda | cuda:N | mps", self.device)
        if self.compile == "False":  # what YAML makes of an off without quotes
            self.compile = "off"
        check(self.compile in COMPILE_MODES, "compile", " | ".join(COMPILE_MODES), self.compile)
        known = self.precision in PRECISIONS
        check(known, "precision", " | ".join(PRECISIONS), self.precision)
        check(self.collector in COLLECTORS, "collector", " | ".join(COLLECTORS), self.collector)
        if self.collector == "double":
            even = self.n_envs != "auto" and self.n_envs % 2 == 0
            check(even, "n_envs", "even with collector=double", self.n_envs)
        n_steps, n_minibatches = self.agent.n_steps, self.agent.n_minibatches
        if self.n_envs != "auto" and not self.fits(self.n_envs):
            raise ValueError(
                f"a rollout of agent.n_steps {n_steps} x n_envs {self.n_envs} = "
                f"{n_steps * self.n_envs} transitions cannot be cut into agent.n_minibatches="
                f"{n_minibatches} equal minibatches; choose one of its divisors"
            )

    def _checked_n_envs(self) -> Any:
        if self.n_envs == "auto":
            return self.n_envs
        whole = isinstance(self.n_envs, int) and not isinstance(self.n_envs, bool)
        check(whole and self.n_envs >= 1, "n_envs", "auto, or at least 1", self.n_envs)
        return self.n_envs

    def fits(self, n_envs: int) -> bool:
        """Whether a rollout of so many envs can be cut into equal minibatches."""
        return (self.agent.n_steps * n_envs) % self.agent.n_minibatches == 0

    def suits(self, n_envs: int) -> bool:
        """Whether so many envs fit, and leave a run time to learn: ten iterations at least."""
        budget = math.inf if self.num_episodes is not None else self.total_steps
        return self.fits(n_envs) and 10 * self.agent.n_steps * n_envs <= budget

    @property
    def rollout_steps(self) -> int:
        """Env steps of one iteration."""
        return self.agent.n_steps * int(self.n_envs)

    @property
    def wanted_steps(self) -> int:
        """Env steps after which the run is complete: the whole rollouts that fit, at least one."""
        if self.num_episodes is not None:
            return self.num_episodes * self.rollout_steps
        return max(int(self.total_steps) // self.rollout_steps, 1) * self.rollout_steps
