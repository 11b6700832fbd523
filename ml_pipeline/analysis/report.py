"""The report of a comparison: one HTML file that needs no network, and a PNG per chart.

A chart is computed once, as numbers, and drawn twice: by plotly for the page, where it can be
hovered over and its groups toggled, and by matplotlib for the PNG.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ml_pipeline.analysis.compare import Group, RunData, differing_keys, verdicts
from ml_pipeline.analysis.statistics import (
    Array,
    iqm,
    performance_profile,
    probability_of_improvement,
    with_interval,
)
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.run_folder import RunFolderError, write_text

_N_POINTS = 100  # of a curve
_COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"),
)


class Line(NamedTuple):
    """A curve and the band around it."""

    label: str
    x: Array
    y: Array
    low: Array
    high: Array


class Bar(NamedTuple):
    """A figure with its interval, and the runs it comes from."""

    label: str
    value: float
    low: float
    high: float
    points: Array


class Chart(NamedTuple):
    """Numbers to be drawn: lines, or bars that lie below each other."""

    name: str  # of the PNG
    title: str
    x_title: str
    y_title: str
    lines: list[Line] = []  # noqa: RUF012  # never changed
    bars: list[Bar] = []  # noqa: RUF012
    note: str = ""


def make_charts(groups: Sequence[Group], metric: str) -> list[Chart]:
    """All charts of a comparison."""

    def steps(run: RunData) -> Array:
        return run.curve(metric)[0]

    def seconds(run: RunData) -> Array:
        return run.seconds(metric)

    by_steps = _curves(groups, metric, steps)
    band = "interquartile mean over the seeds, 95 % bootstrapped interval"
    return [
        Chart("curves", "Learning curves", "env steps", metric, by_steps, [], band),
        Chart(
            "curves_by_time",
            "Learning curves by training time",
            "seconds",
            metric,
            _curves(groups, metric, seconds),
            [],
            f"{band}; without evaluations and saving",
        ),
        Chart("final", "Final performance", metric, "", [], _finals(groups, metric), band),
        *_improvement(groups, metric),
        _profile(groups, metric),
        _efficiency(groups, metric),
        Chart(
            "throughput",
            "Throughput",
            "env steps per second",
            "",
            [],
            [
                _bar(group.label, np.array([run.steps_per_second() for run in group.runs]))
                for group in groups
            ],
            band,
        ),
    ]


def _curves(
    groups: Sequence[Group], metric: str, position: Callable[[RunData], Array]
) -> list[Line]:
    """One line per group, over what all of its runs have covered."""
    lines = []
    for group in groups:
        runs = [run for run in group.runs if len(run.curve(metric)[1])]
        if not runs:
            continue
        starts, ends = zip(*((position(run)[0], position(run)[-1]) for run in runs), strict=True)
        if max(starts) > min(ends):
            continue  # they have no stretch in common
        x = np.linspace(max(starts), min(ends), _N_POINTS)
        values = np.array([_held(position(run), run.curve(metric)[1], x) for run in runs])
        lines.append(Line(group.label, x, *with_interval(values)))
    return lines


def _held(x: Array, y: Array, at: Array) -> Array:
    """The last value taken at or before each place."""
    return y[np.searchsorted(x, at, side="right") - 1]


def _finals(groups: Sequence[Group], metric: str) -> list[Bar]:
    return [
        _bar(group.label, group.finals(metric)) for group in groups if len(group.finals(metric))
    ]


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
    note = "that a run of the first ends above one of the second; 0.5: neither"
    title = "Probability of improvement"
    return [Chart("improvement", title, "probability", "", [], bars, note)] if bars else []


def _profile(groups: Sequence[Group], metric: str) -> Chart:
    finals = np.concatenate([group.finals(metric) for group in groups])
    thresholds = np.linspace(finals.min(), finals.max(), _N_POINTS) if len(finals) else finals
    lines = [
        Line(group.label, thresholds, *performance_profile(group.finals(metric), thresholds))
        for group in groups
        if len(group.finals(metric))
    ]
    note = "the share of runs that end at or above a return; higher is better"
    return Chart("profile", "Performance profile", metric, "share of runs", lines, [], note)


def _efficiency(groups: Sequence[Group], metric: str) -> Chart:
    """Env steps until nine tenths of the way from where runs start to the best group's end."""
    known = [group for group in groups if len(group.finals(metric))]
    firsts = [run.curve(metric)[1][0] for g in known for run in g.runs if len(run.curve(metric)[1])]
    title = "Sample efficiency"
    if not firsts:
        return Chart("efficiency", title, "env steps", "")
    start, best = iqm(np.array(firsts)), max(iqm(group.finals(metric)) for group in known)
    target = start + 0.9 * (best - start)
    bars = []
    for group in known:
        needed = np.array([_steps_to(run, metric, float(target)) for run in group.runs])
        reached = needed[np.isfinite(needed)]
        label = f"{group.label} ({len(reached)} of {len(needed)})"
        if len(reached) == len(needed):
            bars.append(_bar(label, reached))
        else:  # the mean of those that got there would flatter
            bars.append(Bar(label, np.nan, np.nan, np.nan, reached))
    note = f"until {metric} reaches {target:.1f}; in brackets, how many runs did"
    return Chart("efficiency", title, "env steps", "", [], bars, note)


