"""Layouts: how a text file writes its bars, and which of its lines does not fit.

docs/market_data.md lists the six layouts. Times of each but a table are the START of a bar.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ml_pipeline.worlds.trading.data.market import DataError

OHLC = ("open", "high", "low", "close")
OHLCV = (*OHLC, "volume")
# Our names of the columns of a table, and other names that are as clear.
_NAMES = {
    "time": ("time", "timestamp", "open_time", "datetime", "date"),
    "symbol": ("symbol", "ticker", "tic"),
}

_MT5 = {
    **{f"<{name.upper()}>": name for name in (*OHLC, "date", "spread")},
    "<TIME>": "clock",
    "<TICKVOL>": "volume",
}
_BINANCE = ("time", *OHLCV, *(f"_{index}" for index in range(6)))
_DATE = r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?"
_NULLS = ("", "nan", "null", "n/a", "na", "#n/a", "none")
_NOT_NUMBERS = ("time", "symbol", "date", "clock")
_SAMPLED = 100  # lines in which the decimals of the prices are counted


class FileFormat(NamedTuple):
    """What files do not say themselves; keys of the config."""

    timezone: str | None = None  # of times without a zone
    label: str = "start"  # start | end
    columns: Mapping[str, str] = {}  # our name -> name in the header of a table


PLAIN = FileFormat()


class Layout(NamedTuple):
    """The columns of a file under our names; those that start with _ are not read."""

    name: str
    separator: str
    n_header: int  # lines before the first bar
    columns: tuple[str, ...]  # yfinance with several symbols: "close AAPL"
    clock: str  # how times are written: epoch | offset | local
    zone: str | None  # of local times; None: the config says
    point: float  # the price of one unit of spread


def recognised(path: Path, columns: Mapping[str, str]) -> Layout:
    """The layout of a text file; a table if the names of its ``columns`` are given."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = [line for line in islice(file, _SAMPLED) if line.strip()]
    if not lines:
        raise DataError(f"{path}: too short: it is empty")
    first = lines[0].strip()
    separator = max(",;\t", key=first.count)
    cells = [_cells_of(line, separator) for line in lines[:4]]
    if columns:
        return _table(path, cells, separator, columns)
    if first.startswith("<DATE>"):
        return _mt5(path, lines)
    if re.match(r"\d{8} \d{6};", first):
        return Layout("histdata", ";", 0, ("time", *OHLCV), "local", "UTC-05:00", 1.0)
    if cells[0][0] == "Price":
        return _yfinance(path, cells)
    if cells[0][0].isdigit():
        return _without_header(path, cells[0], separator)
    layout = _table(path, cells, separator, columns)
    return layout._replace(name=_source(cells[0], layout))


def _cells_of(line: str, separator: str) -> list[str]:
    """The cells of a line; one cell if it is not text."""
    try:
        return next(csv.reader([line.strip("\r\n")], delimiter=separator))
    except csv.Error:  # a zero byte, or a cell of 128 kB
        return [line]


def _mt5(path: Path, lines: Sequence[str]) -> Layout:
    names = [_MT5.get(name, f"_{name}") for name in lines[0].strip().split("\t")]
    _check_names(path, names, ("date", *OHLC))
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
        f"{len(_BINANCE)} columns, CCXT {1 + len(OHLCV)}; give others a first line with names"
    )


def _yfinance(path: Path, cells: Sequence[Sequence[str]]) -> Layout:
    """The header of three lines: prices, symbols, and the name of the index."""
    if len(cells) < 4:
        raise DataError(f"{path}: too short: it has no bars")
    prices, symbols, names, bar = cells
    is_known = symbols[0] == "Ticker" and names[0] in ("Date", "Datetime")
    if not is_known or len(symbols) != len(prices):
        raise DataError(f"{path}:2: not a known layout: yfinance has a line Ticker and a line Date")
    pairs = zip(prices[1:], symbols[1:], strict=True)
    columns = [f"{price.lower()} {symbol}" for price, symbol in pairs]
    _check_names(
        path, columns, [f"{name} {symbol}" for symbol in set(symbols[1:]) for name in OHLC]
    )
    return Layout("yfinance", ",", 3, ("time", *columns), _clock_of(bar[0]) or "local", None, 1.0)


def _table(
    path: Path, cells: Sequence[Sequence[str]], separator: str, columns: Mapping[str, str]
) -> Layout:
    names = our_names(path, cells[0], columns)
    if len(cells) < 2:
        raise DataError(f"{path}: too short: it has no bars")
    bar = dict(zip(names, cells[1], strict=False))
    # If it is not a time, reading the file fails and finds the line.
    clock = _clock_of(bar.get("time", "")) or "local"
    return Layout("table", separator, 1, tuple(names), clock, None, 1.0)


