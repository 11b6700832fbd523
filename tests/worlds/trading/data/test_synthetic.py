"""Synthetic markets: reproducible, with the statistics that docs/market_data.md promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ml_pipeline.worlds.trading.config import MARKETS
from ml_pipeline.worlds.trading.data.align import aligned
from ml_pipeline.worlds.trading.data.bars import Bars, check_bars
from ml_pipeline.worlds.trading.data.edge import optimal_sharpe
from ml_pipeline.worlds.trading.data.features import parsed
from ml_pipeline.worlds.trading.data.synthetic import synthetic_bars

N_BARS = 200_000
ERROR = 4.0 / math.sqrt(N_BARS)  # four standard errors of a mean with variance 1


def made(market: str, n_bars: int = N_BARS, **more: Any) -> dict[str, Bars]:
    settings = {"n_symbols": 1, "bar": "1h", "seed": 1, "parameters": {}, **more}
    return synthetic_bars(market, n_bars=n_bars, **settings)


def returns(bars: Bars) -> Any:
    return bars.close / bars.open - 1.0


@pytest.mark.parametrize("market", MARKETS)
def test_seed_decides_the_bars_and_symbols_differ(market: str) -> None:
    one, same = made(market, 500, n_symbols=2), made(market, 500, n_symbols=3)
    other = made(market, 500, seed=2)

    assert list(same) == ["SYN0", "SYN1", "SYN2"]
    assert np.array_equal(one["SYN1"].close, same["SYN1"].close)
    assert not np.array_equal(one["SYN0"].close[:400], one["SYN1"].close[:400])
    assert not np.array_equal(one["SYN0"].close[:400], other["SYN0"].close[:400])
    for bars in one.values():
        check_bars(bars, str)


@pytest.mark.parametrize("correlation", [0.1, 0.2, 0.5])
def test_signal_of_the_edge_earns_the_sharpe_ratio_of_the_formula(correlation: float) -> None:
    bars = made("edge", parameters={"correlation": correlation})["SYN0"]
    # Decided at the close of t, filled at the open of t + 1, marked at its close.
    signal, earned = bars.columns["signal"][:-1], returns(bars)[1:]

    def sharpe(position: Any) -> float:
        profit = position * earned
        return float(profit.mean() / profit.std())

    second = correlation**2 * signal**2 + 1.0 - correlation**2
    discrete = max(
        sharpe(np.sign(signal) * (correlation * np.abs(signal) > c * second))
        for c in np.linspace(0.0, correlation, 30)
    )
    assert abs(sharpe(np.sign(signal)) - optimal_sharpe(correlation, positions="sign")) < ERROR
    assert (
        abs(sharpe(signal / second) - optimal_sharpe(correlation, positions="continuous")) < ERROR
    )
    assert abs(discrete - optimal_sharpe(correlation)) < ERROR


def test_optimal_sharpe_has_the_limits_of_a_small_correlation() -> None:
    # For rho -> 0: E|s|, the best threshold 0.612 of a normal s, and 1.
    ratios = [
        optimal_sharpe(1e-4, positions=each) / 1e-4 for each in ("sign", "discrete", "continuous")
    ]

    assert np.allclose(ratios, [math.sqrt(2 / math.pi), 0.8999, 1.0], atol=1e-3)


def test_open_of_the_edge_is_the_close_before() -> None:
    bars = made("edge", 1_000)["SYN0"]

    assert np.array_equal(bars.open[1:], bars.close[:-1])


@pytest.mark.parametrize(("market", "expected"), [("edge", 0.2), ("random_walk", 0.0)])
def test_signal_predicts_the_next_return_only_in_the_edge(market: str, expected: float) -> None:
    bars = made(market)["SYN0"]
    signal, change = bars.columns["signal"], returns(bars)

    assert abs(np.corrcoef(signal[:-1], change[1:])[0, 1] - expected) < ERROR
    assert abs(change.std() - 0.005) < 0.005 * ERROR
    assert abs(np.corrcoef(signal[:-1], signal[1:])[0, 1] - 0.9) < ERROR
    assert abs(signal.std() - 1.0) < 10 * ERROR  # 0.9 leaves about a tenth of the samples


def test_random_walk_has_no_memory() -> None:
    change = returns(made("random_walk")["SYN0"])

    for lag in (1, 2, 5):
        assert abs(np.corrcoef(change[:-lag], change[lag:])[0, 1]) < ERROR


def test_regimes_switch_between_volatilities() -> None:
    parameters = {"duration": 500.0, "ratio": 3.0, "volatility": 0.001}
    change = returns(made("regimes", parameters=parameters)["SYN0"])

    windows = change[: N_BARS // 50 * 50].reshape(-1, 50).std(axis=1)

    # Two of three regimes are calm.
    assert 0.5 < np.mean(windows < 0.0015) < 0.75
    assert 0.2 < np.mean(windows > 0.0024) < 0.4


def test_gaps_are_weekends_jumps_and_bars_that_single_symbols_miss() -> None:
    bars = made("gaps", 24 * 7 * 20, n_symbols=2)
    market = aligned(bars, [parsed("return_1")])

    day = np.asarray(market.time - 3_600_000_000_000, "datetime64[ns]").astype("datetime64[D]")
    weekday = (day.astype(int) + 3) % 7
    assert 5 not in weekday  # no bar starts on a Saturday
    step = np.diff(market.time) // 3_600_000_000_000
    assert set(step[step > 12]) <= set(range(47, 60))
    assert 0.002 < (~market.tradable).mean() < 0.02
    single = bars["SYN0"]
    jump = single.open[1:] / single.close[:-1] - 1.0
    reopens = np.diff(single.time) > 24 * 3_600_000_000_000
    assert np.array_equal(jump != 0.0, reopens)
