"""Walks of trading policies over a period, and the verdict on them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from trading_markets import FREE, flat_market, random_market

from ml_pipeline.analysis.evaluate import MAX_EPISODE_STEPS
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.judgement import MIN_BARS, as_json, judge
from ml_pipeline.worlds.trading.walk import Walk, WalkError, buy_and_hold, walk

FLAT, LONG, SHORT = 1, 2, 0  # of the positions -1, 0, 1
HOUR = 3_600_000_000_000


class Always:
    """A policy that takes the same action in every env."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def act_batch(self, obs: Any, deterministic: bool = False, **_: Any) -> Any:
        assert deterministic
        return np.array([self.action] * len(obs))

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Any) -> None:
        return None


def whole(market: Market, **settings: Any) -> list[Trading]:
    """One env per symbol, from the first row to the last."""
    common = {"account": FREE, **settings, "market": market, "random_start": False}
    return [Trading(**common, symbol=name) for name in market.symbols]


def walk_of(returns: Any, hold: Any = None) -> Walk:
    """A walk with these returns, one account, bars of an hour."""
    equity = np.concatenate(([1.0], np.cumprod(1.0 + returns)))
    held = np.ones_like(equity) if hold is None else np.concatenate(([1.0], np.cumprod(1.0 + hold)))
    size = np.ones((len(equity), 1))
    time = np.arange(len(equity)) * HOUR
    return Walk(("A",), time, equity[:, None], size, size, held, np.ones(1), [], {})


def judged(*walks: Walk, n_trials: int = 1, is_held_out: bool = True) -> Any:
    named = {f"run {number}": each for number, each in enumerate(walks)}
    return judge(named, period="test", n_trials=n_trials, is_held_out=is_held_out)


def with_sharpe(ratio: float, n_bars: int = 2_000, seed: int = 0) -> Any:
    """Normal returns whose estimated ratio is exactly this one."""
    noise = np.random.default_rng(seed).normal(size=n_bars)
    return 0.01 * ((noise - noise.mean()) / noise.std(ddof=1) + ratio)


def test_equity_of_a_walk_by_hand() -> None:
    # Bought at the open of the second bar, 10; a share of 0.1 % of the value is the commission.
    market = flat_market([10.0, 12.0, 9.0])
    found = walk(Always(LONG), whole(market, account={**FREE, "commission": 0.001}))

    units = 1.0 / 1.001 / 10.0
    np.testing.assert_allclose(found.equity[:, 0], [1.0, units * 12.0, units * 9.0])
    np.testing.assert_allclose(found.hold, found.equity[:, 0])
    np.testing.assert_allclose(found.exposure[:, 0], [0.0, 1.0, 1.0])
    assert found.time.tolist() == market.time.tolist()
    (trade,) = found.trades
    assert (trade.time, trade.symbol, trade.reason) == (int(market.time[1]), "A", "order")
    assert trade.units == pytest.approx(10_000 * units)
    assert trade.cost == pytest.approx(0.001 * 10_000 * units * 10.0)


def test_walk_begins_after_the_first_window_and_sees_every_bar() -> None:
    market = random_market(50)
    found = walk(Always(SHORT), whole(market, window=5))

    assert found.accounts == market.symbols
    assert found.time.tolist() == market.time[4:].tolist()
    assert found.equity.shape == (46, 3)
    assert (found.exposure[-1] < 0.0).all()


@pytest.mark.slow
def test_long_period_is_not_cut() -> None:
    n_bars = MAX_EPISODE_STEPS + 10
    market = flat_market([10.0] * n_bars + [20.0])

    found = walk(Always(LONG), whole(market))

    assert len(found.equity) == n_bars + 1
    assert found.equity[-1, 0] == pytest.approx(2.0)


def test_closed_account_stays_flat_and_the_others_go_on() -> None:
    market = random_market(60, volatility=0.05, seed=3)
    account = {**FREE, "max_drawdown": 0.4}
    found = walk(Always(LONG), whole(market, account=account))

    assert 0 < len(found.closed) < 3
    for number, name in enumerate(found.accounts):
        alone = [trade for trade in found.trades if trade.symbol == name]
        assert (name in found.closed) == (alone[-1].reason == "forced")
        if name in found.closed:
            row = int(np.flatnonzero(market.time == found.closed[name])[0])
            assert np.ptp(found.equity[row:, number]) == 0.0
            assert found.gross[row + 1 :, number].max() == 0.0
    (line,) = [each for each in judged(found).remarks if "closed the account" in each][:1]
    assert "flat afterwards" in line


