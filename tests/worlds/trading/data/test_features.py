"""Features: equal to TA-Lib, equal to a plain loop, and what they do at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import talib
from market_rows import random_bars
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.bars import Bars
from ml_pipeline.worlds.trading.data.features import parsed
from ml_pipeline.worlds.trading.data.market import DataError
from ml_pipeline.worlds.trading.data.rolling import recursive_mean, rolling_mean, rolling_std

Array = NDArray[np.float64]


def computed(name: str, bars: Bars) -> list[Array]:
    feature = parsed(name)
    values = feature.compute(bars)
    assert all(len(each) == len(bars.time) - feature.warmup for each in values)
    assert len(values) == len(feature.columns)
    return values


def check(name: str, bars: Bars, *expected: Array) -> None:
    """TA-Lib has NaN in exactly the rows of the warm-up."""
    warmup = parsed(name).warmup
    for ours, theirs in zip(computed(name, bars), expected, strict=True):
        assert np.isnan(theirs[:warmup]).all()
        np.testing.assert_allclose(ours, theirs[warmup:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [2, 14, 50])
@pytest.mark.parametrize("length", [60, 10_000])  # more than one block of the recursion
def test_features_equal_those_of_ta_lib(n: int, length: int) -> None:
    bars = random_bars(length, seed=n)
    close = bars.close

    check(f"rsi_{n}", bars, talib.RSI(close, n))
    check(f"ema_{n}", bars, close / talib.EMA(close, n) - 1.0)
    check(f"atr_{n}", bars, talib.ATR(bars.high, bars.low, close, n) / close)
    check(f"return_{n}", bars, np.log(talib.ROCR(close, n)))
    check(f"volume_{n}", bars, bars.volume / talib.SMA(bars.volume, n) - 1.0)


@pytest.mark.parametrize(("n", "width"), [(5, 2), (20, 2), (50, 2.5)])
def test_bollinger_and_volatility_equal_those_of_ta_lib(n: int, width: float) -> None:
    bars = random_bars(5_000, seed=n)
    close = bars.close
    upper, middle, lower = talib.BBANDS(close, n, width, width)
    returns = np.concatenate([[0.0], np.diff(np.log(close))])

    ours = computed(f"bollinger_{n}_{width}", bars)
    volatility = computed(f"volatility_{n}", bars)[0]

    # TA-Lib subtracts squares, which costs it digits; ours takes two passes.
    np.testing.assert_allclose(ours[0], ((close - lower) / (upper - lower))[n - 1 :], rtol=1e-6)
    np.testing.assert_allclose(ours[1], ((upper - lower) / middle)[n - 1 :], rtol=1e-6)
    np.testing.assert_allclose(volatility, talib.STDDEV(returns, n)[n:], rtol=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.1, 1e-4])  # the last one remembers many blocks
def test_recursive_mean_equals_a_plain_loop(weight: float) -> None:
    x = np.random.default_rng(3).standard_normal(13_000) + 5.0
    expected, value = [], 7.0
    for each in x:
        value = (1.0 - weight) * value + weight * each
        expected.append(value)

    result = recursive_mean(x, start=7.0, weight=weight)

    np.testing.assert_allclose(result, expected, rtol=1e-13)


def test_rolling_mean_and_deviation_equal_those_of_each_window() -> None:
    x = np.random.default_rng(3).standard_normal(20_000) + 5.0

    windows = np.lib.stride_tricks.sliding_window_view(x, 30)
    np.testing.assert_allclose(rolling_mean(x, 30), windows.mean(axis=1), rtol=1e-13)
    np.testing.assert_allclose(rolling_std(x, 30), windows.std(axis=1), rtol=1e-12)


def test_recursive_mean_of_a_longer_series_starts_with_the_same_bits() -> None:
    x = np.random.default_rng(3).standard_normal(9_000)

    for n in (0, 1, 100, 4_096, 4_097, 8_192):
        short = recursive_mean(x[:n], start=1.0, weight=0.1)
        assert np.array_equal(short, recursive_mean(x, start=1.0, weight=0.1)[:n])


def test_time_of_day_and_week_are_those_of_the_end_of_a_bar_in_utc() -> None:
    bars = random_bars(24 * 7, start="2024-01-01")  # a Monday; row 5 ends at 06:00

    day, week = computed("time_of_day", bars), computed("time_of_week", bars)

    assert np.allclose([day[0][5], day[1][5]], [1.0, 0.0])
    assert np.allclose([day[0][11], day[1][11]], [0.0, -1.0])
    assert np.allclose([week[0][41], week[1][41]], [1.0, 0.0])  # a quarter of a week: 42 hours


def test_prices_that_do_not_move_give_finite_features() -> None:
    flat = np.full(100, 0.1 + 0.2)
    bars = random_bars(100)._replace(
        open=flat, high=flat, low=flat, close=flat, volume=np.zeros(100)
    )

    found = {
        name: [each[-1] for each in computed(name, bars)]
        for name in ("return_1", "rsi_14", "ema_10", "atr_14", "bollinger_20_2", "volume_5")
    }

    assert found["rsi_14"] == [0.5 * 100]
    assert found["bollinger_20_2"][0] == 0.5
    assert found["volume_5"] == [0.0]
    assert all(np.isfinite(value).all() for value in found.values())
    assert np.allclose([found["return_1"][0], found["ema_10"][0], found["atr_14"][0]], 0.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("macd_3", "features=macd_3: unknown; choose from return, rsi"),
        ("rsi", "features=rsi: must be written as rsi_BARS"),
        ("rsi_14_3", "features=rsi_14_3: must be written as rsi_BARS"),
        ("rsi_0", "features=rsi_0: BARS=0 must be an integer of at least 1"),
        ("rsi_2.5", "features=rsi_2.5: BARS=2.5 must be an integer"),
        ("bollinger_20_0", "features=bollinger_20_0: WIDTH=0 must be positive"),
        ("time_of_day_3", "features=time_of_day_3: must be written as time_of_day"),
        ("RSI 14", "features=RSI 14: unknown"),
    ],
)
def test_wrong_name_is_refused(name: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason.replace(".", r"\.")):
        parsed(name)
