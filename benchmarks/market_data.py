"""Time to read market files, to compute each feature, and to load a market with and without cache.

    python benchmarks/market_data.py
    python benchmarks/market_data.py --bars 1000000 --folder /path/on/a/fast/disk

Writes a random walk of one-minute bars as CSV and Parquet in CCXT's layout. The files stay in the
page cache, so the time to read them is that of parsing and checking.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ml_pipeline.worlds.trading.data.features import parsed
from ml_pipeline.worlds.trading.data.files import read_bars
from ml_pipeline.worlds.trading.data.load import load_market

FEATURES = (
    *("return_1", "rsi_14", "ema_50", "atr_14", "bollinger_20_2", "volatility_24"),
    *("volatility_200", "volume_24", "time_of_day"),
)


def write(folder: Path, n_bars: int) -> None:
    random = np.random.default_rng(0)
    close = np.round(100.0 * np.exp(np.cumsum(0.0005 * random.standard_normal(n_bars))), 5)
    before = np.concatenate([[100.0], close[:-1]])
    columns = {
        "timestamp": 1_262_304_000_000 + 60_000 * np.arange(n_bars),
        "open": before,
        "high": np.maximum(before, close),
        "low": np.minimum(before, close),
        "close": close,
        "volume": np.round(1_000 * random.random(n_bars), 3),
    }
    table = pa.table(columns)
    pa.parquet.write_table(table, folder / "X.parquet")
    pa.csv.write_csv(table, folder / "X.csv", pa.csv.WriteOptions(quoting_style="none"))


@contextmanager
def timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"  {name:<28}{time.perf_counter() - start:8.3f} s", flush=True)


def measure(folder: Path, n_bars: int) -> None:
    print(f"{n_bars:,} bars, {os.cpu_count()} cores, {platform.machine()}, {date.today()}")
    write(folder, n_bars)
    for name in ("X.parquet", "X.csv"):
        with timed(f"read {name}"):
            bars = read_bars([folder / name])[0]["X"]
    for name in FEATURES:
        with timed(name):
            parsed(name).compute(bars)
    del bars
    for name in ("first load_market", "second load_market"):
        with timed(name):
            load_market(
                period="all", path=str(folder / "X.parquet"), cache_dir=str(folder / "cache")
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bars", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.bars)


if __name__ == "__main__":
    main()
