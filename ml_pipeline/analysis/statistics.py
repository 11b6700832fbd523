"""Statistics over seeds: intervals and claims that hold for 3 runs as well as for 30.

The interquartile mean (IQM) and the probability of improvement are those of Agarwal et al. (2021).
Their bootstrap intervals need more runs than most people train: with 3 seeds, a "95 %" interval
holds the truth in 3 of 4 cases. These are closed forms, measured by benchmarks/coverage.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEW_SEEDS = 5  # with fewer runs in a group, no difference is claimed
_CONFIDENCE = 0.95
_Z = 1.959964  # the standard normal quantile of a two-sided 95 % interval
_FEW_FOR_SPREAD = 8  # with fewer runs, all of them tell the spread
_FEWEST_TO_LEAVE_OUT = 4  # with fewer runs, the IQM is the mean of all
# The variance of the mean of the middle half in that of the mean of all, for 4 to 7 runs: 1.1 of
# normal runs, 1.5 of uniform ones.
_OF_FEW = 1.2
_MOST_ARRANGEMENTS = 20_000  # of the ranks, for an exact test


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


def iqm_with_interval(runs: Array) -> Estimate:
    """The IQM of [n_runs, ...] and its interval by Student's t; nan for a single run."""
    return iqm_over_envs([runs])


def iqm_over_envs(parts: Sequence[Array]) -> Estimate:
    """The mean of the IQMs of several envs, [n_runs, ...] each, with its interval.

    The envs may have different spreads and numbers of runs, so the degrees of freedom are those of
    Welch and Satterthwaite.
    """
    found = [_iqm_and_variance(np.asarray(part, dtype=np.float64)) for part in parts]
    value = np.mean([each.value for each in found], axis=0)
    if any(each.freedom < 1 for each in found):
        unknown = np.full_like(value, np.nan)
        return Estimate(value, unknown, unknown)
    total = np.sum([each.variance for each in found], axis=0)
    # The shares of the envs, for variances of any size; equal ones where nothing varies.
    shares = [np.where(total > 0, each.variance, 1.0) for each in found] / np.where(
        total > 0, total, float(len(found))
    )
    freedom = 1.0 / np.sum(
        [share**2 / each.freedom for share, each in zip(shares, found, strict=True)], axis=0
    )
    half = _student_quantiles(freedom) * np.sqrt(total) / len(found)
    return Estimate(value, value - half, value + half)


class _Iqm(NamedTuple):
    value: Array
    variance: Array  # of ``value``
    freedom: int  # of the variance; 0 for a single run


def _iqm_and_variance(runs: Array) -> _Iqm:
    """The middle half of a few runs says too little of their spread, so all of them tell it.

    From 8 runs on, those that the mean leaves out count as the nearest that it keeps (Tukey,
    McLaughlin).
    """
    value, n_runs = iqm(runs), len(runs)
    if n_runs < 2:
        return _Iqm(value, np.zeros_like(value), 0)
    cut = 0 if n_runs < _FEW_FOR_SPREAD else n_runs // 4
    n_kept = n_runs - 2 * cut
    ordered = np.sort(runs, axis=0)
    winsorized = ordered[np.clip(np.arange(n_runs), cut, n_runs - cut - 1)]
    squares = ((winsorized - value) ** 2).sum(axis=0)
    leaves_out = n_runs >= _FEWEST_TO_LEAVE_OUT and not cut
    factor = _OF_FEW if leaves_out else 1.0
    return _Iqm(value, np.asarray(factor * squares / (n_kept * (n_kept - 1))), n_kept - 1)


def _student_quantiles(freedom: Array) -> Array:
    """``student_quantile`` for degrees of freedom between integers; at most 3 % too wide."""
    below = np.floor(freedom + 1e-9)
    known = {each: math.log(student_quantile(int(each))) for each in np.unique([below, below + 1])}
    low, high = (np.vectorize(known.__getitem__)(each) for each in (below, below + 1))
    weight = (1 / below - 1 / freedom) / (1 / below - 1 / (below + 1))
    return np.asarray(np.exp(low + weight * (high - low)))


@cache
def student_quantile(freedom: int) -> float:
    """Half the width of a two-sided 95 % interval of Student's t, by bisection."""
    low, high = 0.0, 20.0  # 12.7 for one degree of freedom
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (
            (middle, high) if _share_within(middle, freedom) < _CONFIDENCE else (low, middle)
        )
    return high


def _share_within(t: float, freedom: int) -> float:
    """P(-t < T < t) for Student's t, by the finite sums of Abramowitz and Stegun (26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if is_odd else 1.0)
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine2 * (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd)
    return 2.0 / math.pi * (angle + total) if is_odd else total


def mean_over_envs(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent shares; its interval follows from theirs (Zou, Donner 2008)."""
    value = np.mean([part.value for part in parts], axis=0)
    below = np.sum([(part.value - part.low) ** 2 for part in parts], axis=0)
    above = np.sum([(part.high - part.value) ** 2 for part in parts], axis=0)
    return Estimate(
        np.asarray(value),
        np.asarray(value - np.sqrt(below) / len(parts)),
        np.asarray(value + np.sqrt(above) / len(parts)),
    )


