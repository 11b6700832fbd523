"""OpponentReport: copies join by its rule, and the rating follows all games of the run."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.opponent_report import OpponentReport
from ml_pipeline.records import Metrics


class Named:
    """The weights of a copy do not matter here."""

    def named_parameters(self) -> list[Any]:
        return []

    named_buffers = named_parameters


def made(**settings: Any) -> tuple[OpponentReport, OpponentPool, Any]:
    greedy: Any = Named()
    pool = OpponentPool(greedy, OpponentConfig(**settings), {}, seed=1)
    pool.add(greedy, 0)
    agent = SimpleNamespace(greedy=lambda: greedy)
    loop: Any = SimpleNamespace(env_steps=0, agent=agent, is_last_iteration=lambda: False)
    return OpponentReport(pool), pool, loop


def after(report: OpponentReport, loop: Any, env_steps: int) -> Metrics:
    loop.env_steps = env_steps
    metrics: Metrics = {}
    report.on_iteration_end(loop, metrics)
    return metrics


def test_a_copy_joins_after_its_steps_and_only_with_the_wanted_score() -> None:
    report, pool, loop = made(add_every_steps=100, add_at_score=0.6)
    pool.count(pool.selves[0], [5, 0, 5])
    assert after(report, loop, 100)["opponents/win_rate"] == 0.5
    assert len(pool.selves) == 1
    pool.count(pool.selves[0], [10, 0, 0])
    after(report, loop, 120)
    assert [each.name for each in pool.selves] == ["self at 0", "self at 120"]
    pool.count(pool.selves[1], [9, 0, 0])
    after(report, loop, 219)
    assert len(pool.selves) == 2
    after(report, loop, 220)
    assert len(pool.selves) == 3


def test_the_rating_rises_with_every_copy_that_beats_the_one_before() -> None:
    report, pool, loop = made(add_every_steps=100)
    ratings = []
    for number in range(1, 6):
        pool.count(pool.selves[-1], [60, 0, 20])
        ratings.append(after(report, loop, 100 * number)["opponents/rating"])
    assert ratings[0] == pytest.approx(1_000 + 400 * 0.477, abs=15)  # odds of 3 to 1
    assert all(190 * 0.8 < b - a < 190 * 1.2 for a, b in pairwise(ratings))


def test_a_rating_of_many_players_waits_for_more_games() -> None:
    report, pool, loop = made(add_every_steps=1, capacity=100)
    for number in range(1, 61):
        pool.count(pool.selves[-1], [2, 0, 1])
        after(report, loop, number)
    before = after(report, loop, 61)["opponents/rating"]
    pool.count(pool.selves[-1], [60, 0, 0])  # fewer than 0.05 * 62 ** 2
    assert after(report, loop, 62)["opponents/rating"] == before
    pool.count(pool.selves[-1], [200, 0, 0])
    assert after(report, loop, 63)["opponents/rating"] > before
