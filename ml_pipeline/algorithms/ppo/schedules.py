"""Schedules: the annealed settings of PPO, by progress through the run or by the measured KL."""

from __future__ import annotations

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.records import Rates
from ml_pipeline.training.schedules import annealed

_SLOWEST, _FASTEST = 1e-6, 1e-2  # bounds of an adaptive learning rate


class Schedules:
    """``adaptive_learning_rate`` is its only state."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self.uses_kl = config.max_kl is not None or config.learning_rate_schedule == "adaptive"
        self.adaptive_learning_rate = config.learning_rate

    def rates(self, progress: float) -> Rates:
        """The settings at ``progress`` (0 to 1) through the run."""
        config, learning_rate = self._config, self.adaptive_learning_rate
        if config.learning_rate_schedule != "adaptive":
            schedule = config.learning_rate_schedule
            learning_rate = annealed(config.learning_rate, schedule, progress)
        return Rates(
            learning_rate,
            annealed(config.clip_range, config.clip_range_schedule, progress),
            annealed(config.entropy_coef, config.entropy_coef_schedule, progress),
        )

    def adapted(self, rates: Rates, kl: float) -> Rates:
        """A higher learning rate while the KL is below ``target_kl``, a lower one above it."""
        config, learning_rate = self._config, rates.learning_rate
        if config.learning_rate_schedule != "adaptive":
            return rates
        if kl > 2.0 * config.target_kl:
            learning_rate = max(learning_rate / 1.5, min(_SLOWEST, config.learning_rate))
        elif kl < 0.5 * config.target_kl:
            learning_rate = min(learning_rate * 1.5, max(_FASTEST, config.learning_rate))
        self.adaptive_learning_rate = learning_rate
        return rates._replace(learning_rate=learning_rate)

    def is_kl_too_large(self, kl: float) -> bool:
        return self._config.max_kl is not None and kl > self._config.max_kl
