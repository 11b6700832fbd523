"""Bars: the checked bars of one symbol, before symbols are aligned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.market import DataError

Array = NDArray[np.float64]
PRICES = ("open", "high", "low", "close")
ARRAYS = ("time", *PRICES, "volume", "spread")

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SECOND = 1_000_000_000
_INFERRED_FROM = 10_000  # bars; a prefix, so that a growing file keeps its bar length


class Bars(NamedTuple):
    """Every array is [T]."""

    time: NDArray[np.int64]  # UTC nanoseconds: the END of each bar, or its start until relabelled
    open: Array
    high: Array
    low: Array
    close: Array
    volume: Array
    spread: Array  # in units of price
    columns: Mapping[str, Array]  # further columns of the file, by name

    def rows(self, index: slice | NDArray[np.int64]) -> Bars:
        """Some of the bars."""
        arrays = {name: getattr(self, name)[index] for name in ARRAYS}
        return Bars(**arrays, columns={name: each[index] for name, each in self.columns.items()})


def joined(parts: list[Bars]) -> Bars:
    """The bars of several files, one after the other."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    columns = {
        name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns
    }
    return Bars(**arrays, columns=columns)


def check_bars(bars: Bars, place: Callable[[int], str]) -> None:
    """Raise for the first bad bar; ``place(row)`` is its file and line."""
    step = np.diff(bars.time, prepend=bars.time[:1] - 1)
    mistakes = [
        (step == 0, "repeats the time of the bar before; remove one of them"),
        (step < 0, "is earlier than the bar before; sort the file by time"),
        (bars.high < bars.low, "high is below low"),
    ]
    numbers = {name: getattr(bars, name) for name in (*PRICES, "volume", "spread")}
    for name, array in {**numbers, **bars.columns}.items():
        mistakes.append((~np.isfinite(array), f"{name} is missing or not finite"))
    mistakes += [(numbers[name] <= 0, f"{name} is not positive") for name in PRICES]
    mistakes += [(numbers[name] < 0, f"{name} is negative") for name in ("volume", "spread")]
    found = [(int(is_bad.argmax()), reason) for is_bad, reason in mistakes if is_bad.any()]
    if found:
        row, reason = min(found)
        raise DataError(f"{place(row)}: the bar of {text_of(int(bars.time[row]))}: {reason}")


def text_of(time: int) -> str:
    """UTC nanoseconds as a text, such as 2024-01-31 23:00:00."""
    return str(np.datetime64(time, "ns").astype("datetime64[s]")).replace("T", " ")


def length_of(bars: Bars, place: str) -> int:
    """The length of a bar in nanoseconds: the most frequent step between bars."""
    if len(bars.time) < 2:
        raise DataError(f"{place}: too short: its bar length can only be found from two bars")
    steps, counts = np.unique(np.diff(bars.time[:_INFERRED_FROM]), return_counts=True)
    return int(steps[counts.argmax()])


def nanoseconds(bar: str) -> int:
    """The length of a bar that is written as 1m, 15m, 4h or 1d."""
    match = re.fullmatch(r"(\d+)([smhd])", str(bar))
    if match is None or int(match[1]) == 0:
        raise DataError(f"bar={bar}: must be a number and s, m, h or d, such as 15m")
    return int(match[1]) * _UNITS[match[2]] * _SECOND


def bar_text(length: int) -> str:
    """The length of a bar as a config writes it."""
    seconds = length // _SECOND
    for unit in ("d", "h", "m"):
        if seconds % _UNITS[unit] == 0:
            return f"{seconds // _UNITS[unit]}{unit}"
    return f"{seconds}s"


def resampled(bars: Bars, length: int, wanted: int, symbol: str) -> Bars:
    """Bars of ``wanted`` nanoseconds from bars of ``length``.

    A long bar ends at a multiple of its length in UTC. It holds the bars that end within it, and
    its label is never earlier than any of them. The last one is dropped if it can still grow.
    """
    if wanted == length:
        return bars
    if wanted < length or wanted % length:
        raise DataError(
            f"bar={bar_text(wanted)}: must be a multiple of the bars of {symbol}, "
            f"which have {bar_text(length)}"
        )
    end = -(-bars.time // wanted) * wanted
    last = np.flatnonzero(np.diff(end, append=end[-1:] + 1))  # of each long bar
    if bars.time[-1] < end[-1]:
        last = last[:-1]
    if len(last) == 0:
        raise DataError(f"bar={bar_text(wanted)}: too short: {symbol} has no complete bar")
    first = np.concatenate([[0], last[:-1] + 1])
    inside = slice(0, int(last[-1]) + 1)
    return Bars(
        time=end[last],
        open=bars.open[first],
        high=np.maximum.reduceat(bars.high[inside], first),
        low=np.minimum.reduceat(bars.low[inside], first),
        close=bars.close[last],
        volume=np.add.reduceat(bars.volume[inside], first),
        spread=bars.spread[last],
        columns={name: array[last] for name, array in bars.columns.items()},
    )
