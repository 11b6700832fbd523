"""Schedules: annealed settings by progress, the learning rate by the KL."""

from __future__ import annotations

from typing import Any

import pytest

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.algorithms.ppo.trainer import Schedules


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_rates_follow_their_schedule(schedule: str, shares: list[float]) -> None:
    full = Rates(learning_rate=0.01, clip_range=0.2, entropy_coef=0.1)
    kinds: Any = {f"{name}_schedule": schedule for name in full._fields}
    schedules = Schedules(PPOConfig(**full._asdict(), **kinds))

    for progress, share in zip((0.0, 0.25, 0.5, 0.75, 1.0), shares, strict=True):
        expected = [share * value for value in full]
        assert schedules.rates(progress) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("kl", "learning_rate"), [(0.021, 1e-3 / 1.5), (0.02, 1e-3), (0.005, 1e-3), (0.004, 1.5e-3)]
)
def test_an_adaptive_learning_rate_follows_the_kl(kl: float, learning_rate: float) -> None:
    config = PPOConfig(learning_rate_schedule="adaptive", learning_rate=1e-3, target_kl=0.01)
    schedules = Schedules(config)

    rates = schedules.adapted(schedules.rates(0.5), kl)

    assert rates.learning_rate == pytest.approx(learning_rate)
    assert schedules.rates(0.9) == rates  # kept, independent of the progress


@pytest.mark.parametrize(("kl", "limit"), [(1.0, 1e-6), (0.0, 1e-2)])
def test_an_adaptive_learning_rate_is_bounded(kl: float, limit: float) -> None:
    schedules = Schedules(PPOConfig(learning_rate_schedule="adaptive"))
    for _ in range(50):
        schedules.adapted(schedules.rates(0.0), kl)

    assert schedules.rates(0.0).learning_rate == pytest.approx(limit)


def test_other_learning_rates_ignore_the_kl() -> None:
    schedules = Schedules(PPOConfig(max_kl=0.1))
    rates = schedules.rates(0.5)

    assert schedules.adapted(rates, 1.0) == rates
    assert schedules.is_kl_too_large(0.11)
    assert not schedules.is_kl_too_large(0.1)
    assert not Schedules(PPOConfig()).is_kl_too_large(100.0)
