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


def next_multiple(every: int, steps: int) -> int:
    """The first multiple of ``every`` beyond ``steps``."""
    return (steps // every + 1) * every


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
        return self.target.rpartition(".")[2] if self.target else str(self.id)


@dataclass
class PPOConfig:
    """Hyperparameters of PPO; conf/agent/ppo.yaml spells out the same defaults."""

    learning_rate: float = 1e-3
    anneal_learning_rate: bool = True  # linearly to zero at the end of the run
    gamma: float = 0.99
    gae_lambda: float = 0.95
    n_steps: int = 128  # per env and rollout
    n_epochs: int = 10
    n_minibatches: int = 8
    clip_range: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check(math.isfinite(value), f"agent.{name}", "finite", value)
        check(self.learning_rate > 0, "agent.learning_rate", "positive", self.learning_rate)
        check(0 <= self.gamma <= 1, "agent.gamma", "between 0 and 1", self.gamma)
        check(0 <= self.gae_lambda <= 1, "agent.gae_lambda", "between 0 and 1", self.gae_lambda)
        for name in ("n_steps", "n_epochs", "n_minibatches"):
            check(getattr(self, name) >= 1, f"agent.{name}", "at least 1", getattr(self, name))
        check(self.clip_range > 0, "agent.clip_range", "positive", self.clip_range)
        check(self.entropy_coef >= 0, "agent.entropy_coef", "at least 0", self.entropy_coef)
        check(self.value_coef >= 0, "agent.value_coef", "at least 0", self.value_coef)
        check(self.max_grad_norm > 0, "agent.max_grad_norm", "positive", self.max_grad_norm)


@dataclass
class VecEnvConfig:
    """How the envs run: in this process, in workers, or in both; the keys are ParallelEnv's."""

    mode: str = "auto"
    n_workers: Optional[int] = None  # None: one per core that this process may use
    start_method: Optional[str] = None  # None: spawn, which is safe beside torch's threads
    step_timeout_seconds: Optional[float] = 300.0  # None waits for ever, but sees a death
    infos: str = "final"  # PPO reads those of ended episodes only
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
    """A whole run; conf/train_ppo.yaml composes it."""

    n_envs: Any = 8  # or "auto", until the door has found a number by measuring
    seed: int = 1
    total_steps: float = 100_000  # env steps over all envs: a budget, see wanted_steps
    num_episodes: Optional[int] = None  # calls of train_episode_vectorized, instead of total_steps
    device: str = "auto"
    resume: Optional[str] = None  # a run folder to go on in
    objective: str = "rollout/episode_return_mean_100"  # the metric that sweepers maximise
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: PPOConfig = field(default_factory=PPOConfig)
    network: dict[str, Any] = field(default_factory=dict)  # a _target_ entry
    vec_env: VecEnvConfig = field(default_factory=VecEnvConfig)
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
