"""The charts of a comparison: curves, final values, profiles, efficiency and speed of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ml_pipeline.analysis.compare import Group
from ml_pipeline.analysis.figures import COLOURS, Bar, Chart, Line, Mark
from ml_pipeline.analysis.run_data import RunData
from ml_pipeline.analysis.statistics import (
    Array,
    iqm,
    iqm_over_envs,
    iqm_with_interval,
    mean_over_envs,
    performance_profile,
    probability_of_improvement,
)
from ml_pipeline.metrics import PHASE, shown_return

MOST_GROUPS = len(COLOURS)  # in a chart

_N_POINTS = 100  # of a curve
_BAND = "Interquartile mean over the seeds with its 95 % interval"


def make_charts(groups: Sequence[Group], metric: str) -> list[Chart]:
    """The charts of the best groups, at most ``MOST_GROUPS``."""
    groups = groups[:MOST_GROUPS]

    return [
        _curves(groups, metric),
        _curves_by_time(groups, metric),
        _final(groups, metric),
        *([_improvement(groups, metric)] if len(groups) > 1 else []),
        _profile(groups, metric),
        _efficiency(groups, metric),
        _throughput(groups),
    ]


def _noted(chart: Chart, groups: Sequence[Group], why: str, *, first_rank: int = 0) -> Chart:
    """The chart whose note also names the groups that are not drawn."""
    if chart.is_empty:
        return chart._replace(note=f"Nothing to draw: {why}.")
    ranks = {line.rank for line in chart.lines} | {bar.rank for bar in chart.bars}
    missing = [group.name for rank, group in enumerate(groups, first_rank) if rank not in ranks]
    if not missing:
        return chart
    return chart._replace(note=f"{chart.note} Not drawn: {', '.join(missing)} ({why}).")


def _curves(groups: Sequence[Group], metric: str) -> Chart:
    lines = _lines(groups, metric, lambda run: run.curve(metric)[0])
    why = f"no {metric} over a range of steps that its runs share"
    marks = _phase_marks(groups)
    note = f"{_BAND}." + (" Dotted: a phase of the curriculum starts." if marks else "")
    title = "Learning curves"
    chart = Chart("curves", title, "env steps", metric, note, lines=lines, marks=marks)
    return _noted(chart, groups, why)


def _phase_marks(groups: Sequence[Group]) -> list[Mark]:
    """Where each phase starts, the median over the runs of a group that reach it."""
    marks = []
    for rank, group in enumerate(groups):
        starts: dict[float, list[float]] = {}
        for run in group.runs:
            steps, phases = run.curve(PHASE)
            for last in np.flatnonzero(np.diff(phases)).tolist():
                starts.setdefault(float(phases[last + 1]), []).append(float(steps[last]))
        marks += [Mark(rank, float(np.median(each))) for _, each in sorted(starts.items())]
    return marks


def _curves_by_time(groups: Sequence[Group], metric: str) -> Chart:
    lines = _lines(groups, metric, lambda run: run.seconds(metric))
    why = f"no {metric} over a range of time that its runs share"
    note = f"{_BAND}. The time excludes evaluation and saving."
    title = "Learning curves by training time"
    chart = Chart("curves_by_time", title, "seconds", metric, note, lines=lines)
    return _noted(chart, groups, why)


def _lines(
    groups: Sequence[Group], metric: str, position: Callable[[RunData], Array]
) -> list[Line]:
    """One line per group, over the range that all of its runs with the metric cover."""
    lines = []
    for rank, group in enumerate(groups):
        seeds = [[run for run in runs if len(position(run))] for runs in group.seeds]
        measured = group._replace(seeds=[runs for runs in seeds if runs])
        start = max((position(run)[0] for run in measured.runs), default=np.nan)
        end = min((position(run)[-1] for run in measured.runs), default=np.nan)
        if start <= end:
            x = np.linspace(start, end, _N_POINTS if start < end else 1)
            held = partial(_held, position=position, metric=metric, at=x)
            lines.append(Line(group.name, rank, x, *iqm_with_interval(measured.per_seed(held))))
    return lines


def _held(run: RunData, *, position: Callable[[RunData], Array], metric: str, at: Array) -> Array:
    """The last value of a run at or before each position."""
    return run.curve(metric)[1][np.searchsorted(position(run), at, side="right") - 1]


def iqm_bar(label: str, rank: int, parts: Sequence[Array]) -> Bar:
    """The IQM of the seeds of one env, or the mean of those of several."""
    value, low, high = map(float, iqm_over_envs(parts))
    return Bar(label, rank, value, low, high, np.concatenate(parts))


def _bars(groups: Sequence[Group], points_of: Callable[[Group], Array]) -> list[Bar]:
    """One bar per group with a finite point."""
    bars = []
    for rank, group in enumerate(groups):
        points = points_of(group)
        points = points[np.isfinite(points)]
        if len(points):
            bars.append(iqm_bar(group.name, rank, [points]))
    return bars


def _final(groups: Sequence[Group], metric: str) -> Chart:
    bars = _bars(groups, lambda group: group.finals(metric))
    note = f"{_BAND}. Each tick is one seed."
    chart = Chart("final", "Final performance", metric, "", note, bars=bars)
    return _noted(chart, groups, f"no {metric} in its runs")


def _improvement(groups: Sequence[Group], metric: str) -> Chart:
    chart = improvement_chart({group.name: [group.finals(metric)] for group in groups})
    return _noted(chart, groups[1:], f"no {metric} in its runs", first_rank=1)


def improvement_chart(finals: Mapping[str, Sequence[Array]]) -> Chart:
    """The best group against each other group; ``finals`` of the seeds in one or several envs."""
    best, *others = finals
    bars = []
    for rank, name in enumerate(others, start=1):
        pairs = list(zip(finals[best], finals[name], strict=True))
        if all(len(each) for pair in pairs for each in pair):
            estimates = [probability_of_improvement(*pair) for pair in pairs]
            value, low, high = map(float, mean_over_envs(estimates))
            bars.append(Bar(name, rank, value, low, high, np.array([])))
    note = f"Probability that a run of {best} ends above a run of each other group. 0.5: equal."
    x_title = f"{best} is better with probability"
    title, all_of_it = "Probability of improvement", (-0.02, 1.02)
    return Chart("improvement", title, x_title, "", note, bars=bars, x_range=all_of_it)


def _profile(groups: Sequence[Group], metric: str) -> Chart:
    finals = {group.name: group.finals(metric) for group in groups}
    note = f"Share of seeds whose final {metric} is at or above each value. Higher is better."
    title = "Performance profile"
    lines = profile_lines(finals)
    chart = Chart("profile", title, metric, "share of seeds", note, lines=lines)
    return _noted(chart, groups, f"no {metric} in its runs")


def profile_lines(finals: Mapping[str, Array], *, shown: Sequence[float] = ()) -> list[Line]:
    """The share of each group's values at or above each position; ``shown`` are in the range."""
    every = np.concatenate([*finals.values(), np.asarray(shown)])
    low, high = (every.min(), every.max()) if len(every) else (0.0, 0.0)
    x = np.linspace(low, high, _N_POINTS if low < high else 1)
    return [
        Line(name, rank, x, *performance_profile(values, x))
        for rank, (name, values) in enumerate(finals.items())
        if len(values)
    ]


