"""Finds the line of a text file that pyarrow could not read, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_pipeline.worlds.trading.data.layouts import Layout, cells_of, clock_of
from ml_pipeline.worlds.trading.data.market import DataError

NULLS = ("", "nan", "null", "n/a", "na", "#n/a", "none")
_NOT_NUMBERS = ("time", "symbol", "date", "clock")


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
                yield number, cells_of(line, separator)


def _mistake_of(cells: Sequence[str], layout: Layout, wanted: Sequence[str]) -> str | None:
    if len(cells) != len(layout.columns):
        return f"{len(cells)} columns, but line 1 has {len(layout.columns)}; check the separator"
    for name, cell in zip(layout.columns, cells, strict=True):
        if name in wanted and name not in _NOT_NUMBERS and not _is_number(cell):
            return f"{name} {cell[:40]!r} is not a number"
        if name == "time" and layout.name != "histdata" and clock_of(cell) != layout.clock:
            return _wrong_time(cell, layout.clock)
    return None


def _wrong_time(cell: str, clock: str) -> str:
    found = clock_of(cell)
    if found is None:
        return f"time {cell[:40]!r} is not a time"
    words = {"epoch": "an integer", "offset": "a time with an offset", "local": "one without"}
    return f"time {cell[:40]!r} is {words[found]}, the first bar has {words[clock]}; mixed zones"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.lower() in NULLS
    return True
