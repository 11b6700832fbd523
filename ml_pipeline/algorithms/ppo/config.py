"""PPOConfig: the hyperparameters of PPO, and which sizes fit together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.config.checks import check

SCHEDULES = ("constant", "linear", "cosine")
BOX_POLICIES = ("gaussian", "squashed", "gsde")


@dataclass
class PPOConfig(AgentConfig):
    """conf/agent/ppo.yaml spells out the same defaults.

    A ``_schedule`` keeps its value constant, or anneals it to zero along a line or half a cosine.
    An ``adaptive`` learning rate tracks ``target_kl``.
    """

    algorithm: str = "ml_pipeline.algorithms.ppo.algorithm.PPO"
    action_mask: str = "auto"  # or none, info, or the key of a Dict observation
    learning_rate: float = 1e-3
    learning_rate_schedule: str = "linear"
    target_kl: float = 0.01  # the KL that learning_rate_schedule=adaptive aims for
    adam_eps: float = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    n_steps: int = 128  # per env and rollout
    n_epochs: int = 10
    n_minibatches: int = 8
    clip_range: float = 0.2
    clip_range_schedule: str = "constant"
    dual_clip: Optional[float] = None  # upper bound of the ratio where the advantage is negative
    entropy_coef: float = 0.0
    entropy_coef_schedule: str = "constant"
    value_coef: float = 0.5
    clip_value_loss: bool = False  # by clip_range, around the value at sampling time
    max_grad_norm: float = 0.5
    max_kl: Optional[float] = None  # stop the iteration after an epoch with a larger approx_kl
    normalize_advantage: bool = True  # per minibatch
    orthogonal_init: bool = True
    shared_trunk: bool = False  # one network for policy and value
    normalize_obs: bool = False  # by running mean and standard deviation
    clip_obs: float = 10.0  # standard deviations
    scale_reward: bool = False  # by the running standard deviation of the discounted return
    clip_reward: float = 10.0  # of the scaled reward
    box_policy: str = "gaussian"
    log_std_init: float = 0.0
    gsde_every_steps: int = 4  # steps between two draws of gSDE noise; 0: one draw per rollout
    on_nonfinite: str = "stop"
    fast: str = "auto"  # off: plain torch only
    loss: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "ml_pipeline.algorithms.ppo.loss.ppo_loss"}
    )

    @property
    def allows_nonfinite(self) -> bool:
        return self.on_nonfinite == "skip"

    @property
    def needs_box(self) -> str | None:
        return "agent.box_policy=gsde" if self.box_policy == "gsde" else None

    def __post_init__(self) -> None:
        if self.fast == "False":  # YAML reads an unquoted off as false
            self.fast = "off"
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
        self._check_choice("fast", ("auto", "off"))
        self._check(self.dual_clip is None or self.dual_clip > 1, "dual_clip", "above 1, or null")
        self._check(self.max_kl is None or self.max_kl > 0, "max_kl", "positive, or null")

    def iteration_steps(self, n_envs: int) -> int:
        return self.n_steps * n_envs

    def why_not(self, n_envs: int, *, recurrent: bool = False) -> str | None:
        """A rollout must divide into equal minibatches; a recurrent one by whole sequences."""
        if recurrent:
            n_items, items = n_envs, f"n_envs={n_envs} sequences of a recurrent network"
        else:
            n_items = self.n_steps * n_envs
            items = f"agent.n_steps={self.n_steps} x n_envs={n_envs} = {n_items} transitions"
        if n_items % self.n_minibatches == 0:
            return None
        return (
            f"agent.n_minibatches={self.n_minibatches}: {items} do not divide into "
            f"{self.n_minibatches} equal minibatches; choose a divisor of {n_items}"
        )
