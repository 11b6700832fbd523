"""Changing every bar after row t changes no bit of rows up to t: features, normalisers,
resampling, alignment and the whole way from files to a market."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from market_rows import HOUR, changed_after, random_bars, write_table

from ml_pipeline.worlds.trading.config import NORMALISERS
from ml_pipeline.worlds.trading.data.align import aligned
from ml_pipeline.worlds.trading.data.bars import resampled
from ml_pipeline.worlds.trading.data.features import _MAKERS, parsed
from ml_pipeline.worlds.trading.data.load import load_market
from ml_pipeline.worlds.trading.data.market import Market
from ml_pipeline.worlds.trading.data.normalise import fitted, normalised

EXAMPLES = (
    *("return_1", "return_24", "rsi_14", "ema_50", "atr_14", "bollinger_20_2", "volatility_24"),
    *("volume_24", "time_of_day", "time_of_week", "column_signal"),
)
N_BARS, ROW = 5_000, 4_500  # behind the first block of a recursion


def test_every_feature_has_an_example_here() -> None:
    for name in _MAKERS:
        assert any(example.startswith(name) for example in EXAMPLES), name


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("row", [60, ROW])
def test_feature_does_not_see_later_bars(name: str, row: int) -> None:
    bars = random_bars(N_BARS)
    feature = parsed(name)

    before = feature.compute(bars)
    after = feature.compute(changed_after(bars, row))

    n_rows = row + 1 - feature.warmup
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[:n_rows], new[:n_rows])
        if not feature.only_time:  # else the test could not fail
            assert not np.array_equal(old[n_rows:], new[n_rows:])


@pytest.mark.parametrize("name", EXAMPLES)
def test_feature_of_a_file_that_ends_earlier_is_the_same(name: str) -> None:
    bars = random_bars(N_BARS)
    feature = parsed(name)

    whole = feature.compute(bars)
    short = feature.compute(bars.rows(slice(0, ROW)))

    for long, cut in zip(whole, short, strict=True):
        assert np.array_equal(long[: len(cut)], cut)


def same_rows(one: Market, other: Market, n_rows: int) -> bool:
    names = Market._fields[2:]
    return all(
        np.array_equal(getattr(one, name)[:n_rows], getattr(other, name)[:n_rows]) for name in names
    )


@pytest.mark.parametrize("normalise", NORMALISERS)
def test_normaliser_does_not_see_bars_after_the_train_period(normalise: str) -> None:
    features = [parsed(name) for name in EXAMPLES]
    bars = random_bars(1_000)
    markets = [aligned({"A": each}, features) for each in (bars, changed_after(bars, 800))]
    end = int(np.searchsorted(markets[0].time, bars.time[800])) + 1

    old, new = (
        each._replace(feature=normalised(each.feature, fitted(each, slice(0, end), normalise)))
        for each in markets
    )

    assert same_rows(old, new, end)
    assert not same_rows(old, new, end + 1)


def test_resampled_bars_up_to_t_do_not_see_later_bars() -> None:
    bars = random_bars(200)
    old = resampled(bars, HOUR, 4 * HOUR, "A")

    for row in (96, 97, 98, 99):
        new = resampled(changed_after(bars, row), HOUR, 4 * HOUR, "A")
        n_rows = int(np.searchsorted(old.time, bars.time[row], side="right"))
        for name in ("time", "open", "high", "low", "close", "volume", "spread"):
            assert np.array_equal(getattr(old, name)[:n_rows], getattr(new, name)[:n_rows])
        assert old.close[n_rows] != new.close[n_rows]


def test_alignment_does_not_see_later_bars_of_any_symbol() -> None:
    features = [parsed(name) for name in ("return_1", "rsi_14", "column_signal")]
    a, b = random_bars(300, seed=1), random_bars(300, seed=2)
    b = b.rows(np.flatnonzero(np.random.default_rng(0).random(300) > 0.2))
    old = aligned({"A": a, "B": b}, features)
    t = int(a.time[200])

    changed = {
        name: changed_after(each, int(np.searchsorted(each.time, t, side="right")) - 1)
        for name, each in (("A", a), ("B", b))
    }
    new = aligned(changed, features)

    n_rows = int(np.searchsorted(old.time, t, side="right"))
    assert same_rows(old, new, n_rows)
    assert not same_rows(old, new, n_rows + 1)


@pytest.mark.parametrize("bar", ["1h", "3h"])
def test_train_period_of_files_does_not_see_later_bars(tmp_path: Path, bar: str) -> None:
    def market(folder: str, n_known: int | None, period: str) -> Market:
        (tmp_path / folder).mkdir(exist_ok=True)
        for seed, name in enumerate(("A", "B")):
            bars = random_bars(1_500, seed=seed)
            known = bars if n_known is None else changed_after(bars, n_known - 1)
            write_table(tmp_path / folder / f"{name}.csv", known)
        settings = {"features": list(EXAMPLES), "label": "end", "bar": bar, "cache_dir": "cache"}
        settings["cache_dir"] = str(tmp_path / "cache")
        return load_market(period=period, path=str(tmp_path / folder), **settings)

    old = market("old", None, "train")
    n_known = int((old.time[-1] - random_bars(1).time[0]) // HOUR) + 1
    new = market("new", n_known, "train")

    assert same_rows(old, new, len(old.time))
    later = market("old", None, "validation"), market("new", n_known, "validation")
    assert not same_rows(*later, 1)
