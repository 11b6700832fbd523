"""Changing or removing every bar after row t changes no bit of the rows up to t."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from market_rows import changed_after, random_bars, write_table

from ml_pipeline.worlds.trading.config import NORMALISERS
from ml_pipeline.worlds.trading.data.bars import Bars
from ml_pipeline.worlds.trading.data.features import _MAKERS
from ml_pipeline.worlds.trading.data.load import load_market, load_recipe, new_market, read_new_bars
from ml_pipeline.worlds.trading.data.market import Market

FEATURES = [
    *("time_of_day", "time_of_week", "return_1", "return_24", "rsi_14", "ema_50", "atr_14"),
    *("bollinger_20_2", "volatility_24", "volume_24", "column_signal"),
]
N_TIMES = 4  # columns that depend on the time alone
# Row 4,499 is behind the first block of a recursion and ends a bar of 3 hours; row 60 does not.
N_BARS, ROW = 5_000, 4_499
# Row 4,499 is a bar of the validation period.
PERIODS = {"validation": "2024-07-01", "test": "2024-07-20"}
ARRAYS = Market._fields[2:]


def bars_of(seed: int) -> Bars:
    """Each symbol misses other bars."""
    keep = np.random.default_rng(seed).random(N_BARS) > 0.1
    return random_bars(N_BARS, seed=seed).rows(np.flatnonzero(keep))


def files(folder: Path, *, until: int | None = None) -> dict[str, Any]:
    """Arguments of load_market for two symbols; their bars after the time ``until`` differ."""
    folder.mkdir()
    for seed, name in enumerate(("A", "B")):
        bars = bars_of(seed)
        if until is not None:
            bars = changed_after(bars, int(np.searchsorted(bars.time, until, side="right")) - 1)
        write_table(folder / f"{name}.csv", bars)
    cache = str(folder / "cache")
    return {"path": str(folder), "label": "end", "features": FEATURES, "cache_dir": cache}


def same_rows(one: Market, other: Market, n_rows: int) -> bool:
    return all(
        np.array_equal(getattr(one, name)[:n_rows], getattr(other, name)[:n_rows])
        for name in ARRAYS
    )


def test_every_feature_has_an_example_here() -> None:
    for name in _MAKERS:
        assert any(example.startswith(name) for example in FEATURES), name


@pytest.mark.parametrize("bar", ["1h", "3h"])
@pytest.mark.parametrize(
    ("normalise", "row"), [("none", 60), *((name, ROW) for name in NORMALISERS)]
)
def test_market_of_files_does_not_see_later_bars(
    tmp_path: Path, normalise: str, bar: str, row: int
) -> None:
    """Through features, normaliser, resampling and alignment."""
    until = int(random_bars(N_BARS).time[row])
    settings = {"bar": bar, "normalise": normalise, **PERIODS}

    old = load_market(period="all", **files(tmp_path / "old"), **settings)
    new = load_market(period="all", **files(tmp_path / "new", until=until), **settings)

    n_rows = int(np.searchsorted(old.time, until, side="right"))
    assert same_rows(old, new, n_rows)
    # Else the test could not fail: every feature of every symbol differs soon afterwards.
    differs = (old.feature != new.feature)[n_rows : n_rows + 5].any(axis=0)
    assert differs[:, N_TIMES:].all()


@pytest.mark.parametrize("bar", ["1h", "3h"])
def test_market_of_files_that_end_earlier_is_the_same(tmp_path: Path, bar: str) -> None:
    settings = {**files(tmp_path / "old"), "bar": bar}
    recipe = load_recipe(**settings)
    bars = read_new_bars(settings["path"], recipe, label="end")
    whole = new_market(bars, recipe)

    until = int(random_bars(N_BARS).time[ROW])
    short = new_market({name: each.rows(each.time <= until) for name, each in bars.items()}, recipe)

    assert len(short.time) > 1_000
    assert same_rows(whole, short, len(short.time))