def _steps_to(run: RunData, metric: str, target: float) -> float:
    steps, values = run.curve(metric)
    reached = np.flatnonzero(values >= target)
    return float(steps[reached[0]]) if len(reached) else float("nan")


def write_report(folder: Path, groups: Sequence[Group], metric: str) -> Path:
    """The page and the PNGs; gives the path of the page."""
    import_extra("plotly", needed_by="the report")
    import_extra("matplotlib", needed_by="the report")
    charts = make_charts(groups, metric)
    labels = [group.label for group in groups]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            draw_png(chart, labels, folder / f"{chart.name}.png")
    except OSError as error:
        raise RunFolderError(f"cannot write the report into {folder}: {error}") from error
    page = folder / "report.html"
    write_text(page, _page(folder, groups, metric, charts))
    return page


def draw_png(chart: Chart, labels: Sequence[str], path: Path) -> None:
    """``labels`` are those of the groups, in the order of their colours."""
    from matplotlib.figure import Figure

    height = 4.0 if chart.lines else 1.4 + 0.5 * len(chart.bars)
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.subplots()
    for line in chart.lines:
        colour = _colour(line.label, labels)
        axes.plot(line.x, line.y, color=colour, label=line.label)
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    for row, bar in enumerate(chart.bars):
        colour = _colour(bar.label, labels)
        axes.plot(bar.points, np.full(len(bar.points), row), "|", color=colour, alpha=0.6)
        axes.plot([bar.low, bar.high], [row, row], color=colour, linewidth=4, alpha=0.4)
        axes.plot([bar.value], [row], "o", color=colour)
    if chart.bars:
        axes.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars], fontsize="small")
        axes.set_ylim(len(chart.bars) - 0.5, -0.5)
    elif chart.lines:
        axes.legend(fontsize="small")
    axes.set(title=chart.title, xlabel=chart.x_title, ylabel=chart.y_title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _plotly(chart: Chart, labels: Sequence[str]) -> Any:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for line in chart.lines:
        colour = _colour(line.label, labels)
        same = {"x": line.x, "legendgroup": line.label, "mode": "lines"}
        edge = {**same, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(y=line.high, **edge)
        figure.add_scatter(y=line.low, fill="tonexty", fillcolor=_faint(colour), **edge)
        figure.add_scatter(
            y=line.y,
            name=line.label,
            line={"color": colour},
            customdata=np.stack([line.low, line.high], axis=-1),
            hovertemplate="%{x:,.4~g}: %{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})",
            **same,
        )
    for bar in chart.bars:
        colour = _colour(bar.label, labels)
        figure.add_scatter(
            x=bar.points,
            y=[bar.label] * len(bar.points),
            mode="markers",
            marker={"color": colour, "symbol": "line-ns-open", "size": 9},
            hovertemplate="a run: %{x:.4~g}<extra></extra>",
            showlegend=False,
        )
        figure.add_scatter(
            x=[bar.value],
            y=[bar.label],
            name=bar.label,
            mode="markers",
            marker={"color": colour, "size": 11},
            error_x={
                "type": "data",
                "array": [bar.high - bar.value],
                "arrayminus": [bar.value - bar.low],
            },
            hovertemplate=f"%{{x:.4~g}} ({bar.low:.4g} to {bar.high:.4g})",
            showlegend=False,
        )
    figure.update_layout(
        title=chart.title,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        height=380 if chart.lines else 150 + 45 * len(chart.bars),
        legend={"orientation": "h", "y": -0.25},
        xaxis_title=chart.x_title,
        yaxis_title=chart.y_title,
    )
    if chart.bars:
        figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _colour(label: str, labels: Sequence[str]) -> str:
    """That of the group whose label it is, or begins with."""
    for index, known in enumerate(labels):
        if label == known or label.startswith((f"{known} over ", f"{known} (")):
            return _COLOURS[index % len(_COLOURS)]
    return _COLOURS[0]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def _page(folder: Path, groups: Sequence[Group], metric: str, charts: Sequence[Chart]) -> str:
    from plotly.offline import get_plotlyjs

    runs = [run for group in groups for run in group.runs]
    env = html.escape(runs[0].env)
    labels = [group.label for group in groups]
    drawn = []
    for chart in charts:
        figure = _plotly(chart, labels).to_html(
            full_html=False, include_plotlyjs=False, div_id=chart.name, config={"responsive": True}
        )
        drawn.append(f"<section>{figure}<p class=note>{html.escape(chart.note)}</p></section>")
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in verdicts(groups, metric))
    return _PAGE.format(
        env=env,
        script=get_plotlyjs(),
        when=datetime.now().strftime("%Y-%m-%d %H:%M"),
        n_runs=len(runs),
        n_groups=len(groups),
        metric=html.escape(metric),
        verdicts=f"<ul>{lines}</ul>" if lines else "",
        groups=_groups_html(groups, metric),
        charts="\n".join(drawn),
        differences=_differences_html(runs),
        runs=_runs_html(folder, groups, metric),
    )


def _groups_html(groups: Sequence[Group], metric: str) -> str:
    rows = []
    for group in groups:
        finals = group.finals(metric)
        value, low, high = with_interval(finals) if len(finals) else (np.nan, np.nan, np.nan)
        speed = float(np.median([run.steps_per_second() for run in group.runs]))
        interval = f"{low:.1f} to {high:.1f}" if np.isfinite(low) else "-"
        rows.append([group.label, len(group.runs), f"{value:.1f}", interval, f"{speed:,.0f}"])
    return _table(["group", "seeds", "final IQM", "95 % interval", "env steps/s"], rows)


def _differences_html(runs: Sequence[RunData]) -> str:
    """Only what differs; a column per value would be too many, so the runs are counted."""
    rows = []
    for key in differing_keys([run.config for run in runs]):
        counts: dict[str, int] = {}
        for run in runs:
            value = str(run.config.get(key, "-"))
            counts[value] = counts.get(value, 0) + 1
        told = ", ".join(f"{value} ({count})" for value, count in counts.items())
        rows.append([key, told])
    if not rows:
        return "<p>The configs are the same.</p>"
    return _table(["key", "values (number of runs)"], rows)


def _runs_html(folder: Path, groups: Sequence[Group], metric: str) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            link = os.path.relpath(run.run.path, folder)
            facts = [group.label, run.config.get("seed", "-"), run.summary.get("status", "-")]
            figures = [f"{run.env_steps:,}", f"{run.final(metric):.1f}"]
            commit = str(run.summary.get("git_commit") or "-")[:9]
            rows.append([(link, run.run.name), *facts, *figures, commit])
    return _table(["run", "group", "seed", "status", "env steps", metric, "commit"], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A cell that is a pair is a link: its address and its text."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Any) -> str:
    if isinstance(cell, tuple):
        address, text = (html.escape(str(each), quote=True) for each in cell)
        return f'<td><a href="{address}">{text}</a></td>'
    return f"<td>{html.escape(str(cell))}</td>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{env}: {n_runs} runs compared</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; color: #222; }}
h1 {{ margin-bottom: 0; }}
.when, .note {{ color: #666; font-size: 0.85rem; }}
.note {{ margin: 0 0 0 60px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem; }}
section {{ min-width: 0; }}
table {{ border-collapse: collapse; margin: 0.5rem 0 1.5rem; }}
th, td {{ text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #ddd; }}
@media (max-width: 40rem) {{ .charts {{ grid-template-columns: 1fr; }} }}
</style>
<script>{script}</script>
</head>
<body>
<h1>{env}</h1>
<p class="when">{n_runs} runs in {n_groups} groups by {metric}, {when}</p>
{verdicts}
{groups}
<div class="charts">
{charts}
</div>
<h2>What differs in the configs</h2>
{differences}
<h2>Runs</h2>
{runs}
<script>dispatchEvent(new Event("resize"));</script>
</body>
</html>
"""
