"""Reads one market file with pyarrow: the bars of each of its symbols, checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import first_line
from ml_pipeline.extras import import_extra
from ml_pipeline.worlds.trading.data.bars import Bars, check_bars
from ml_pipeline.worlds.trading.data.layouts import (
    OHLC,
    OHLCV,
    FileFormat,
    Layout,
    first_mistake,
    line_of,
    our_names,
    recognised,
)
from ml_pipeline.worlds.trading.data.market import DataError

if TYPE_CHECKING:
    from pyarrow import Array, ChunkedArray, Table

SUFFIXES = (".csv", ".txt", ".tsv", ".parquet")

_OPTIONAL = ("symbol", "volume", "spread", "date", "clock")
_FORMATS = {"histdata": "%Y%m%d %H%M%S", "mt5": "%Y.%m.%d"}
_MINUTE = 60_000_000_000

Rows = slice | NDArray[np.int64]  # of a table
Times = NDArray[np.int64]


class Read(NamedTuple):
    """The bars of a file by symbol; the key is None if the file does not name its symbol."""

    layout: str
    bars: dict[str | None, Bars]  # labelled as in the file


def read_file(
    path: Path, form: FileFormat, *, further: Sequence[str] = (), is_growing: bool = False
) -> Read:
    """``further`` are the names of further columns to read.

    In a text file that is still growing, a last line without its end is not read.
    """
    if path.suffix.lower() == ".parquet":
        layout, table = _read_parquet(path, form, further)
    else:
        layout = recognised(path, form.columns)
        table = _read_text(path, layout, further, is_growing)
    if table.num_rows == 0:
        raise DataError(f"{path}: too short: it has no bars")

    def place(row: int) -> str:
        if path.suffix.lower() == ".parquet":
            return f"{path}: row {row + 1}"
        return f"{path}:{line_of(path, row, layout.n_header)}"

    time = _utc(path, layout, table, form.timezone, place)
    bars: dict[str | None, Bars] = {}
    for part in _symbols(table, further):
        bars[part.symbol] = _bars(table, time, part, further, layout.point)
        check_bars(bars[part.symbol], partial(_place_in, part.rows, place))
    return Read(layout.name, bars)


class _Part(NamedTuple):
    """One symbol of a table."""

    symbol: str | None
    rows: Rows
    names: dict[str, str]  # our names -> columns of the table


def _place_in(rows: Rows, place: Callable[[int], str], row: int) -> str:
    return place(row if isinstance(rows, slice) else int(rows[row]))


def _arrow(module: str) -> ModuleType:
    return import_extra(module, needed_by="market data")


def _read_text(path: Path, layout: Layout, further: Sequence[str], is_growing: bool) -> Table:
    arrow, csv = _arrow("pyarrow"), _arrow("pyarrow.csv")
    wanted = _wanted(path, layout.columns, further)
    numbers = {name: arrow.float64() for name in wanted}
    times = {
        "epoch": arrow.int64(),
        "local": arrow.timestamp("ns"),
        "offset": arrow.timestamp("ns", "UTC"),
    }
    types = {"time": times[layout.clock], "date": times["local"], "clock": arrow.time32("s")}
    formats = [_FORMATS[layout.name]] if layout.name in _FORMATS else None
    try:
        return csv.read_csv(
            arrow.BufferReader(_whole_lines(path)) if is_growing else path,
            csv.ReadOptions(skip_rows=layout.n_header, column_names=list(layout.columns)),
            csv.ParseOptions(delimiter=layout.separator),
            csv.ConvertOptions(
                column_types={**numbers, **types, "symbol": arrow.string()},
                include_columns=wanted,
                timestamp_parsers=formats,
            ),
        )
    except (arrow.ArrowInvalid, arrow.ArrowKeyError) as error:
        raise first_mistake(path, layout, wanted, first_line(error)) from error


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _read_parquet(path: Path, form: FileFormat, further: Sequence[str]) -> tuple[Layout, Table]:
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    try:
        theirs = parquet.read_schema(path).names
        ours = our_names(path, theirs, form.columns)
        wanted = _wanted(path, ours, further)
        table = parquet.read_table(path, columns=[theirs[ours.index(name)] for name in wanted])
        table = table.rename_columns(wanted)
        for index, name in enumerate(wanted):
            if name not in ("time", "symbol"):
                table = table.set_column(index, name, table[name].cast(arrow.float64()))
    except arrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file with bars: {first_line(error)}") from error
    kind = table.schema.field("time").type
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        raise DataError(f"{path}: time is text; write timestamps or integers")
    clock = "epoch" if arrow.types.is_integer(kind) else "local"
    if clock == "local":
        clock = "local" if arrow.types.is_date(kind) or kind.tz is None else "offset"
        table = table.set_column(wanted.index("time"), "time", _nanoseconds(table["time"], clock))
    return Layout("table", "", 0, tuple(ours), clock, None, 1.0), table


def _nanoseconds(column: ChunkedArray, clock: str) -> ChunkedArray:
    arrow = _arrow("pyarrow")
    return column.cast(arrow.timestamp("ns", None if clock == "local" else "UTC"))


def _wanted(path: Path, found: Sequence[str], further: Sequence[str]) -> list[str]:
    """The names of the columns to read, in the order of the file."""
    per_symbol = [name for name in found if name.partition(" ")[0] in OHLCV and " " in name]
    if per_symbol:
        return ["time", *per_symbol]
    for name in further:
        if name not in found:
            raise DataError(f"{path}:1: column {name} is missing, which features names")
    ours = ("time", *OHLC, *_OPTIONAL, *further)
    return [name for name in found if name in ours]


def _utc(
    path: Path, layout: Layout, table: Table, timezone: str | None, place: Callable[[int], str]
) -> Times:
    """The times as UTC nanoseconds."""
    for name in ("time", "date", "clock", "symbol"):
        if name in table.column_names and table[name].null_count:
            row = int(np.asarray(table[name].is_null()).argmax())
            raise DataError(f"{place(row)}: {name} is missing")
    if timezone is not None and (layout.clock != "local" or layout.zone is not None):
        raise DataError(f"timezone={timezone}: the times of {path} have a zone; remove the key")
    if layout.name == "mt5" and timezone is None:
        raise DataError(
            f"{path}: MT5 writes the broker's time; set timezone, such as Europe/Athens, or "
            "America/New_York+07:00 for brokers that close with New York"
        )
    if layout.clock == "epoch":
        return _since_1970(table["time"].to_numpy())
    if layout.clock == "offset":
        return _integers(table["time"])
    local = _integers(table["date" if layout.name == "mt5" else "time"])
    if "clock" in table.column_names:
        seconds = table["clock"].cast(_arrow("pyarrow").int32()).to_numpy().astype(np.int64)
        local = local + seconds * 1_000_000_000
    zone = layout.zone or timezone or "UTC"
    utc, is_skipped = to_utc(local, zone)
    if is_skipped.any():
        raise DataError(
            f"{place(int(is_skipped.argmax()))}: the clock of {zone} skips this time; "
            "is the timezone right?"
        )
    return utc


def _integers(column: Array | ChunkedArray) -> Times:
    return np.asarray(column.cast(_arrow("pyarrow").int64()).to_numpy())


def _since_1970(value: Times) -> Times:
    """Seconds, milliseconds, microseconds or nanoseconds, told apart by their size, per bar."""
    scale = np.ones(len(value), dtype=np.int64)
    for limit in (10**11, 10**14, 10**17):
        scale[value < limit] *= 1_000
    return value * scale


def _symbols(table: Table, further: Sequence[str]) -> list[_Part]:
    plain = {name: name for name in (*OHLCV, "spread", *further) if name in table.column_names}
    if "symbol" in table.column_names:
        texts = table["symbol"].combine_chunks().dictionary_encode()
        codes = np.asarray(texts.indices)
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(len(texts.dictionary) + 1))
        return [
            _Part(name, order[starts[index] : starts[index + 1]], plain)
            for index, name in enumerate(texts.dictionary.to_pylist())
        ]
    if "close" in table.column_names:
        return [_Part(None, slice(None), plain)]
    names = dict.fromkeys(name.partition(" ")[2] for name in table.column_names if " " in name)
    return [_own_columns(table, symbol) for symbol in names]


def _own_columns(table: Table, symbol: str) -> _Part:
    """A symbol with columns of its own; rows that are empty in all of them are not its bars."""
    own = {name: f"{name} {symbol}" for name in OHLCV if f"{name} {symbol}" in table.column_names}
    is_bar = np.zeros(table.num_rows, dtype=np.bool_)
    for column in own.values():
        is_bar |= ~np.asarray(table[column].is_null())
    return _Part(symbol, slice(None) if is_bar.all() else np.flatnonzero(is_bar), own)


def _bars(table: Table, time: Times, part: _Part, further: Sequence[str], point: float) -> Bars:
    own = time[part.rows]

    def values(name: str) -> NDArray[np.float64]:
        if name not in part.names:
            return np.zeros(len(own))
        return np.asarray(table[part.names[name]].to_numpy()[part.rows], dtype=np.float64)

    prices = {name: values(name) for name in OHLCV}
    columns = {name: values(name) for name in further}
    return Bars(time=own, **prices, spread=values("spread") * point, columns=columns)


def to_utc(local: Times, zone: str) -> tuple[Times, NDArray[np.bool_]]:
    """UTC nanoseconds of local ones, and which of them the clock of the zone skips.

    ``zone`` is an IANA name, UTC, or either with a shift: UTC-05:00, America/New_York+07:00. A
    time that the clock shows twice is the earlier one, unless the times step back before it.
    """
    name, shift = _name_and_shift(zone)
    local = local - shift
    if name == "UTC":
        return local, np.zeros(len(local), dtype=np.bool_)
    early, late = _assumed(local, name, "earliest"), _assumed(local, name, "latest")
    is_skipped = late - early == 1  # the last nanosecond before the change, and the change
    utc = early.copy()
    is_late = False
    for row in np.flatnonzero((early != late) & ~is_skipped):
        goes_on = row > 0 and early[row - 1] != late[row - 1]
        is_late = bool(goes_on and (is_late or local[row] <= local[row - 1]))
        utc[row] = late[row] if is_late else early[row]
    return utc, is_skipped


def _name_and_shift(zone: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)(?:([+-])(\d\d):(\d\d))?", zone)
    if match is None or not match[1]:
        raise DataError(
            f"timezone={zone}: is not a zone; write UTC, Europe/Athens, UTC+02:00 or "
            "America/New_York+07:00"
        )
    minutes = int(match[3] or 0) * 60 + int(match[4] or 0)
    return match[1], (-minutes if match[2] == "-" else minutes) * _MINUTE


def _assumed(local: Times, name: str, choice: str) -> Times:
    arrow, compute = _arrow("pyarrow"), _arrow("pyarrow.compute")
    naive = arrow.array(local, arrow.timestamp("ns"))
    try:
        aware = compute.assume_timezone(naive, name, ambiguous=choice, nonexistent=choice)
    except arrow.ArrowInvalid as error:
        raise DataError(f"timezone={name}: {error}; write a name such as Europe/Athens") from error
    return _integers(aware)