def _efficiency(groups: Sequence[Group], metric: str) -> Chart:
    """Env steps to 90 % of the way from the first value to the best group's final value."""
    curves = [run.curve(metric)[1] for group in groups for run in group.runs]
    firsts = np.array([values[0] for values in curves if len(values)])
    finals = [group.finals(metric) for group in groups if len(group.finals(metric))]
    target = np.nan
    if finals:
        start = float(iqm(firsts))
        best = max(float(iqm(each)) for each in finals)
        target = start + 0.9 * (best - start)
    bars = []
    for rank, group in enumerate(groups):
        needed = group.per_seed(lambda run: _steps_to(run, metric, target))
        reached = needed[np.isfinite(needed)]
        counted = f"{group.name} ({len(reached)} of {len(needed)})"
        if len(reached) == len(needed):
            bars.append(iqm_bar(counted, rank, [reached]))
        elif len(reached):  # a mean over the successful seeds alone would be too optimistic
            bars.append(Bar(counted, rank, np.nan, np.nan, np.nan, reached))
    goal = shown_return(target)
    note = f"Env steps until {metric} reaches {goal}. In brackets: the seeds that reach it."
    chart = Chart("efficiency", "Sample efficiency", "env steps", "", note, bars=bars)
    return _noted(chart, groups, "no run reaches the value")


def _steps_to(run: RunData, metric: str, target: float) -> float:
    steps, values = run.curve(metric)
    reached = np.flatnonzero(values >= target)
    return float(steps[reached[0]]) if len(reached) else float("nan")


def _throughput(groups: Sequence[Group]) -> Chart:
    bars = _bars(groups, lambda group: group.per_seed(RunData.steps_per_second))
    title = "Throughput"
    chart = Chart("throughput", title, "env steps per second", "", f"{_BAND}.", bars=bars)
    return _noted(chart, groups, "no time/iteration_seconds in its metrics.csv")