def _source(header: Sequence[str], layout: Layout) -> str:
    """Who writes tables with this header."""
    is_plain = layout.columns == ("time", *OHLCV) and layout.clock == "epoch"
    if header[0] == "timestamp" and is_plain:
        return "ccxt"
    if header[0] == "open_time" and len(header) == len(_BINANCE):
        return "binance"
    if header[0] in ("Date", "Datetime") and "symbol" not in layout.columns:
        return "yfinance"
    return layout.name


def our_names(path: Path, header: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """Our name of each column; a column that is not one of ours keeps its own, in lower case.

    ``columns`` gives the names in the file of those that the header leaves open.
    """
    known = {name: ours for ours, names in _NAMES.items() for name in names if ours not in columns}
    known |= {name.lower(): ours for ours, name in columns.items()}
    own = [name.strip().lower() for name in header]
    # Where columns names another one, a column with our name is not read.
    found = [known.get(name, f"_{name}" if name in columns else name) for name in own]
    needed = dict.fromkeys(("time", *OHLC, *columns))
    missing = [name for name in needed if name not in found]
    unclear = missing or [name for name in (*needed, "symbol") if found.count(name) > 1]
    if unclear:
        names = ", ".join(unclear)
        fact = f"it lacks {names}" if missing else f"it has {names} twice"
        entries = ", ".join(f"{name}: NAME" for name in unclear)
        fix = f"name them: env.kwargs.data.columns={{{entries}}}"
        if len(own) == 1:
            fix = "separate columns by commas, semicolons or tabs"
        raise DataError(f"{path}:1: not a known layout: {fact}; found {' '.join(own)[:100]}; {fix}")
    return found


def _check_names(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise if a column is missing or appears twice."""
    for name in wanted:
        if found.count(name) != 1:
            fact = "is missing" if name not in found else "appears twice"
            raise DataError(f"{path}:1: column {name} {fact}; found {' '.join(found)[:100]}")


def _clock_of(text: str) -> str | None:
    """How a time is written; None for any other text."""
    if text.isdigit():
        return "epoch"
    if re.fullmatch(_DATE, text):
        return "local"
    return "offset" if re.fullmatch(rf"{_DATE}(Z|[+-]\d\d:?\d\d)", text) else None


def line_of(path: Path, row: int, n_header: int) -> int:
    """The number of the line with bar ``row``; blank lines hold no bar."""
    for index, (number, _) in enumerate(_lines(path, "\t")):
        if index == n_header + row:
            return number
    raise IndexError(f"{path} has no bar {row}")


def first_mistake(path: Path, layout: Layout, wanted: Sequence[str], reason: str) -> DataError:
    """The error of the first line that does not fit; ``reason`` is what pyarrow said."""
    for index, (number, cells) in enumerate(_lines(path, layout.separator)):
        if index >= layout.n_header:
            fact = _mistake_of(cells, layout, wanted)
            if fact is not None:
                return DataError(f"{path}:{number}: {fact}")
    return DataError(f"{path}: {reason}")


def _lines(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        for number, line in enumerate(file, start=1):
            if line.strip("\r\n"):
                yield number, _cells_of(line, separator)


def _mistake_of(cells: Sequence[str], layout: Layout, wanted: Sequence[str]) -> str | None:
    if len(cells) != len(layout.columns):
        return f"{len(cells)} columns, but line 1 has {len(layout.columns)}; check the separator"
    for name, cell in zip(layout.columns, cells, strict=True):
        if name in wanted and name not in _NOT_NUMBERS and not _is_number(cell):
            return f"{name} {cell[:40]!r} is not a number"
        if name == "time" and layout.name != "histdata" and _clock_of(cell) != layout.clock:
            return _wrong_time(cell, layout.clock)
    return None


def _wrong_time(cell: str, clock: str) -> str:
    found = _clock_of(cell)
    if found is None:
        return (
            f"time {cell[:40]!r} is not a time; write 2024-01-31 23:59:00 or "
            "2024-01-31 23:59:00-05:00, or the time since 1970 as an integer"
        )
    words = {"epoch": "an integer", "offset": "a time with an offset", "local": "one without"}
    return f"time {cell[:40]!r} is {words[found]}, the first bar has {words[clock]}; mixed zones"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.lower() in _NULLS
    return True
