"""Alignment: the bars and features of several symbols on one time axis, without look-ahead.

The axis is every time at which at least one symbol has a bar. It starts where the last symbol has
its first complete row of features. A symbol without a bar at a time repeats its last close; its
volume is 0, and it cannot be traded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.bars import PRICES, Bars, text_of
from ml_pipeline.worlds.trading.data.features import Feature
from ml_pipeline.worlds.trading.data.market import DataError, Market


def aligned(bars: Mapping[str, Bars], features: Sequence[Feature]) -> Market:
    """The market of these symbols; ``feature`` is not yet normalised, and float64."""
    warmup = max(feature.warmup for feature in features)
    for symbol, each in bars.items():
        if len(each.time) <= warmup:
            raise DataError(
                f"too short: {symbol} has {len(each.time)} bars, the features need {warmup + 1}"
            )
    every = list(bars.values())
    axis = every[0].time
    if any(not np.array_equal(each.time, axis) for each in every[1:]):
        axis = np.unique(np.concatenate([each.time for each in every]))
    starts = {symbol: int(each.time[warmup]) for symbol, each in bars.items()}
    latest = max(starts, key=starts.__getitem__)
    axis = axis[axis >= starts[latest]]
    _check_overlap(bars, latest, starts[latest])
    columns = sum((feature.columns for feature in features), ())
    market = _empty(tuple(bars), columns, axis)
    for index, each in enumerate(every):
        _fill(market, index, each, features)
    return market


def _check_overlap(bars: Mapping[str, Bars], latest: str, start: int) -> None:
    for symbol, each in bars.items():
        if each.time[-1] < start:
            raise DataError(
                f"symbols: {symbol} ends at {text_of(int(each.time[-1]))}, before {latest} has its "
                f"features at {text_of(start)}; leave one of them out"
            )


def _empty(symbols: tuple[str, ...], features: tuple[str, ...], axis: NDArray[np.int64]) -> Market:
    shape = (len(axis), len(symbols))
    numbers: dict[str, Any] = {name: np.empty(shape) for name in (*PRICES, "volume", "spread")}
    numbers["tradable"] = np.empty(shape, dtype=np.bool_)
    numbers["feature"] = np.empty((*shape, len(features)))
    return Market(symbols, features, axis, **numbers)


def _fill(market: Market, index: int, bars: Bars, features: Sequence[Feature]) -> None:
    """Write one symbol."""
    row = np.searchsorted(bars.time, market.time, side="right") - 1  # its last bar at each time
    is_bar = bars.time[row] == market.time
    market.tradable[:, index] = is_bar
    close = bars.close[row]
    for name in PRICES:
        getattr(market, name)[:, index] = np.where(is_bar, getattr(bars, name)[row], close)
    market.volume[:, index] = np.where(is_bar, bars.volume[row], 0.0)
    market.spread[:, index] = bars.spread[row]
    at_all_times = bars._replace(time=market.time)
    column = 0
    for feature in features:
        for values in feature.compute(at_all_times if feature.only_time else bars):
            found = values if feature.only_time else values[row - feature.warmup]
            market.feature[:, index, column] = found
            column += 1
