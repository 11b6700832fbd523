"""Random bars and helpers that the tests of market data share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline.worlds.trading.data.bars import Bars

FILES = Path(__file__).parent / "data" / "files"
HOUR = 3_600_000_000_000


def utc(text: str) -> int:
    return int(np.datetime64(text, "ns").astype(np.int64))


def random_bars(n: int, *, seed: int = 0, length: int = HOUR, start: str = "2024-01-01") -> Bars:
    """Bars that end every ``length`` nanoseconds, with a column signal."""
    random = np.random.default_rng(seed)
    close = 100.0 * np.exp(np.cumsum(0.01 * random.standard_normal(n)))
    open_ = close * np.exp(0.005 * random.standard_normal(n))
    high = np.maximum(open_, close) * (1.0 + 0.01 * random.random(n))
    low = np.minimum(open_, close) * (1.0 - 0.01 * random.random(n))
    time = utc(start) + length * np.arange(1, n + 1)
    volume, signal = 1_000.0 * random.random(n), random.standard_normal(n)
    return Bars(time, open_, high, low, close, volume, 0.001 * close, {"signal": signal})


def changed_after(bars: Bars, row: int, *, seed: int = 9) -> Bars:
    """The same bars up to ``row``, and all later ones with other values at the same times."""
    random = np.random.default_rng(seed)
    factor = np.exp(random.standard_normal(len(bars.time)))
    factor[: row + 1] = 1.0
    numbers = {
        name: getattr(bars, name) * factor
        for name in ("open", "high", "low", "close", "volume", "spread")
    }
    columns = {name: array * factor for name, array in bars.columns.items()}
    return bars._replace(**numbers, columns=columns)


def write_table(path: Path, bars: Bars, **more: Any) -> Path:
    """A CSV file with times as nanoseconds of the END of a bar."""
    names = ("time", "open", "high", "low", "close", "volume", "spread")
    columns = {name: getattr(bars, name) for name in names} | dict(bars.columns) | more
    rows = zip(*(array.tolist() for array in columns.values()), strict=True)
    lines = [",".join(columns), *(",".join(map(repr, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