def test_walk_stops_when_every_account_is_closed() -> None:
    market = flat_market([10.0, 8.0, 20.0, 20.0])
    found = walk(Always(LONG), whole(market, account={**FREE, "max_drawdown": 0.1}))

    np.testing.assert_allclose(found.equity[:, 0], [1.0, 0.8, 0.8, 0.8])


def test_portfolio_is_one_account() -> None:
    market = random_market(80)
    common: dict[str, Any] = {"market": market, "random_start": False, "account": FREE}
    found = walk(Always([LONG, LONG, SHORT]), [Trading(**common, portfolio=True)])

    assert found.accounts == ("portfolio",)
    assert {trade.symbol for trade in found.trades} == set(market.symbols)
    assert found.gross[-1, 0] == pytest.approx(1.0, abs=0.05)
    assert abs(found.exposure[-1, 0]) < 0.6


def test_buy_and_hold_pays_costs_once_and_shares_the_capital() -> None:
    market = random_market(40, seed=5)._replace(tradable=np.ones((40, 3), dtype=bool))
    costs = {"commission": 0.01, "spread": 0.0}
    task = Trading(market=market, random_start=False, account=costs).task

    equity = buy_and_hold(task, market.symbols)

    np.testing.assert_allclose(equity[1:], (market.close / market.open[1] / 1.01).mean(1)[1:])


def test_random_start_is_refused() -> None:
    env = Trading(market=random_market(60), episode_bars=20, symbol="S0")

    with pytest.raises(WalkError, match="random_start=True"):
        walk(Always(FLAT), [env])


def test_wrapper_that_ends_the_episode_is_refused() -> None:
    (env,) = whole(flat_market([10.0] * 20))

    with pytest.raises(WalkError, match="the env ended after 5 of 19 bars"):
        walk(Always(FLAT), [gym.wrappers.TimeLimit(env, 5)])


def test_strong_returns_on_held_out_bars_are_an_edge() -> None:
    found = judged(walk_of(with_sharpe(0.1)))

    assert found.claims_edge
    assert found.verdict.startswith("an edge can be claimed on the period test: Sharpe ratio")
    assert found.sharpe == pytest.approx(0.1 * np.sqrt(24 * 365.25))
    assert found.policy.sharpe.low < found.sharpe < found.policy.sharpe.high


@pytest.mark.parametrize(
    ("made", "settings", "reason"),
    [
        (walk_of(with_sharpe(0.1)), {"n_trials": 10_000}, "best of 10,000 trials without skill"),
        (walk_of(with_sharpe(0.1)), {"is_held_out": False}, "was trained on these bars"),
        (walk_of(with_sharpe(0.5, MIN_BARS - 1)), {}, "fewer than 250"),
        (walk_of(with_sharpe(0.03)), {}, "is below 0.95"),
        (walk_of(with_sharpe(-0.1)), {}, "is not above 0"),
        (walk_of(np.zeros(500)), {}, "the equity does not move"),
        (walk_of(with_sharpe(0.1), with_sharpe(0.1)), {}, "better benchmark, 0.00 to 0.00, is not"),
        (walk_of(with_sharpe(0.1), with_sharpe(0.1, seed=1)), {}, "is not above 0"),
    ],
)
def test_each_condition_prevents_a_claim(made: Walk, settings: Any, reason: str) -> None:
    found = judged(made, **settings)

    assert not found.claims_edge
    assert found.verdict.startswith("no edge can be claimed on the period test")
    assert reason in found.verdict


def test_a_losing_benchmark_does_not_help() -> None:
    """The benchmark is the better of cash and buy-and-hold."""
    found = judged(walk_of(with_sharpe(0.02), with_sharpe(-0.3)))

    assert not found.claims_edge
    assert found.excess.value == pytest.approx(found.sharpe)


def test_several_runs_share_the_capital_and_count_as_trials() -> None:
    walks = [walk_of(with_sharpe(0.1, seed=seed)) for seed in range(3)]
    found = judged(*walks)

    assert found.n_trials == 3
    assert [part.name for part in found.runs] == ["run 0", "run 1", "run 2"]
    np.testing.assert_allclose(found.equity, np.mean([each.equity[:, 0] for each in walks], axis=0))
    assert found.sharpe > max(part.figures.sharpe for part in found.runs)  # independent runs


def test_runs_over_other_bars_are_refused() -> None:
    with pytest.raises(WalkError, match="run 1: walks other bars than run 0"):
        judged(walk_of(with_sharpe(0.1)), walk_of(with_sharpe(0.1, 1_999)))


def test_json_has_no_infinite_numbers() -> None:
    told = as_json(judged(walk_of(np.array([0.0, *[0.01] * 300]))))

    assert told["strategy"]["sortino"] is None
    assert told["strategy"]["calmar"] is None
    assert told["claims_edge"] in (True, False)
