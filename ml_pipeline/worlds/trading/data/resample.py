"""Resampling: bars joined to longer ones, which are labelled by their END too."""

from __future__ import annotations

import numpy as np

from ml_pipeline.worlds.trading.data.bars import Bars, bar_text
from ml_pipeline.worlds.trading.data.errors import DataError


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
