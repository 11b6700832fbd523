"""The bars of all market files of a path, by symbol, labelled by the END of each bar."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from ml_pipeline.foreign import check_size, half_of_memory
from ml_pipeline.worlds.trading.data.bars import (
    Bars,
    bar_text,
    joined,
    length_of,
    resampled,
    text_of,
)
from ml_pipeline.worlds.trading.data.layouts import PLAIN, FileFormat
from ml_pipeline.worlds.trading.data.market import DataError
from ml_pipeline.worlds.trading.data.read import SUFFIXES, Read, read_file

# The names that sites and terminals give to their files; the group is the symbol.
_FILE_NAMES = (
    r"([A-Za-z0-9]+)-\d+[smhdwM]o?-\d{4}-\d\d(?:-\d\d)?",  # BTCUSDT-1h-2024-01, Binance
    r"DAT_ASCII_([A-Za-z0-9]+)_[A-Z0-9]+_\d{4,6}",  # DAT_ASCII_EURUSD_M1_2023, HistData
    r"([^_]+)_(?:M\d+|H\d+|Daily|Weekly|Monthly)(?:_\d+_\d+)?",  # EURUSD_M1_2023..._2024..., MT5
)


def market_files(path: str) -> list[Path]:
    """The files of a path: a file, a folder or a pattern; in the order of their names."""
    if Path(path).is_dir():
        inside = [each for each in Path(path).iterdir() if each.is_file()]
        found = [each for each in inside if each.suffix.lower() in SUFFIXES]
    elif Path(path).is_file():
        found = [Path(path)]
    else:
        found = [Path(each) for each in glob.glob(path, recursive=True) if Path(each).is_file()]
        if Path(path).exists():
            check_size(path, most_bytes=0)  # it is a FIFO or a device
    if not found:
        raise DataError(f"path={path}: no such file, or a folder without {' '.join(SUFFIXES)}")
    for each in found:
        if each.suffix.lower() not in SUFFIXES:
            raise DataError(f"path={each}: must end in {' '.join(SUFFIXES)}")
        check_size(each, most_bytes=half_of_memory())
    return sorted(found)


def read_bars(
    paths: Sequence[Path],
    form: FileFormat = PLAIN,
    *,
    symbols: Sequence[str] | None = None,
    further: Sequence[str] = (),
    length: int | None = None,
    is_growing: bool = False,
) -> tuple[dict[str, Bars], int]:
    """The bars of each symbol, and their length in nanoseconds.

    ``further`` are the names of further columns to read. ``length`` resamples to longer bars.
    Several files of one symbol are joined in order of time.
    ``is_growing``: the last line of a text file may be half written, and is then not read.
    """
    parts: dict[str, list[tuple[Path, Read, Bars]]] = {}
    for path in paths:
        read = read_file(path, form, further=further, is_growing=is_growing)
        if form.label == "end" and read.layout != "table":
            raise DataError(
                f"label=end: {path} looks like a file of {read.layout}, whose times are starts; "
                "for a table of your own, name a column: columns={time: NAME}"
            )
        for name, bars in read.bars.items():
            parts.setdefault(name or symbol_of(path), []).append((path, read, bars))
    chosen = {name: parts[name] for name in _chosen(sorted(parts), symbols)}
    whole = {name: _joined(name, same) for name, same in chosen.items()}
    found = {name: length_of(bars, str(chosen[name][0][0])) for name, bars in whole.items()}
    if form.label == "start":
        whole = {name: _by_end(bars, found[name]) for name, bars in whole.items()}
    if length is None:
        length = _common(found)
    return {
        name: resampled(bars, found[name], length, name) for name, bars in whole.items()
    }, length


def symbol_of(path: Path) -> str:
    """The symbol that a file's name contains, or else the name."""
    matches = (re.fullmatch(pattern, path.stem) for pattern in _FILE_NAMES)
    return next((match[1] for match in matches if match is not None), path.stem)


def _chosen(found: Sequence[str], symbols: Sequence[str] | None) -> Sequence[str]:
    for name in symbols or ():
        if name not in found:
            raise DataError(f"symbols={name}: not in the files; found {', '.join(found[:20])}")
    return found if symbols is None else symbols


def _joined(symbol: str, parts: list[tuple[Path, Read, Bars]]) -> Bars:
    parts = sorted(parts, key=lambda part: int(part[2].time[0]))
    for (before, _, earlier), (path, _, later) in itertools.pairwise(parts):
        if later.time[0] <= earlier.time[-1]:
            raise DataError(
                f"{path}: {symbol} starts at {text_of(int(later.time[0]))}, before the end of "
                f"{before}; each bar must be in one file only"
            )
    return parts[0][2] if len(parts) == 1 else joined([bars for _, _, bars in parts])


def _by_end(bars: Bars, length: int) -> Bars:
    return bars._replace(time=bars.time + length)


def _common(lengths: dict[str, int]) -> int:
    longest = max(lengths, key=lengths.__getitem__)
    shortest = min(lengths, key=lengths.__getitem__)
    if lengths[longest] != lengths[shortest]:
        texts = [f"{name} of {bar_text(lengths[name])}" for name in (shortest, longest)]
        raise DataError(
            f"bar=null: the files have bars of different lengths, {' and '.join(texts)}; "
            f"set bar={bar_text(lengths[longest])}"
        )
    return lengths[longest]
