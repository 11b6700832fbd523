"""DQNConfig: the hyperparameters of DQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ml_pipeline.algorithms.replay.config import OffPolicyConfig


@dataclass
class DQNConfig(OffPolicyConfig):
    """Hyperparameters of DQN; conf/agent/dqn.yaml and experiments hold what differs."""

    algorithm: str = "ml_pipeline.algorithms.dqn.algorithm.DQN"
    action_mask: str = "auto"
    learning_rate: float = 1e-3
    max_grad_norm: Optional[float] = 10.0
    batch_size: int = 128
    updates_per_env_step: float = 0.5
    # auto: NumPy for small MLPs, checked against plain torch | off: plain torch
    fast: str = "auto"
    double: bool = True  # the online network picks the next action, the target network scores it
    duelling: bool = True  # separate heads for the value and the advantages
    n_quantiles: int = 1  # above 1: QR-DQN, for example 50
    target_every: int = 250  # gradient steps between two copies to the target network
    epsilon_start: float = 1.0  # share of random actions
    epsilon_end: float = 0.05
    epsilon_share: float = 0.2  # share of the run in which epsilon falls to epsilon_end
    priority_exponent: float = 0.0  # 0: uniform replay; 0.6 is usual for prioritised replay
    priority_beta: float = 0.4  # exponent of the importance weights; rises to 1 at the end

    @property
    def replay_exponent(self) -> float:
        return self.priority_exponent

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epsilon_start", "epsilon_end", "epsilon_share", "priority_beta"):
            self._check(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        for name in ("n_quantiles", "target_every"):
            self._check(getattr(self, name) >= 1, name, "at least 1")
        self._check(self.priority_exponent >= 0, "priority_exponent", "at least 0")

    def epsilon(self, progress: float) -> float:
        """Share of random actions at ``progress`` (0 to 1) through the run."""
        share = 1.0 if self.epsilon_share == 0 else min(progress / self.epsilon_share, 1.0)
        return self.epsilon_start + share * (self.epsilon_end - self.epsilon_start)
