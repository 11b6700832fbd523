"""PPOConfig: the hyperparameters of PPO, and which sizes fit together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.config.checks import check

BOX_POLICIES = ("gaussian", "squashed", "gsde")


@dataclass
class PPOConfig(AgentConfig):
    """Hyperparameters of PPO; conf/agent/ppo.yaml and experiments hold what differs.

    A ``_schedule`` keeps its value constant, or anneals it to zero along a line or half a cosine.
    It may also be the dotted path of a function: from the progress, 0 to 1, to a factor. An
    ``adaptive`` learning rate tracks ``target_kl``.
    """

    algorithm: str = "ml_pipeline.algorithms.ppo.algorithm.PPO"
    action_mask: str = "auto"
    learning_rate: float = 1e-3
    # constant | linear | cosine (both to 0 at total_steps) | adaptive | your.function
    learning_rate_schedule: str = "linear"
    target_kl: float = 0.01  # target KL divergence per epoch of learning_rate_schedule=adaptive
    adam_eps: float = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    n_steps: int = 128  # steps per env and rollout; a rollout has n_steps x n_envs transitions
    n_epochs: int = 10  # passes over each rollout
    # Equal parts of a rollout; must divide n_steps x n_envs (recurrent: n_envs)
    n_minibatches: int = 8
    clip_range: float = 0.2
    clip_range_schedule: str = "constant"  # constant | linear | cosine
    # Upper bound of the ratio if the advantage is negative, for example 3.0
    dual_clip: Optional[float] = None
    entropy_coef: float = 0.0
    entropy_coef_schedule: str = "constant"  # constant | linear | cosine
    value_coef: float = 0.5  # weight of half the mean squared error
    clip_value_loss: bool = False  # keep new values within clip_range of the rollout's values
    max_grad_norm: float = 0.5
    # Stop the iteration after an epoch with a larger approx_kl, for example 0.02
    max_kl: Optional[float] = None
    normalize_advantage: bool = True  # per minibatch of at least two transitions
    # Gain sqrt(2) in the network, 0.01 in the policy head, 1 in the value head
    orthogonal_init: bool = True
    shared_trunk: bool = False  # true: policy and value share one network, as is usual for images
    normalize_obs: bool = False  # with the running mean and standard deviation
    clip_obs: float = 10.0  # clip normalised observations to this many standard deviations
    # Divide rewards by the running standard deviation of the discounted return
    scale_reward: bool = False
    clip_reward: float = 10.0  # largest absolute value of a scaled reward
    # gaussian | squashed (by tanh, into the bounds) | gsde (smooth in time)
    box_policy: str = "gaussian"
    log_std_init: float = 0.0
    gsde_every_steps: int = 4  # steps between draws of gsde noise; 0: draw once per rollout
    on_nonfinite: str = "stop"  # stop | skip a minibatch whose loss or gradient is not finite
    # auto: NumPy or Triton for small MLPs, checked against plain torch | off: plain torch
    fast: str = "auto"
    # Places for your own functions and classes: docs/ideas.md
    loss: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "ml_pipeline.algorithms.ppo.loss.ppo_loss"}
    )
    # Such as torch.optim.AdamW with weight_decay; betas and eps of another one are its own keys
    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.optim.Adam"})
    advantage: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "ml_pipeline.training.returns.gae"}
    )
    recompute_advantages: bool = False  # before each further epoch, with the newest critic
    # Called with each rollout before its values are computed; may change its rewards
    on_rollout: Optional[dict[str, Any]] = None
    # Leaves of a Dict observation, such as {actor: [joints], critic: [joints, terrain]}; null: all
    obs_groups: Optional[dict[str, list[str]]] = None

    @property
    def allows_nonfinite(self) -> bool:
        return self.on_nonfinite == "skip"

    @property
    def needs_box(self) -> str | None:
        return "agent.box_policy=gsde" if self.box_policy == "gsde" else None

    @property
    def has_critic(self) -> bool:
        return not self.shared_trunk

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
            self._check_schedule(f"{name}_schedule", adaptive)
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
