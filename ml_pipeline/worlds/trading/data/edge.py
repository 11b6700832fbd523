"""The best Sharpe ratio that is possible in the synthetic market ``edge``, without costs.

The next return is volatility * (rho * s + sqrt(1 - rho^2) * noise) with s and the noise standard
normal, so a position p(s) has the mean E[p rho s] and the second moment E[p^2 q(s)], where
q(s) = rho^2 s^2 + 1 - rho^2. The volatility and the persistence of the signal cancel.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_GRID = np.linspace(-12.0, 12.0, 48_001)  # the density at 12 is 1e-32


def optimal_sharpe(correlation: float, *, positions: str = "discrete") -> float:
    """The largest Sharpe ratio per bar; times sqrt(periods per year) it is that of a year.

    ``positions``: discrete for {-1, 0, 1}; continuous for [-1, 1]; sign for the policy that
    maximises the mean return and ignores risk, always 1 or -1.

    Sharpe^2 = m^2 / (E[p^2 q] - m^2), so the best p maximises K = m^2 / E[p^2 q]. By
    Cauchy-Schwarz this is p = rho s / q(s) up to a factor, bounded, with K = E[rho^2 s^2 / q].
    With {-1, 0, 1} the best p trades where |rho s| > c q(s), for the best threshold c.
    """
    if positions not in ("discrete", "continuous", "sign"):
        raise ValueError(f"positions={positions}: must be discrete | continuous | sign")
    mean = abs(correlation) * np.abs(_GRID)
    second = correlation**2 * np.square(_GRID) + 1.0 - correlation**2
    if positions == "continuous":
        return _sharpe(_expected(mean**2 / second))
    if positions == "sign":
        return _sharpe(_expected(mean) ** 2 / _expected(second))
    thresholds = np.linspace(0.0, 0.99 * float((mean / second).max()), 400)
    return max(_sharpe(_share(mean, second, c)) for c in thresholds)


def _share(mean: NDArray[np.float64], second: NDArray[np.float64], c: float) -> float:
    trades = mean >= c * second
    return _expected(mean * trades) ** 2 / _expected(second * trades)


def _expected(value: NDArray[np.float64]) -> float:
    density = np.exp(-0.5 * np.square(_GRID))
    return float((value * density).sum() / density.sum())


def _sharpe(k: float) -> float:
    return math.sqrt(k / (1.0 - k))
