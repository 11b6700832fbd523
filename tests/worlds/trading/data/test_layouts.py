"""The layouts of market files, each with a small file whose values are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from market_rows import FILES, HOUR, random_bars, utc, write_table

from ml_pipeline.worlds.trading.data.bars import Bars
from ml_pipeline.worlds.trading.data.files import market_files, read_bars, symbol_of
from ml_pipeline.worlds.trading.data.layouts import PLAIN, FileFormat
from ml_pipeline.worlds.trading.data.read import read_file

MINUTE = HOUR // 60
ENDS = FileFormat(label="end")


def read(name: str, form: FileFormat = PLAIN, **options: Any) -> tuple[dict[str, Bars], int]:
    return read_bars(market_files(str(FILES / name)), form, **options)


def test_binance_changes_from_milliseconds_to_microseconds_between_two_files() -> None:
    bars, length = read("BTCUSDT-1h-*.csv")

    btc = bars["BTCUSDT"]
    assert length == HOUR
    assert list(btc.time) == [utc("2024-12-31T23:00") + i * HOUR for i in range(4)]
    assert list(btc.close) == [93600.0, 93400.0, 93800.0, 93950.0]
    assert list(btc.volume) == [10.5, 8.25, 12.0, 9.5]


def test_binance_futures_have_a_header(tmp_path: Path) -> None:
    header = (
        "open_time,open,high,low,close,volume,close_time,quote_volume,count,"
        "taker_buy_volume,taker_buy_quote_volume,ignore\n"
    )
    rows = (FILES / "BTCUSDT-1h-2024-12.csv").read_text()
    path = tmp_path / "BTCUSDT-1h-2024-12.csv"
    path.write_text(header + rows)

    result = read_file(path, PLAIN)

    plain = read_file(FILES / path.name, PLAIN)
    assert (result.layout, plain.layout) == ("binance", "binance")
    assert list(result.bars[None].time) == list(plain.bars[None].time)


def test_histdata_is_five_hours_behind_utc_in_summer_too() -> None:
    bars, length = read("DAT_ASCII_EURUSD_M1_2023.csv")

    assert length == MINUTE
    assert list(bars["EURUSD"].time) == [utc("2023-07-02T05:00") + i * MINUTE for i in range(3)]
    assert list(bars["EURUSD"].open) == [1.0911, 1.09115, 1.09125]


def test_mt5_has_the_clock_of_the_broker_and_a_spread_in_points() -> None:
    bars, _ = read("EURUSD_M1_*.csv", FileFormat(timezone="America/New_York+07:00"))

    eur = bars["EURUSD"]
    # Midnight at the broker is 17:00 in New York: 22:00 UTC in winter, 21:00 UTC in summer.
    assert list(eur.time[[0, 2]]) == [utc("2024-01-14T22:01"), utc("2024-07-14T21:01")]
    assert np.allclose(eur.spread, [0.00012, 0.00009, 0.00011, 0.0001], rtol=1e-12, atol=0)
    assert list(eur.volume) == [35.0, 41.0, 28.0, 30.0]


@pytest.mark.parametrize("name", ["ccxt_header.csv", "ccxt_plain.csv"])
def test_ccxt_with_and_without_a_header(name: str) -> None:
    result = read_file(FILES / name, PLAIN)
    bars, _ = read(name)

    assert result.layout == "ccxt"
    assert list(bars[Path(name).stem].time) == [utc("2024-01-01T01:00"), utc("2024-01-01T02:00")]
    assert list(bars[Path(name).stem].high) == [42554.57, 42775.0]


def test_yfinance_with_the_offsets_of_winter_and_summer_in_one_file() -> None:
    bars, length = read("yfinance_flat.csv")

    apple = bars["yfinance_flat"]
    ends = ("2024-03-08T21:30", "2024-03-11T14:30", "2024-03-11T15:30", "2024-03-11T16:30")
    assert length == HOUR
    assert list(apple.time) == [utc(each) for each in ends]
    assert list(apple.close) == [170.73, 172.75, 174.0, 173.5]


def test_yfinance_with_three_header_lines_has_the_days_of_each_symbol() -> None:
    bars, length = read("yfinance_multi.csv", symbols=["BTC-USD", "AAPL"])

    assert list(bars) == ["BTC-USD", "AAPL"]
    assert length == 24 * HOUR
    assert list(bars["AAPL"].close) == [181.18, 185.56, 185.14, 186.19]
    assert list(bars["BTC-USD"].open[:4]) == [44192.98, 44178.95, 43998.46, 43948.71]
    assert bars["BTC-USD"].time[0] == utc("2024-01-06")


def test_table_with_a_symbol_column_an_own_column_and_times_of_the_end() -> None:
    bars, length = read("table.csv", ENDS, further=["signal"], length=2 * HOUR, symbols=["AAA"])
    whole, _ = read("table.csv", further=["signal"], symbols=["AAA"])

    assert length == 2 * HOUR
    assert list(bars["AAA"].time) == [utc("2024-01-01T02:00")]  # the next one is not complete
    assert list(whole["AAA"].time) == [utc("2024-01-01T02:00") + i * HOUR for i in range(3)]
    assert list(whole["AAA"].columns["signal"]) == [0.5, 0.25, 0.125]
    assert list(whole["AAA"].spread) == [0.01] * 3


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_with_other_names_are_read_by_the_map(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    bars = random_bars(5)
    names = {"time": "When", "close": "Last", "symbol": "Coin", "volume": "lots"}
    own = {"time": [0] * 5, "close": [0.0] * 5}  # ours by name, but the map names others
    theirs = {
        **own,
        "When": bars.time,
        "Coin": ["BTC"] * 5,
        "open": bars.open,
        "High": bars.high,
        "low": bars.low,
        "Last": bars.close,
        "lots": bars.volume,
        "Signal": bars.close,
    }
    path = tmp_path / f"X.{suffix}"
    (csv.write_csv if suffix == "csv" else pq.write_table)(pa.table(theirs), path)

    found, _ = read_bars([path], FileFormat(label="end", columns=names), further=["signal"])

    for name in ("time", "open", "high", "low", "close", "volume"):
        assert np.array_equal(getattr(found["BTC"], name), getattr(bars, name))
    assert np.array_equal(found["BTC"].columns["signal"], bars.close)


def test_map_makes_a_table_of_a_file_that_looks_like_another_layout() -> None:
    named = FileFormat(label="end", columns={"time": "Datetime"})

    bars, _ = read("yfinance_flat.csv", named)

    ends = ("2024-03-08T20:30", "2024-03-11T13:30", "2024-03-11T14:30", "2024-03-11T15:30")
    assert list(bars["yfinance_flat"].time) == [utc(each) for each in ends]


@pytest.mark.parametrize("unit", ["ns", "us", "utc", "new_york", "int"])
def test_parquet_has_the_same_bars_as_csv(tmp_path: Path, unit: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bars = random_bars(30)
    text = write_table(tmp_path / "X.csv", bars)
    types = {
        "ns": pa.timestamp("ns"),
        "us": pa.timestamp("us"),
        "utc": pa.timestamp("ns", "UTC"),
        "new_york": pa.timestamp("ns", "America/New_York"),
        "int": pa.int64(),
    }
    times = pa.array(bars.time, pa.int64()).cast(pa.timestamp("ns")).cast(types["us"])
    times = pa.array(bars.time, pa.int64()) if unit == "int" else times.cast(types[unit])
    names = ("open", "high", "low", "close", "volume", "spread")
    columns = {name.title(): getattr(bars, name) for name in names}
    pq.write_table(pa.table({"Date": times, **columns}), tmp_path / "X.parquet")

    from_text, _ = read_bars([text], ENDS)
    from_parquet, _ = read_bars([tmp_path / "X.parquet"], ENDS)

    for name in ("time", *names):
        expected = getattr(bars, name)
        assert np.array_equal(getattr(from_text["X"], name), expected)
        assert np.array_equal(getattr(from_parquet["X"], name), expected)


@pytest.mark.parametrize(
    ("file", "symbol"),
    [
        ("BTCUSDT-1m-2024-01-31.csv", "BTCUSDT"),
        ("DAT_ASCII_EURUSD_M1_202301.csv", "EURUSD"),
        ("GBPUSD_H1_202301020000_202312292300.csv", "GBPUSD"),
        ("GBPUSD_Daily.csv", "GBPUSD"),
        ("BTC_USDT.parquet", "BTC_USDT"),
        ("AAPL.csv", "AAPL"),
    ],
)
def test_symbol_comes_from_the_name_of_the_file(file: str, symbol: str) -> None:
    assert symbol_of(Path(file)) == symbol


def test_folder_holds_one_file_per_symbol(tmp_path: Path) -> None:
    for index, name in enumerate(("B", "A")):
        write_table(tmp_path / f"{name}.csv", random_bars(5, seed=index))
    (tmp_path / "notes.md").write_text("not data")

    bars, _ = read_bars(market_files(str(tmp_path)), ENDS)

    assert list(bars) == ["A", "B"]
    assert np.array_equal(bars["B"].close, random_bars(5, seed=0).close)


def test_half_written_line_of_a_growing_file_is_not_read(tmp_path: Path) -> None:
    path = write_table(tmp_path / "X.csv", random_bars(5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:-7])  # its last number has lost some digits

    bars, _ = read_bars([path], ENDS, is_growing=True)

    assert len(bars["X"].time) == 4


def test_local_times_around_clock_changes(tmp_path: Path) -> None:
    hours = ["2024-10-27 01:00", "2024-10-27 02:00", "2024-10-27 02:00", "2024-10-27 03:00"]
    path = tmp_path / "X.csv"
    path.write_text("time,open,high,low,close\n" + "".join(f"{each},1,1,1,1\n" for each in hours))

    bars, _ = read_bars([path], FileFormat("Europe/Berlin", "end"))

    assert list(bars["X"].time) == [utc("2024-10-26T23:00") + i * HOUR for i in range(4)]
