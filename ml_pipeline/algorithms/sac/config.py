"""SACConfig: the hyperparameters of SAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ml_pipeline.algorithms.replay.config import OffPolicyConfig


@dataclass
class SACConfig(OffPolicyConfig):
    """Hyperparameters of SAC; conf/agent/sac.yaml and experiments hold what differs."""

    algorithm: str = "ml_pipeline.algorithms.sac.algorithm.SAC"
    action_mask: str = "auto"
    buffer_size: float = 1_000_000
    # auto: gradients by hand for MLPs, checked against plain torch | off: plain torch
    fast: str = "auto"
    tau: float = 0.005  # share of the critics that moves into their targets per update
    # null: learned, so that the entropy is target_entropy; or a fixed weight
    temperature: Optional[float] = None
    temperature_init: float = 1.0  # of a learned temperature
    # null: -dim(A), or 0.5 * log(n) of n allowed discrete actions
    target_entropy: Optional[float] = None
    policy_delay: int = 1  # critic updates per update of actor and temperature
    critic_layer_norm: bool = False  # after each linear layer of the critics
    # squashed | gsde: noise that depends on the state and lasts several steps
    box_policy: str = "squashed"
    log_std_init: float = -3.0  # of gSDE
    gsde_every_steps: int = 4  # steps between two draws of gSDE noise; 0: one draw per iteration

    @property
    def needs_box(self) -> str | None:
        return "agent.box_policy=gsde" if self.box_policy == "gsde" else None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._check(self.policy_delay >= 1, "policy_delay", "at least 1")
        self._check(self.gsde_every_steps >= 0, "gsde_every_steps", "at least 0")
        self._check_choice("box_policy", ("squashed", "gsde"))
        self._check(self.temperature_init > 0, "temperature_init", "positive")
        temperature = self.temperature
        self._check(temperature is None or temperature >= 0, "temperature", "at least 0, or null")
