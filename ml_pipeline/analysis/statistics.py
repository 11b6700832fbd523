"""Statistics over seeds, as Agarwal et al. (2021) recommend for few runs.

The interquartile mean is robust and uses more of the data than a median. Intervals are
bootstrapped over runs, with a fixed seed: the same runs give the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEW_SEEDS = 5  # with fewer runs in a group, no difference is claimed
_N_DRAWS = 2_000
_DRAWS_AT_ONCE = 100  # bounds the memory: 50 curves of 100 points take 4 MB
_CONFIDENCE = 0.95
_Z = 1.959964  # the standard normal quantile of a two-sided 95 % interval


class Estimate(NamedTuple):
    """A statistic with its 95 % interval; arrays if there are several."""

    value: Array
    low: Array
    high: Array


def iqm(runs: Array) -> Array:
    """Mean of the middle half of the runs, or of all if fewer than 4: [n_runs, ...] -> [...]."""
    cut = len(runs) // 4
    ordered = np.sort(runs, axis=0)
    return np.asarray(ordered[cut : len(runs) - cut].mean(axis=0))


def with_interval(runs: Array, statistic: Callable[[Array], Array] = iqm) -> Estimate:
    """``statistic`` reduces axis 0 of [n_runs, ...]; its interval is nan for a single run."""
    runs = np.asarray(runs, dtype=np.float64)
    value = np.asarray(statistic(runs))
    if len(runs) < 2:
        unknown = np.full_like(value, np.nan)
        return Estimate(value, unknown, unknown)
    rows = _resampled(len(runs), stream=0).T
    parts = [
        statistic(runs[rows[:, start : start + _DRAWS_AT_ONCE]])  # [n_runs, n_draws, ...]
        for start in range(0, _N_DRAWS, _DRAWS_AT_ONCE)
    ]
    return estimate(value, np.concatenate(parts))  # of [n_draws, ...]


def stratified(parts: Sequence[Array], statistic: Callable[[Array], Array] = iqm) -> Estimate:
    """``statistic`` over the runs of all parts, such as envs; each part is resampled on its own."""
    value = np.asarray(statistic(np.concatenate(parts)))
    if min(map(len, parts)) < 2:
        unknown = np.full_like(value, np.nan)
        return Estimate(value, unknown, unknown)
    rows = [_resampled(len(part), stream).T for stream, part in enumerate(parts)]
    draws = [
        statistic(
            np.concatenate(
                [
                    part[row[:, start : start + _DRAWS_AT_ONCE]]
                    for part, row in zip(parts, rows, strict=True)
                ]
            )
        )
        for start in range(0, _N_DRAWS, _DRAWS_AT_ONCE)
    ]
    return estimate(value, np.concatenate(draws))


def probability_of_improvement(ours: Array, theirs: Array) -> Estimate:
    """P(a run of ours ends above a run of theirs); ties count half. Each side is resampled."""
    return mean_improvement([(ours, theirs)])


def mean_improvement(pairs: Sequence[tuple[Array, Array]]) -> Estimate:
    """The mean probability of improvement over pairs of groups, such as one pair per env."""
    values, draws = [], []
    for number, (ours, theirs) in enumerate(pairs):
        better = np.sign(np.asarray(ours)[:, None] - np.asarray(theirs)[None, :]) * 0.5 + 0.5
        values.append(better.mean())
        rows, columns = (_resampled(n, 2 * number + side) for side, n in enumerate(better.shape))
        draws.append([better[np.ix_(r, c)].mean() for r, c in zip(rows, columns, strict=True)])
    value = np.asarray(np.mean(values))
    if min(len(side) for pair in pairs for side in pair) < 2:
        return Estimate(value, np.asarray(np.nan), np.asarray(np.nan))
    return estimate(value, np.mean(draws, axis=0))


def performance_profile(finals: Array, thresholds: Array) -> Estimate:
    """The share of runs that end at or above each threshold."""
    above = np.asarray(finals)[:, None] >= thresholds[None, :]
    return with_interval(above.astype(np.float64), lambda runs: runs.mean(axis=0))


def wilson(successes: Array | float, n: Array | float) -> Estimate:
    """The share of successes in ``n`` independent trials with its Wilson interval; nan if n = 0."""
    successes, n = np.asarray(successes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    n = np.where(n == 0, np.nan, n)
    share, z2 = successes / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * np.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return Estimate(share, np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0))


def verdict(label: str, other: str, pairs: Sequence[tuple[Array, Array]]) -> str:
    """The claim that the runs of two groups support, one pair per env, in one line."""
    few = min(len(side) for pair in pairs for side in pair)
    if few < FEW_SEEDS:
        return (
            f"{few} seed{'s are' if few > 1 else ' is'} too few to claim a difference between "
            f"{label} and {other}; train {FEW_SEEDS} or more of each"
        )
    value, low, high = mean_improvement(pairs)
    shown = f"probability of improvement {value:.2f}, 95 % interval {low:.2f} to {high:.2f}"
    if low > 0.5:
        return f"{label} is better than {other}: {shown}"
    if high < 0.5:
        return f"{label} is worse than {other}: {shown}"
    return f"no difference can be claimed between {label} and {other}: {shown}"


def _resampled(n_runs: int, stream: int) -> NDArray[np.int64]:
    """Indices of the runs in each draw, with replacement: [n_draws, n_runs]."""
    generator = np.random.default_rng([stream, n_runs])
    return generator.integers(0, n_runs, (_N_DRAWS, n_runs))


def estimate(value: Array | float, draws: Array) -> Estimate:
    """A value with the 95 % percentile interval of its draws, [n_draws, ...]."""
    tail = 0.5 * (1.0 - _CONFIDENCE)
    low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
    return Estimate(np.asarray(value), np.asarray(low), np.asarray(high))
