"""Several symbols on one time axis, resampling and periods, with numbers that fit on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from market_rows import HOUR, random_bars, utc

from ml_pipeline.worlds.trading.data.align import aligned
from ml_pipeline.worlds.trading.data.bars import Bars, bar_text, nanoseconds, resampled
from ml_pipeline.worlds.trading.data.features import parsed
from ml_pipeline.worlds.trading.data.load import periods
from ml_pipeline.worlds.trading.data.market import DataError, periods_per_year

START = utc("2024-01-01")


def bars_at(hours: list[int], prices: list[float]) -> Bars:
    """Bars that end at these hours; each opens 1 below its close."""
    close = np.array(prices)
    time = START + HOUR * np.array(hours, dtype=np.int64)
    signal = {"signal": close * 10}
    return Bars(time, close - 1, close, close - 1, close, close * 100, close / 100, signal)


def test_gap_repeats_the_last_close_and_cannot_be_traded() -> None:
    a = bars_at([1, 2, 3, 4, 5], [10.0, 11.0, 12.0, 13.0, 14.0])
    b = bars_at([1, 3, 4], [20.0, 22.0, 23.0])  # none at 2; the last one is at 4

    market = aligned({"A": a, "B": b}, [parsed("column_signal"), parsed("time_of_day")])

    assert market.symbols == ("A", "B")
    assert market.tradable[:, 1].tolist() == [True, False, True, True, False]
    assert market.open[:, 1].tolist() == [19.0, 20.0, 21.0, 22.0, 23.0]
    for name in ("high", "close"):
        assert getattr(market, name)[:, 1].tolist() == [20.0, 20.0, 22.0, 23.0, 23.0]
    assert market.low[:, 1].tolist() == [19.0, 20.0, 21.0, 22.0, 23.0]
    assert market.volume[:, 1].tolist() == [2000.0, 0.0, 2200.0, 2300.0, 0.0]
    assert market.spread[:, 1].tolist() == [0.2, 0.2, 0.22, 0.23, 0.23]
    assert market.feature[:, 1, 0].tolist() == [200.0, 200.0, 220.0, 230.0, 230.0]
    assert np.array_equal(market.feature[:, 0, 1:], market.feature[:, 1, 1:])  # the time goes on


def test_market_starts_when_every_symbol_has_its_features() -> None:
    a = bars_at([1, 2, 3, 4, 5], [10.0, 11.0, 12.0, 13.0, 14.0])
    b = bars_at([3, 4, 5], [20.0, 22.0, 23.0])

    market = aligned({"A": a, "B": b}, [parsed("return_1")])

    assert market.time.tolist() == [START + 4 * HOUR, START + 5 * HOUR]
    assert market.tradable.all()
    assert np.allclose(market.feature[0, :, 0], np.log([13 / 12, 22 / 20]))


def test_time_at_which_no_symbol_has_a_bar_is_not_a_row() -> None:
    market = aligned({"A": bars_at([1, 2, 50, 51], [1.5, 2.5, 3.5, 4.5])}, [parsed("return_1")])

    assert market.time.tolist() == [START + hour * HOUR for hour in (2, 50, 51)]
    assert market.tradable.all()


def test_features_use_the_bars_of_their_own_symbol_only() -> None:
    a, b = random_bars(60, seed=1), random_bars(60, seed=2)
    thinned = b.rows(np.array([row for row in range(60) if row % 3]))
    feature = parsed("rsi_5")

    market = aligned({"A": a, "B": thinned}, [feature])

    rows = market.tradable[:, 1]
    assert np.array_equal(market.feature[rows, 1, 0], feature.compute(thinned)[0][-rows.sum() :])


def test_symbols_that_do_not_overlap_are_refused() -> None:
    a, b = bars_at([1, 2], [1.5, 2.5]), bars_at([8, 9], [1.5, 2.5])

    with pytest.raises(DataError, match="symbols: A ends at 2024-01-01 02:00:00, before B has"):
        aligned({"A": a, "B": b}, [parsed("return_1")])


def test_too_few_bars_for_the_features_are_refused() -> None:
    with pytest.raises(DataError, match="too short: A has 9 bars, the features need 15"):
        aligned({"A": random_bars(9)}, [parsed("rsi_14")])


def test_long_bar_is_labelled_by_its_end_and_holds_the_bars_that_end_in_it() -> None:
    bars = bars_at([1, 2, 3, 4, 5, 8, 9], [10.0, 12.0, 11.0, 9.0, 15.0, 18.0, 19.0])

    result = resampled(bars, HOUR, 4 * HOUR, "X")

    # Hours 1-4 and 5-8; the bar of hour 9 can still grow.
    assert result.time.tolist() == [START + 4 * HOUR, START + 8 * HOUR]
    assert result.open.tolist() == [9.0, 14.0]
    assert result.high.tolist() == [12.0, 18.0]
    assert result.low.tolist() == [8.0, 14.0]
    assert result.close.tolist() == [9.0, 18.0]
    assert result.volume.tolist() == [4200.0, 3300.0]
    assert result.spread.tolist() == [0.09, 0.18]
    assert result.columns["signal"].tolist() == [90.0, 180.0]


def test_the_end_of_a_gap_shows_that_a_long_bar_is_complete() -> None:
    bars = bars_at([1, 2, 9], [10.0, 12.0, 11.0])

    result = resampled(bars, HOUR, 4 * HOUR, "X")

    assert result.time.tolist() == [START + 4 * HOUR]


@pytest.mark.parametrize("wanted", ["30m", "90m"])
def test_bar_that_is_not_a_multiple_is_refused(wanted: str) -> None:
    with pytest.raises(DataError, match=f"bar={wanted}: must be a multiple of the bars of X"):
        resampled(random_bars(9), HOUR, nanoseconds(wanted), "X")


@pytest.mark.parametrize("text", ["1s", "15m", "4h", "1d"])
def test_bar_length_is_written_as_it_is_read(text: str) -> None:
    assert bar_text(nanoseconds(text)) == text


TIME = START + HOUR * np.arange(1, 101)


def rows_of(**settings: Any) -> dict[str, tuple[int, int]]:
    settings = {"validation": 0.2, "test": 0.1, "embargo": 0, **settings}
    return {name: (each.start, each.stop) for name, each in periods(TIME, **settings).items()}


def test_shares_count_rows_and_the_test_period_is_last() -> None:
    expected = {"train": (0, 70), "validation": (70, 90), "test": (90, 100), "all": (0, 100)}
    assert rows_of() == expected


def test_embargo_is_dropped_before_validation_and_before_test() -> None:
    assert rows_of(embargo=5) == {
        "train": (0, 65),
        "validation": (70, 85),
        "test": (90, 100),
        "all": (0, 100),
    }


def test_a_bar_that_ends_at_midnight_belongs_to_the_day_before() -> None:
    rows = rows_of(validation="2024-01-02", test="2024-01-03 12:00", embargo=0)

    assert rows["train"] == (0, 24)  # row 23 ends at 2024-01-02 00:00
    assert rows["validation"] == (24, 60)


def test_period_with_a_share_of_zero_is_empty() -> None:
    assert rows_of(validation=0, embargo=3)["validation"] == (90, 90)
    assert rows_of(validation=0, embargo=3)["train"] == (0, 87)
    assert rows_of(validation=0, test=0, embargo=3)["train"] == (0, 100)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"embargo": 69}, "leave no train period"),
        ({"embargo": 19}, "leave no validation period"),
        ({"validation": "2024-01-05"}, "validation=2024-01-05: must be before test=0.1"),
        ({"test": "2025-01-01", "validation": "2024-13-01"}, "not a date such as 2024-01-31"),
    ],
)
def test_periods_that_do_not_fit_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        rows_of(**settings)


def test_periods_per_year_count_closed_hours_too() -> None:
    year = 365.25 * 24

    assert np.isclose(periods_per_year(TIME), year)
    assert np.isclose(periods_per_year(TIME[::2]), year / 2)
