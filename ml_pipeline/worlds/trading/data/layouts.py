"""Layouts: how a market file writes its bars, recognised from its first lines.

docs/market_data.md has a table of them. Times of every known layout are the START of a bar.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ml_pipeline.worlds.trading.data.errors import DataError

OHLC = ("open", "high", "low", "close")
OHLCV = (*OHLC, "volume")
TIME_NAMES = ("timestamp", "open_time", "time", "datetime", "date", "__index_level_0__")
SYMBOL_NAMES = ("symbol", "ticker", "tic")

_MT5 = {
    **{f"<{name.upper()}>": name for name in (*OHLC, "date", "spread")},
    "<TIME>": "clock",
    "<TICKVOL>": "volume",
}
_BINANCE = ("time", *OHLCV, *(f"_{index}" for index in range(6)))
_DATE = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?"
_SAMPLED = 100  # lines in which the decimals of the prices are counted


class Layout(NamedTuple):
    """The columns of a file under our names; those that start with _ are not read."""

    name: str
    separator: str
    n_header: int  # lines before the first bar
    columns: tuple[str, ...]  # yfinance with several symbols: "close AAPL"
    clock: str  # how times are written: epoch | offset | local
    zone: str | None  # of local times; None: the config says
    point: float  # the price of one unit of spread


def recognised(path: Path) -> Layout:
    """The layout of a text file."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = [line for line in islice(file, _SAMPLED) if line.strip()]
    if not lines:
        raise DataError(f"{path}: too short: it is empty")
    first = lines[0].strip()
    if first.startswith("<DATE>"):
        return _mt5(path, lines)
    if re.match(r"\d{8} \d{6};", first):
        return Layout("histdata", ";", 0, ("time", *OHLCV), "local", "UTC-05:00", 1.0)
    separator = max(",;\t", key=first.count)
    cells = [cells_of(line, separator) for line in lines[:4]]
    if cells[0][0] == "Price":
        return _yfinance(path, cells)
    if cells[0][0].isdigit():
        return _without_header(path, cells[0], separator)
    return _table(path, cells, separator)


def cells_of(line: str, separator: str) -> list[str]:
    """The cells of a line; one cell if it is not text."""
    try:
        return next(csv.reader([line.strip("\r\n")], delimiter=separator))
    except csv.Error:  # a zero byte, or a cell of 128 kB
        return [line]


def _mt5(path: Path, lines: Sequence[str]) -> Layout:
    names = [_MT5.get(name, f"_{name}") for name in lines[0].strip().split("\t")]
    check_names(path, names, ("date", *OHLC))
    prices = [names.index(name) for name in OHLC]
    texts = [line.strip().split("\t") for line in lines[1:]]
    fractions = [
        row[index].partition(".")[2] for row in texts for index in prices if index < len(row)
    ]
    digits = max(map(len, fractions), default=0)
    return Layout("mt5", "\t", 1, tuple(names), "local", None, 10.0**-digits)


def _without_header(path: Path, cells: Sequence[str], separator: str) -> Layout:
    if len(cells) == len(_BINANCE):
        return Layout("binance", separator, 0, _BINANCE, "epoch", "UTC", 1.0)
    if len(cells) == 1 + len(OHLCV):
        return Layout("ccxt", separator, 0, ("time", *OHLCV), "epoch", "UTC", 1.0)
    raise DataError(
        f"{path}:1: not a known layout: {len(cells)} columns and no header; Binance has "
        f"{len(_BINANCE)} columns, CCXT {1 + len(OHLCV)}"
    )


def _yfinance(path: Path, cells: Sequence[Sequence[str]]) -> Layout:
    """The header of three lines: prices, symbols, and the name of the index."""
    if len(cells) < 4:
        raise DataError(f"{path}: too short: it has no bars")
    _check_width(path, cells)
    prices, symbols, names, bar = cells
    if symbols[0] != "Ticker" or names[0] not in ("Date", "Datetime"):
        raise DataError(f"{path}:2: not a known layout: yfinance has a line Ticker and a line Date")
    pairs = zip(prices[1:], symbols[1:], strict=True)
    columns = [f"{price.lower()} {symbol}" for price, symbol in pairs]
    check_names(path, columns, [f"{name} {symbol}" for symbol in set(symbols[1:]) for name in OHLC])
    return Layout("yfinance", ",", 3, ("time", *columns), _clock(path, 4, bar[0]), None, 1.0)


def _table(path: Path, cells: Sequence[Sequence[str]], separator: str) -> Layout:
    columns = our_names(path, cells[0])
    if len(cells) < 2:
        raise DataError(f"{path}: too short: it has no bars")
    _check_width(path, cells[:2])
    clock = _clock(path, 2, cells[1][columns.index("time")])
    name = "table"
    if cells[0][0] == "timestamp" and columns == ["time", *OHLCV] and clock == "epoch":
        name = "ccxt"
    elif cells[0][0] == "open_time" and len(columns) == len(_BINANCE):
        name = "binance"
    elif cells[0][0] in ("Date", "Datetime") and "symbol" not in columns:
        name = "yfinance"
    return Layout(name, separator, 1, tuple(columns), clock, None, 1.0)


def our_names(path: Path, names: Sequence[str]) -> list[str]:
    """Our name of each column; a column that is not one of ours keeps its own, in lower case."""
    found = [name.strip().lower() for name in names]
    for ours, known in (("time", TIME_NAMES), ("symbol", SYMBOL_NAMES)):
        theirs = next((name for name in known if name in found), None)
        if theirs is not None:
            found = [f"_{name}" if name == ours != theirs else name for name in found]
            found[found.index(theirs)] = ours
    check_names(path, found, ("time", *OHLC))
    return found


def _check_width(path: Path, cells: Sequence[Sequence[str]]) -> None:
    for number, line in enumerate(cells, start=1):
        if len(line) != len(cells[0]):
            raise DataError(
                f"{path}:{number}: {len(line)} columns, but line 1 has {len(cells[0])}; "
                "check the separator"
            )


def check_names(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise if a column is missing or appears twice."""
    for name in wanted:
        if found.count(name) != 1:
            fact = "is missing" if name not in found else "appears twice"
            raise DataError(
                f"{path}:1: column {name} {fact}; found {' '.join(found)[:100]} (columns are "
                "separated by commas, semicolons or tabs)"
            )


def _clock(path: Path, line: int, text: str) -> str:
    clock = clock_of(text)
    if clock is None:
        raise DataError(
            f"{path}:{line}: time {text[:40]!r} is not a time; write 2024-01-31 23:59:00 or "
            "2024-01-31 23:59:00-05:00, or the time since 1970 as an integer"
        )
    return clock


def clock_of(text: str) -> str | None:
    """How a time is written; None for any other text."""
    if text.isdigit():
        return "epoch"
    if re.fullmatch(_DATE, text):
        return "local"
    return "offset" if re.fullmatch(rf"{_DATE}(Z|[+-]\d\d:?\d\d)", text) else None
