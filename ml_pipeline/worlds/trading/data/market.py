"""Market: the bars of one or several symbols on one time axis, as trading envs read them.

Row t describes the bar that ends at ``time[t]``; nothing in row t depends on a later bar. An agent
that sees row t can trade at ``open[t + 1]`` at the earliest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import UserError


class DataError(UserError):
    """A market file or a setting that cannot be used; names the place and the reason."""


class Market(NamedTuple):
    """Aligned bars; the arrays may be memory-mapped and must not be written to."""

    symbols: tuple[str, ...]  # S names
    features: tuple[str, ...]  # F names
    time: NDArray[np.int64]  # [T] UTC nanoseconds, strictly increasing: the END of each bar
    open: NDArray[np.float64]  # [T, S]
    high: NDArray[np.float64]  # [T, S]
    low: NDArray[np.float64]  # [T, S]
    close: NDArray[np.float64]  # [T, S]
    volume: NDArray[np.float64]  # [T, S]
    spread: NDArray[np.float64]  # [T, S] in units of price; 0 if the file has no spread
    tradable: NDArray[np.bool_]  # [T, S] False in a gap: prices repeat the last close
    feature: NDArray[np.float32]  # [T, S, F] normalised with statistics of the train period

    def rows(self, index: slice) -> Market:
        """Some of the rows, as views."""
        names = self._fields[2:]
        return self._replace(**{name: getattr(self, name)[index] for name in names})


def periods_per_year(time: NDArray[np.int64]) -> float:
    """Bars per year of 365.25 days, closed hours included; for the Sharpe ratio of a year."""
    years = (int(time[-1]) - int(time[0])) / (365.25 * 86_400e9)
    return (len(time) - 1) / years
