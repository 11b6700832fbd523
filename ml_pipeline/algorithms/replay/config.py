"""OffPolicyConfig: the settings that DQN and SAC share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.config.checks import check


@dataclass
class OffPolicyConfig(AgentConfig):
    """Learns from a replay buffer while the envs step.

    ``updates_per_env_step`` does not depend on the number of envs: with 8 envs and 1.0, each step
    of all envs is followed by 8 gradient steps.
    """

    learning_rate: float = 3e-4
    # constant | linear | cosine (both to 0 at total_steps) | your.function
    learning_rate_schedule: str = "constant"
    adam_eps: float = 1e-8
    max_grad_norm: Optional[float] = None  # null: gradients are not clipped
    gamma: float = 0.99
    n_step: int = 1  # rewards that are summed before the bootstrap
    buffer_size: float = 100_000  # transitions, over all envs
    stacked_frames: int = 1  # above 1: observations are stacks, and replay stores each frame once
    batch_size: int = 256
    learning_starts: float = 1_000  # env steps with random actions before the first update
    updates_per_env_step: float = 1.0  # does not depend on n_envs
    iteration_length: int = 32  # steps of each env between two log lines
    normalize_obs: bool = False  # by running mean and standard deviation, when sampled
    clip_obs: float = 10.0  # standard deviations
    fast: str = "auto"  # auto: fast code, checked against plain torch | off: plain torch

    def __post_init__(self) -> None:
        if self.fast == "False":  # YAML reads an unquoted off as false
            self.fast = "off"
        self._check_choice("fast", ("auto", "off"))
        for name, value in vars(self).items():
            if isinstance(value, (int, float)):
                check(math.isfinite(value), f"agent.{name}", "finite", value)
        for name in ("learning_rate", "adam_eps", "clip_obs"):
            self._check(getattr(self, name) > 0, name, "positive")
        for name in ("n_step", "batch_size", "iteration_length", "buffer_size", "stacked_frames"):
            self._check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("learning_starts", "updates_per_env_step"):
            self._check(getattr(self, name) >= 0, name, "at least 0")
        self._check(0 <= self.gamma <= 1, "gamma", "between 0 and 1")
        self._check_schedule("learning_rate_schedule")
        most = f"at most agent.buffer_size={self.buffer_size:g}"
        self._check(self.batch_size <= self.buffer_size, "batch_size", most)
        clip = self.max_grad_norm
        self._check(clip is None or clip > 0, "max_grad_norm", "positive, or null")
        for name in ("buffer_size", "learning_starts"):
            value = getattr(self, name)
            self._check(float(value).is_integer(), name, "an integer")
            setattr(self, name, int(value))

    @property
    def replay_exponent(self) -> float:
        """How strongly priorities decide which transitions are replayed; 0: not at all."""
        return 0.0

    @property
    def needs_processes(self) -> str | None:
        return (
            "agent.stacked_frames; set agent.stacked_frames=1" if self.stacked_frames > 1 else None
        )

    def why_not_double(self) -> str | None:
        return "replay learns while envs step"

    def iteration_steps(self, n_envs: int) -> int:
        return self.iteration_length * n_envs

    def why_not(self, n_envs: int, *, recurrent: bool = False) -> str | None:
        least = (self.n_step + 1) * n_envs
        if self.buffer_size < least:
            return (
                f"agent.buffer_size={self.buffer_size}: too small; n_envs={n_envs} and "
                f"agent.n_step={self.n_step} need at least {least}"
            )
        return None

    def remark(self, env_steps: int) -> str | None:
        if env_steps > self.learning_starts or not self.updates_per_env_step:
            return None
        return (
            f"agent.learning_starts={self.learning_starts}: this run of {env_steps:,} env steps "
            "ends before its first update; use more total_steps, or a smaller agent.learning_starts"
        )
