"""Statistics of equity curves: ratios, the deflated Sharpe ratio, and block bootstrap intervals.

Ratios are per bar: multiply a Sharpe or Sortino ratio by sqrt(periods per year) for that of a year.
Returns are simple, in excess of cash, which earns nothing in the trading envs.

Sources: Bailey & Lopez de Prado (2012) "The Sharpe ratio efficient frontier" for the probabilistic
Sharpe ratio, (2014) "The deflated Sharpe ratio"; Politis & White (2004) with the correction of
Patton, Politis & White (2009) for the length of a block.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.analysis.statistics import Array

N_DRAWS = 2_000  # of a bootstrap
_NORMAL = NormalDist()
_EULER = 0.5772156649015329  # the Euler-Mascheroni constant
_TINY = 1e-12  # a smaller deviation, relative to the size of the returns, is rounding


def bar_returns(equity: Array) -> Array:
    """Simple returns of an equity curve [T + 1]; 0 after the equity is lost."""
    before, after = equity[:-1], equity[1:]
    return np.divide(after, before, out=np.ones_like(after), where=before > 0.0) - 1.0


def sharpe_ratio(returns: Array) -> float:
    """Mean / standard deviation; 0 if the returns do not vary."""
    return float(returns.mean() / returns.std(ddof=1)) if varies(returns) else 0.0


def varies(returns: Array) -> bool:
    """Whether the returns differ by more than rounding."""
    size = float(np.abs(returns).max())
    return len(returns) > 2 and float(returns.std()) > _TINY * size


def sortino_ratio(returns: Array) -> float:
    """Mean / root mean square of the losses; infinite without a loss, 0 without any return."""
    losses = math.sqrt(float(np.square(np.minimum(returns, 0.0)).mean()))
    mean = float(returns.mean())
    if losses == 0.0:
        return math.inf if mean > 0.0 else 0.0
    return mean / losses


def max_drawdown(equity: Array) -> float:
    """The largest loss since the highest equity before, as a share of it."""
    return float((1.0 - equity / np.maximum.accumulate(equity)).max())


def annual_return(equity: Array, periods_per_year: float) -> float:
    """Compound growth per year; -1 if everything is lost."""
    growth = float(equity[-1] / equity[0])
    years = (len(equity) - 1) / periods_per_year
    if growth <= 0.0:
        return -1.0
    return math.expm1(min(math.log(growth) / years, 700.0))  # exp overflows after 709


def calmar_ratio(equity: Array, periods_per_year: float) -> float:
    """Growth per year / maximum drawdown; infinite without a drawdown, 0 without growth."""
    growth, fall = annual_return(equity, periods_per_year), max_drawdown(equity)
    if fall == 0.0:
        return math.inf if growth > 0.0 else 0.0
    return growth / fall


def shape(returns: Array) -> tuple[float, float]:
    """Skewness, and kurtosis, which is 3 for normal returns."""
    score = (returns - returns.mean()) / returns.std()
    return float((score**3).mean()), float((score**4).mean())


def probabilistic_sharpe(
    sharpe: float, *, benchmark: float, n_bars: float, skewness: float, kurtosis: float
) -> float:
    """Confidence that the true ratio per bar is above ``benchmark``.

    It is 1 - p, where p is the p-value of the hypothesis that it is not.
    """
    spread = 1.0 - skewness * sharpe + (kurtosis - 1.0) / 4.0 * sharpe**2
    return _NORMAL.cdf((sharpe - benchmark) * math.sqrt((n_bars - 1.0) / max(spread, _TINY)))


def expected_best_sharpe(n_trials: int, variance: float) -> float:
    """Expected maximum of ``n_trials`` independent estimates whose true value is 0."""
    if n_trials < 2:
        return 0.0
    high = _NORMAL.inv_cdf(1.0 - 1.0 / n_trials)
    higher = _NORMAL.inv_cdf(1.0 - 1.0 / (n_trials * math.e))
    return math.sqrt(variance) * ((1.0 - _EULER) * high + _EULER * higher)


def deflated_sharpe(returns: Array, n_trials: int) -> tuple[float, float]:
    """The probabilistic Sharpe ratio against the best of ``n_trials`` without skill, and that best.

    Ratios of trials without skill have the variance of an estimate of 0 over as many bars. The
    number of bars is the effective one. With one trial the benchmark is 0.
    """
    if not varies(returns):
        return 0.0, 0.0
    n_bars = effective_bars(returns)
    best = expected_best_sharpe(n_trials, 1.0 / (n_bars - 1.0))
    skewness, kurtosis = shape(returns)
    sure = probabilistic_sharpe(
        sharpe_ratio(returns), benchmark=best, n_bars=n_bars, skewness=skewness, kurtosis=kurtosis
    )
    return sure, best


def effective_bars(returns: Array) -> float:
    """Bars / (1 + 2 * sum of autocorrelations) as in Newey & West (1987); never more than bars."""
    n = len(returns)
    n_lags = min(math.ceil(n ** (1 / 3)), n - 1)
    covariance = _autocovariance(returns, n_lags)
    if covariance[0] <= 0.0:
        return float(n)
    weights = 1.0 - np.arange(1, n_lags + 1) / (n_lags + 1)
    ratio = 1.0 + 2.0 * float((weights * covariance[1:]).sum() / covariance[0])
    return max(n / max(ratio, 1.0), 2.0)


def block_length(values: Array) -> int:
    """Length of the blocks of a circular bootstrap of a mean, from the correlogram of ``values``.

    (1.5)^(1/3) * (G / g)^(2/3) * n^(1/3), where g is the sum of the autocovariances and G that of
    |lag| * autocovariance, both with a flat-top window. At least n^(1/3), at most 3 * sqrt(n).
    """
    n = len(values)
    most = max(min(math.ceil(3.0 * math.sqrt(n)), n // 3), 1)
    least = min(math.ceil(math.pow(n, 1 / 3)), most)
    n_quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    n_lags = min(math.ceil(math.sqrt(n)) + n_quiet, n - 1)
    covariance = _autocovariance(values, n_lags)
    if covariance[0] <= 0.0:
        return least
    correlation = covariance[1:] / covariance[0]
    band = 2.0 * math.sqrt(math.log10(n) / n)
    # The last lag that matters is followed by n_quiet insignificant ones.
    quiet = np.convolve(np.abs(correlation) < band, np.ones(n_quiet), mode="valid") == n_quiet
    last = int(np.argmax(quiet)) if quiet.any() else n_lags
    window = min(2 * max(last, 1), n_lags)
    lags = np.arange(1, window + 1)
    weights = np.minimum(1.0, 2.0 * (1.0 - lags / window))
    near = weights * covariance[1 : window + 1]
    total = float(covariance[0] + 2.0 * near.sum())
    if total <= 0.0:
        return least
    slope = abs(float(2.0 * (lags * near).sum())) / total
    return min(max(math.ceil(math.pow(1.5 * slope**2 * n, 1 / 3)), least), most)


def sharpe_draws(returns: Array, block: int) -> Array:
    """Sharpe ratios [n_draws, K] of resampled returns [T, K]; all columns share their blocks.

    Circular block bootstrap: a draw is as long as T in whole blocks, rounded down.
    """
    n, n_columns = returns.shape
    n_blocks = max(n // block, 1)
    starts = np.random.default_rng([0, n, block]).integers(0, n, (N_DRAWS, n_blocks))
    length = n_blocks * block
    draws = np.empty((N_DRAWS, n_columns))
    for column in range(n_columns):
        centre = returns[:, column].mean()  # keeps the sums of squares precise
        values = returns[:, column] - centre
        first, second = (_block_sums(each, block)[starts].sum(1) for each in (values, values**2))
        mean = first / length
        variance = np.maximum(second / length - mean**2, 0.0) * length / max(length - 1, 1)
        varies = variance > (_TINY * np.abs(returns[:, column]).max()) ** 2
        scale = np.sqrt(np.where(varies, variance, 1.0))
        draws[:, column] = np.where(varies, (mean + centre) / scale, 0.0)
    return draws


def _block_sums(values: Array, block: int) -> Array:
    """Sums of the blocks that start at each bar; the end continues at the beginning."""
    total = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: block - 1])))))
    return total[block:] - total[:-block]


def _autocovariance(values: Array, n_lags: int) -> NDArray[np.float64]:
    """At the lags 0 to ``n_lags``: sums over T - k products, divided by T."""
    n = len(values)
    centred = values - values.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    return np.fft.irfft(spectrum * spectrum.conj(), size)[: n_lags + 1] / n