def probability_of_improvement(ours: Array, theirs: Array) -> Estimate:
    """P(a run of ours ends above a run of theirs); ties count half. Newcombe's (2006) interval."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    value = float((np.sign(ours[:, None] - theirs[None, :]) * 0.5 + 0.5).mean())
    n_ours, n_theirs = len(ours), len(theirs)
    if min(n_ours, n_theirs) < 2:
        return Estimate(np.asarray(value), np.asarray(np.nan), np.asarray(np.nan))
    more = 0.5 * (n_ours + n_theirs) - 1.0

    def error(share: float) -> float:
        """The standard error if ``share`` were the truth."""
        variance = share * (1.0 - share) / (n_ours * n_theirs)
        spread = 1.0 + more * ((1.0 - share) / (2.0 - share) + share / (1.0 + share))
        return math.sqrt(variance * spread)

    def end(extreme: float) -> float:
        """The share furthest towards ``extreme`` that the runs do not contradict."""
        inside, outside = value, extreme
        for _ in range(60):
            middle = 0.5 * (inside + outside)
            is_inside = abs(middle - value) <= _Z * error(middle)
            inside, outside = (middle, outside) if is_inside else (inside, middle)
        return inside

    return Estimate(np.asarray(value), np.asarray(end(0.0)), np.asarray(end(1.0)))


def performance_profile(finals: Array, thresholds: Array) -> Estimate:
    """The share of runs that end at or above each threshold, with Wilson intervals."""
    above = np.asarray(finals)[:, None] >= thresholds[None, :]
    return wilson(above.sum(axis=0), np.asarray(float(len(above))))


def wilson(successes: Array | float, n: Array | float) -> Estimate:
    """The share of successes in ``n`` independent trials with its Wilson interval; nan if n = 0."""
    successes, n = np.asarray(successes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    n = np.where(n == 0, np.nan, n)
    share, z2 = successes / n, _Z**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * np.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return Estimate(share, np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0))


def rank_sum_p(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Two-sided p of Wilcoxon's rank-sum test, with ties: the ranks of each pair, such as an env.

    Exact for few runs, otherwise the normal approximation.
    """
    is_exact = all(math.comb(len(o) + len(t), len(o)) <= _MOST_ARRANGEMENTS for o, t in pairs)
    found, variance = 0.0, 0.0
    sums: Array = np.zeros(1)  # that equal groups can have
    shares: Array = np.ones(1)  # how often
    for ours, theirs in pairs:
        together = np.concatenate([ours, theirs])
        ranks = 0.5 * np.sign(together[:, None] - together[None, :]).sum(axis=1)  # from the middle
        n_ours, n = len(ours), len(ranks)
        found += float(ranks[:n_ours].sum())
        variance += n_ours * (n - n_ours) / n * float(ranks.var(ddof=1))
        if is_exact:
            own, own_shares = _rank_sums(tuple(sorted(ranks.tolist())), n_ours)
            sums, places = np.unique(np.add.outer(sums, own).ravel(), return_inverse=True)
            weights = np.multiply.outer(shares, own_shares).ravel()
            shares = np.asarray(np.bincount(places.ravel(), weights=weights), dtype=np.float64)
    if is_exact:
        return float(shares[abs(sums) >= abs(found) - 1e-9].sum())
    z = max(abs(found) - 0.5, 0.0) / math.sqrt(variance) if variance > 0 else 0.0
    return math.erfc(z / math.sqrt(2))


@lru_cache(maxsize=1_000)  # without ties, it is the same for all pairs of a size
def _rank_sums(ranks: tuple[float, ...], n_ours: int) -> tuple[Array, Array]:
    """The sums that ``n_ours`` of the ranks can have, and the share of the choices that have it."""
    values, counts = np.unique(
        [sum(each) for each in combinations(ranks, n_ours)], return_counts=True
    )
    return values, counts / counts.sum()


def needed_seeds(n_groups: int, n_envs: int = 1) -> int:
    """Runs per group and env with which a claim among ``n_groups`` is possible at all."""
    n_pairs, seeds = n_groups * (n_groups - 1) // 2, FEW_SEEDS
    while 2 / math.comb(2 * seeds, seeds) ** n_envs * n_pairs > 1.0 - _CONFIDENCE:
        seeds += 1
    return seeds


def are_claimed(p_values: Sequence[float]) -> list[bool]:
    """Which of several differences hold together at 95 %, by Holm's method."""
    claimed = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] * (len(p_values) - rank) > 1.0 - _CONFIDENCE:
            break
        claimed[index] = True
    return claimed


def verdicts(groups: Mapping[str, Sequence[Array]]) -> list[str]:
    """What the runs, per env, say of the first group against each other one, a line each.

    The first group was chosen because it is the best, so all pairs are corrected for, not its own.
    """
    names = list(combinations(groups, 2))
    pairs = [list(zip(groups[ours], groups[theirs], strict=True)) for ours, theirs in names]
    holds = are_claimed([rank_sum_p(each) for each in pairs])
    first = next(iter(groups), "")
    return [
        _verdict(ours, theirs, each, is_claimed)
        for (ours, theirs), each, is_claimed in zip(names, pairs, holds, strict=True)
        if ours == first
    ]


def _verdict(label: str, other: str, pairs: Sequence[tuple[Array, Array]], is_claimed: bool) -> str:
    value, low, high = mean_over_envs([probability_of_improvement(*pair) for pair in pairs])
    shown = f"probability of improvement {value:.2f}, 95 % interval {low:.2f} to {high:.2f}"
    if not is_claimed:
        return f"no difference can be claimed between {label} and {other}: {shown}"
    return f"{label} is {'better' if value > 0.5 else 'worse'} than {other}: {shown}"


def estimate(value: Array | float, draws: Array) -> Estimate:
    """A value with the 95 % percentile interval of its draws, [n_draws, ...]."""
    tail = 0.5 * (1.0 - _CONFIDENCE)
    low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
    return Estimate(np.asarray(value), np.asarray(low), np.asarray(high))
