"""Synthetic markets: bars of known origin, from a seed, without files.

A bar opens at the close of the bar before, unless the market was closed in between. Every market
has a column ``signal``: a stationary AR(1) of variance 1. It predicts the next return in the market
``edge`` and is noise in the others. The return of a bar is close / open - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.bars import Bars, nanoseconds
from ml_pipeline.worlds.trading.data.market import DataError

Array = NDArray[np.float64]

_START = 1_577_836_800_000_000_000  # 2020-01-01 00:00 UTC
_HOUR = 3_600_000_000_000
_WEEK = 7 * 24 * _HOUR
_MONDAY = 4 * 24 * _HOUR  # 1970-01-05
_CLOSED = (118 * _HOUR, 166 * _HOUR)  # of the week: Friday 22:00 to Sunday 22:00 UTC
_VOLATILITY, _PERSISTENCE = 0.005, 0.9


def synthetic_bars(
    market: str,
    *,
    n_symbols: int,
    n_bars: int,
    bar: str,
    seed: int,
    parameters: Mapping[str, float],
) -> dict[str, Bars]:
    """The bars of SYN0, SYN1, ...; each symbol has its own random numbers."""
    make, defaults = _MARKETS[market]
    for name, value in parameters.items():
        if name not in defaults:
            known = ", ".join(defaults)
            raise DataError(f"parameters.{name}={value}: unknown; market={market} has {known}")
        _check(name, value)
    settings = {**defaults, **parameters}
    length = nanoseconds(bar)
    end = _START + length * np.arange(1, n_bars + 1, dtype=np.int64)
    return {
        f"SYN{index}": make(np.random.default_rng([seed, index]), end, length, **settings)
        for index in range(n_symbols)
    }


_LIMITS = {
    "volatility": (0.0, 0.05),  # larger ones could reach a price of 0
    "jump_volatility": (0.0, 0.05),
    "correlation": (-0.99, 0.99),
    "persistence": (0.0, 0.999),
    "outage_share": (0.0, 0.5),
    "drift": (-0.01, 0.01),
    "ratio": (0.1, 5.0),
    "duration": (2.0, math.inf),
    "spread": (0.0, 0.01),
}


def _check(name: str, value: float) -> None:
    low, high = _LIMITS[name]
    if not (isinstance(value, (int, float)) and low <= value <= high):
        raise DataError(f"parameters.{name}={value}: must be between {low} and {high}")


def _edge(
    random: np.random.Generator,
    end: NDArray[np.int64],
    length: int,
    *,
    correlation: float,
    volatility: float,
    persistence: float,
    spread: float,
) -> Bars:
    """return[t + 1] = volatility * (correlation * signal[t] + sqrt(1 - correlation^2) * noise)."""
    signal = _signal(random, len(end) + 1, persistence)
    noise = random.standard_normal(len(end))
    change = correlation * signal[:-1] + math.sqrt(1.0 - correlation**2) * noise
    return _bars(random, end, volatility * change, signal[1:], spread=spread)


def _random_walk(
    random: np.random.Generator, end: NDArray[np.int64], length: int, **settings: float
) -> Bars:
    """Independent normal returns: nothing can be earned."""
    return _edge(random, end, length, correlation=0.0, **settings)


def _regimes(
    random: np.random.Generator,
    end: NDArray[np.int64],
    length: int,
    *,
    drift: float,
    volatility: float,
    ratio: float,
    duration: float,
    persistence: float,
    spread: float,
) -> Bars:
    """Three regimes that the agent does not see: up, down, and sideways.

    They last ``duration`` bars in the mean. Up has ``drift`` per bar, down has ``-drift``;
    sideways has none, and ``ratio`` times the volatility.
    """
    is_switch = random.random(len(end)) < 1.0 / duration
    # A switch goes to one of the two other regimes.
    step = np.where(is_switch, random.integers(1, 3, len(end)), 0)
    regime = (random.integers(3) + np.cumsum(step)) % 3
    mean = np.array([drift, -drift, 0.0])[regime]
    scale = volatility * np.array([1.0, 1.0, ratio])[regime]
    signal = _signal(random, len(end), persistence)
    change = mean + scale * random.standard_normal(len(end))
    return _bars(random, end, change, signal, spread=spread)


def _gaps(
    random: np.random.Generator,
    end: NDArray[np.int64],
    length: int,
    *,
    volatility: float,
    jump_volatility: float,
    outage_share: float,
    persistence: float,
    spread: float,
) -> Bars:
    """A random walk that is closed on weekends and opens with a jump.

    Each symbol also misses ``outage_share`` of its bars, at random.
    """
    in_week = (end - length - _MONDAY) % _WEEK
    is_open = (in_week < _CLOSED[0]) | (in_week >= _CLOSED[1])
    is_open &= random.random(len(end)) >= outage_share
    is_open[0] = True
    end = end[is_open]
    jump = (
        jump_volatility * random.standard_normal(len(end)) * (np.diff(end, prepend=0) > 24 * _HOUR)
    )
    jump[0] = 0.0
    signal = _signal(random, len(end), persistence)
    change = volatility * random.standard_normal(len(end))
    return _bars(random, end, change, signal, spread=spread, jump=jump)


_COMMON = {"volatility": _VOLATILITY, "persistence": _PERSISTENCE, "spread": 0.0}
_MARKETS: dict[str, tuple[Callable[..., Bars], dict[str, float]]] = {
    "random_walk": (_random_walk, _COMMON),
    "edge": (_edge, {"correlation": 0.2, **_COMMON}),
    "regimes": (_regimes, {"drift": 0.0005, "ratio": 2.0, "duration": 500.0, **_COMMON}),
    "gaps": (_gaps, {"jump_volatility": 0.02, "outage_share": 0.01, **_COMMON}),
}


def _signal(random: np.random.Generator, n: int, persistence: float) -> Array:
    """A stationary AR(1) of variance 1."""
    noise = math.sqrt(1.0 - persistence**2) * random.standard_normal(n)
    signal = np.empty(n)
    value = float(random.standard_normal())
    for index in range(n):
        signal[index] = value = persistence * value + noise[index]
    return signal


def _bars(
    random: np.random.Generator,
    end: NDArray[np.int64],
    change: Array,
    signal: Array,
    *,
    spread: float,
    jump: Array | None = None,
) -> Bars:
    """Bars with these returns from open to close, and jumps before the open."""
    jump = np.zeros(len(end)) if jump is None else jump
    close = np.asarray(100.0 * np.cumprod((1.0 + change) * (1.0 + jump)), dtype=np.float64)
    before = np.concatenate([[100.0], close[:-1]])
    open_ = before * (1.0 + jump)
    wick = 0.5 * np.abs(change).mean() * np.abs(random.standard_normal((2, len(end))))
    high = np.maximum(open_, close) * (1.0 + wick[0])
    low = np.minimum(open_, close) / (1.0 + wick[1])
    volume = 1_000.0 * np.exp(0.5 * random.standard_normal(len(end)))
    return Bars(end, open_, high, low, close, volume, spread * close, {"signal": signal})
