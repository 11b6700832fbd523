"""Features: what the agent sees of the bars, by name, such as rsi_14 or bollinger_20_2.

Each is a function of one symbol's own bars up to row t, with the usual definition;
docs/market_data.md has the table. Prices enter as ratios, so values compare between symbols and
over years.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.bars import Bars
from ml_pipeline.worlds.trading.data.market import DataError
from ml_pipeline.worlds.trading.data.rolling import recursive_mean, rolling_mean, rolling_std

Array = NDArray[np.float64]

_DAY = 86_400_000_000_000
_MONDAY = 4 * _DAY  # 1970-01-05
_FORGOTTEN = 1e-10  # weight of the oldest bars of a recursion that no longer matters


class Feature(NamedTuple):
    """One entry of the config; it may have several columns."""

    columns: tuple[str, ...]
    warmup: int  # rows before the first value
    memory: int  # bars that suffice for a value; for recursions, up to a weight of 1e-10
    compute: Callable[[Bars], list[Array]]  # [T - warmup] for each column
    only_time: bool = False  # gaps have a value of their own
    reads: str | None = None  # a further column of the files


def parsed(text: str) -> Feature:
    """The feature that a config names."""
    if text.startswith("column_"):
        name = text.removeprefix("column_").lower()
        return Feature((text,), 0, 1, lambda bars: [bars.columns[name]], reads=name)
    match = re.fullmatch(r"([a-z_]+?)((?:_[\d.]+)*)", text)
    if match is None or match[1] not in _MAKERS:
        known = ", ".join([*_MAKERS, "column_NAME"])
        raise DataError(f"features={text}: unknown; choose from {known}")
    maker, names = _MAKERS[match[1]]
    words = match[2].split("_")[1:]
    if len(words) != len(names):
        example = "_".join([match[1], *names])
        raise DataError(f"features={text}: must be written as {example}")
    return maker(
        text, *(_number(text, name, word) for name, word in zip(names, words, strict=True))
    )


def _number(text: str, name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if value <= 0 or (name == "BARS" and not value.is_integer()):
        kind = "an integer of at least 1" if name == "BARS" else "positive"
        raise DataError(f"features={text}: {name}={word} must be {kind}")
    return int(value) if name == "BARS" else value


def _return(text: str, n: int) -> Feature:
    """The logarithm of close[t] / close[t - n]."""
    return Feature((text,), n, n + 1, lambda bars: [np.log(bars.close[n:] / bars.close[:-n])])


def _rsi(text: str, n: int) -> Feature:
    """Wilder's relative strength index, 0 to 100; 50 if the price has not moved."""

    def compute(bars: Bars) -> list[Array]:
        change = np.diff(bars.close)
        gain, loss = _wilder(np.maximum(change, 0.0), n), _wilder(np.maximum(-change, 0.0), n)
        total = gain + loss
        return [100.0 * np.divide(gain, total, out=np.full_like(gain, 0.5), where=total > 0)]

    return Feature((text,), n, n + 1 + _memory(1 / n), compute)


def _ema(text: str, n: int) -> Feature:
    """The close relative to its exponential moving average of weight 2 / (n + 1)."""

    def compute(bars: Bars) -> list[Array]:
        return [bars.close[n - 1 :] / _smoothed(bars.close, n, 2 / (n + 1)) - 1.0]

    return Feature((text,), n - 1, n + _memory(2 / (n + 1)), compute)


def _atr(text: str, n: int) -> Feature:
    """Wilder's average true range, relative to the close."""

    def compute(bars: Bars) -> list[Array]:
        before = bars.close[:-1]
        true_range = np.maximum(bars.high[1:], before) - np.minimum(bars.low[1:], before)
        return [_wilder(true_range, n) / bars.close[n:]]

    return Feature((text,), n, n + 1 + _memory(1 / n), compute)


def _bollinger(text: str, n: int, width: float) -> Feature:
    """%b, the place of the close between the bands (0 to 1), and the distance of the bands."""

    def compute(bars: Bars) -> list[Array]:
        middle, close = rolling_mean(bars.close, n), bars.close[n - 1 :]
        half = width * rolling_std(bars.close, n)
        is_flat = half < 1e-12 * middle
        place = 0.5 + (close - middle) / (2.0 * np.where(is_flat, np.inf, half))
        return [place, 2.0 * half / middle]

    return Feature((f"{text}.b", f"{text}.width"), n - 1, n, compute)


def _volatility(text: str, n: int) -> Feature:
    """The standard deviation of the last n log returns of one bar."""
    return Feature((text,), n, n + 1, lambda bars: [rolling_std(np.diff(np.log(bars.close)), n)])


def _volume(text: str, n: int) -> Feature:
    """The volume relative to the mean of the last n bars, minus 1; 0 if there was none."""

    def compute(bars: Bars) -> list[Array]:
        mean = rolling_mean(bars.volume, n)
        ratio = np.divide(bars.volume[n - 1 :], mean, out=np.ones_like(mean), where=mean > 0)
        return [ratio - 1.0]

    return Feature((text,), n - 1, n, compute)


def _clock(text: str, period: int) -> Feature:
    """Sine and cosine of the place of the bar's end in a day or week of UTC."""

    def compute(bars: Bars) -> list[Array]:
        angle = (2.0 * math.pi / period) * ((bars.time - _MONDAY) % period)
        return [np.sin(angle), np.cos(angle)]

    return Feature((f"{text}.sin", f"{text}.cos"), 0, 1, compute, only_time=True)


_MAKERS: dict[str, tuple[Callable[..., Feature], tuple[str, ...]]] = {
    "return": (_return, ("BARS",)),
    "rsi": (_rsi, ("BARS",)),
    "ema": (_ema, ("BARS",)),
    "atr": (_atr, ("BARS",)),
    "bollinger": (_bollinger, ("BARS", "WIDTH")),
    "volatility": (_volatility, ("BARS",)),
    "volume": (_volume, ("BARS",)),
    "time_of_day": (lambda text: _clock(text, _DAY), ()),
    "time_of_week": (lambda text: _clock(text, 7 * _DAY), ()),
}


def _wilder(x: Array, n: int) -> Array:
    return _smoothed(x, n, 1 / n)


def _smoothed(x: Array, n: int, weight: float) -> Array:
    """A recursive mean that starts with the plain mean of the first n values; [T - n + 1]."""
    start = float(rolling_mean(x[:n], n)[0])
    return np.concatenate([[start], recursive_mean(x[n:], start=start, weight=weight)])


def _memory(weight: float) -> int:
    """Bars after which the start of a recursion no longer matters."""
    return 0 if weight >= 1 else math.ceil(math.log(_FORGOTTEN) / math.log1p(-weight))
