"""The charts of a comparison, as numbers; ``report`` draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ml_pipeline.analysis.compare import Group, RunData
from ml_pipeline.analysis.statistics import (
    Array,
    iqm,
    performance_profile,
    probability_of_improvement,
    with_interval,
)

_N_POINTS = 100  # of a curve
_BAND = "Interquartile mean over the seeds with its 95 % bootstrap interval"


class Line(NamedTuple):
    """A curve and the band around it."""

    label: str
    x: Array
    y: Array
    low: Array
    high: Array


class Bar(NamedTuple):
    """A statistic with its interval, and the runs behind it."""

    label: str
    value: float
    low: float
    high: float
    points: Array  # one per run


class Chart(NamedTuple):
    """Lines, or horizontal bars; a chart has one kind."""

    name: str  # of the PNG file
    title: str
    x_title: str
    y_title: str
    note: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()


def make_charts(groups: Sequence[Group], metric: str) -> list[Chart]:
    def steps(run: RunData) -> Array:
        return run.curve(metric)[0]

    def seconds(run: RunData) -> Array:
        return run.seconds(metric)

    speeds = [
        _bar(group.label, np.array([run.steps_per_second() for run in group.runs]))
        for group in groups
    ]
    return [
        Chart(
            "curves",
            "Learning curves",
            "env steps",
            metric,
            f"{_BAND}.",
            lines=_curves(groups, metric, steps),
        ),
        Chart(
            "curves_by_time",
            "Learning curves by training time",
            "seconds",
            metric,
            f"{_BAND}. The time excludes evaluation and saving.",
            lines=_curves(groups, metric, seconds),
        ),
        Chart(
            "final",
            "Final performance",
            metric,
            "",
            f"{_BAND}. Each tick is one run.",
            bars=[_bar(g.label, g.finals(metric)) for g in groups if len(g.finals(metric))],
        ),
        *_improvement(groups, metric),
        _profile(groups, metric),
        _efficiency(groups, metric),
        Chart("throughput", "Throughput", "env steps per second", "", f"{_BAND}.", bars=speeds),
    ]


def _curves(
    groups: Sequence[Group], metric: str, position: Callable[[RunData], Array]
) -> list[Line]:
    """One line per group, over the range that all of its runs cover."""
    lines = []
    for group in groups:
        runs = [run for run in group.runs if len(run.curve(metric)[1])]
        if not runs:
            continue
        starts, ends = zip(*((position(run)[0], position(run)[-1]) for run in runs), strict=True)
        if max(starts) > min(ends):
            continue  # the runs do not overlap
        x = np.linspace(max(starts), min(ends), _N_POINTS)
        values = np.array([_held(position(run), run.curve(metric)[1], x) for run in runs])
        lines.append(Line(group.label, x, *with_interval(values)))
    return lines


def _held(x: Array, y: Array, at: Array) -> Array:
    """The last value at or before each position."""
    return y[np.searchsorted(x, at, side="right") - 1]


def _bar(label: str, points: Array) -> Bar:
    value, low, high = (float(each) for each in with_interval(points))
    return Bar(label, value, low, high, points)


def _improvement(groups: Sequence[Group], metric: str) -> list[Chart]:
    bars = []
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            ours, theirs = group.finals(metric), other.finals(metric)
            if len(ours) and len(theirs):
                value, low, high = (float(e) for e in probability_of_improvement(ours, theirs))
                label = f"{group.label} over {other.label}"
                bars.append(Bar(label, value, low, high, np.array([])))
    note = "Probability that a run of the first group ends above a run of the second. 0.5: equal."
    title = "Probability of improvement"
    return [Chart("improvement", title, "probability", "", note, bars=bars)] if bars else []


def _profile(groups: Sequence[Group], metric: str) -> Chart:
    finals = np.concatenate([group.finals(metric) for group in groups])
    thresholds = np.linspace(finals.min(), finals.max(), _N_POINTS) if len(finals) else finals
    lines = [
        Line(group.label, thresholds, *performance_profile(group.finals(metric), thresholds))
        for group in groups
        if len(group.finals(metric))
    ]
    note = f"Share of runs whose final {metric} is at or above each value. Higher is better."
    return Chart("profile", "Performance profile", metric, "share of runs", note, lines=lines)


def _efficiency(groups: Sequence[Group], metric: str) -> Chart:
    """Env steps to 90 % of the way from the first value to the best group's final value."""
    known = [group for group in groups if len(group.finals(metric))]
    firsts = [run.curve(metric)[1][0] for g in known for run in g.runs if len(run.curve(metric)[1])]
    title = "Sample efficiency"
    if not firsts:
        return Chart("efficiency", title, "env steps", "", "No run has a value.")
    start, best = iqm(np.array(firsts)), max(iqm(group.finals(metric)) for group in known)
    target = start + 0.9 * (best - start)
    bars = []
    for group in known:
        needed = np.array([_steps_to(run, metric, float(target)) for run in group.runs])
        reached = needed[np.isfinite(needed)]
        label = f"{group.label} ({len(reached)} of {len(needed)})"
        if len(reached) == len(needed):
            bars.append(_bar(label, reached))
        else:  # a mean over the successful runs alone would be too optimistic
            bars.append(Bar(label, np.nan, np.nan, np.nan, reached))
    note = f"Env steps until {metric} reaches {target:.1f}. In brackets: the runs that reach it."
    return Chart("efficiency", title, "env steps", "", note, bars=bars)


def _steps_to(run: RunData, metric: str, target: float) -> float:
    steps, values = run.curve(metric)
    reached = np.flatnonzero(values >= target)
    return float(steps[reached[0]]) if len(reached) else float("nan")
