"""The report of a comparison: one HTML file that needs no network, and a PNG per chart.

plotly draws a chart for the page, with hover texts and groups that can be hidden. matplotlib draws
the same chart as PNG.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline.analysis.charts import MOST_GROUPS, Chart, make_charts
from ml_pipeline.analysis.compare import (
    FIGURES,
    Group,
    figures,
    remarks,
    verdicts,
)
from ml_pipeline.analysis.run_data import RunData
from ml_pipeline.analysis.settings import differing_keys
from ml_pipeline.analysis.statistics import Array
from ml_pipeline.extras import import_extra
from ml_pipeline.metrics import shown_return
from ml_pipeline.runs.run_folder import RunFolderError, write_text

_COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"),
)


def write_report(folder: Path, groups: Sequence[Group], metric: str) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    import_extra("plotly", needed_by="the report")
    import_extra("matplotlib", needed_by="the report")
    charts = make_charts(groups, metric)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            if not chart.is_empty:
                draw_png(chart, folder / f"{chart.name}.png")
    except OSError as error:
        raise RunFolderError(f"cannot write the report into {folder}: {error}") from error
    page = folder / "report.html"
    write_text(page, _page(folder, groups, metric, charts))
    return page


def draw_png(chart: Chart, path: Path) -> None:
    """Draw a chart that is not empty."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # a value of a config may contain a $
        _draw_png(chart, path)


def _draw_png(chart: Chart, path: Path) -> None:
    from matplotlib.figure import Figure

    height = 4.0 if chart.lines else 1.4 + 0.35 * len(chart.bars)
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.subplots()
    for line in chart.lines:
        colour = _COLOURS[line.rank]
        if len(line.x) == 1:
            spread = [line.y - line.low, line.high - line.y]
            axes.errorbar(line.x, line.y, spread, fmt="o", color=colour, label=line.label)
            continue
        axes.plot(line.x, line.y, color=colour, label=line.label)
        axes.fill_between(
            line.x, line.low, line.high, color=colour, alpha=_opacity(chart), linewidth=0
        )
    for mark in chart.marks:
        axes.axvline(mark.x, color=_COLOURS[mark.rank], linestyle=":", linewidth=1)
    for row, bar in enumerate(chart.bars):
        colour = _COLOURS[bar.rank]
        axes.plot(bar.points, np.full(len(bar.points), row), "|", color=colour, markersize=9)
        axes.plot([bar.low, bar.high], [row, row], color=colour, linewidth=4, alpha=0.4)
        axes.plot([bar.value], [row], "o", color=colour)
    if chart.bars:
        axes.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars], fontsize="small")
        axes.set_ylim(len(chart.bars) - 0.5, -0.5)
    else:
        figure.legend(loc="outside right upper", fontsize="small")
    axes.set(title=chart.title, xlabel=chart.x_title, ylabel=chart.y_title, xlim=chart.x_range)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _plotly(chart: Chart) -> Any:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for line in chart.lines:
        colour = _COLOURS[line.rank]
        faint = _faint(colour, _opacity(chart))
        same = {"x": line.x, "legendgroup": line.label}
        edge = {**same, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(y=line.high, showlegend=False, **edge)
        figure.add_scatter(y=line.low, showlegend=False, fill="tonexty", fillcolor=faint, **edge)
        figure.add_scatter(
            y=line.y,
            name=line.label,
            mode="lines" if len(line.x) > 1 else "markers",
            line={"color": colour},
            marker={"color": colour, "size": 9},
            error_y=_error(line.y, line.low, line.high) if len(line.x) == 1 else None,
            customdata=np.stack([line.low, line.high], axis=-1),
            hovertemplate="%{x:,.4~g}: %{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})",
            **same,
        )
    for mark in chart.marks:
        figure.add_vline(mark.x, line={"color": _COLOURS[mark.rank], "dash": "dot", "width": 1})
    for bar in chart.bars:
        colour = _COLOURS[bar.rank]
        figure.add_scatter(
            x=bar.points,
            y=[bar.label] * len(bar.points),
            mode="markers",
            marker={"color": colour, "symbol": "line-ns-open", "size": 9},
            hovertemplate="seed: %{x:.4~g}<extra></extra>",
            showlegend=False,
        )
        figure.add_scatter(
            x=[bar.value],
            y=[bar.label],
            name=bar.label,
            mode="markers",
            marker={"color": colour, "size": 11},
            error_x=_error(*(np.array([each]) for each in (bar.value, bar.low, bar.high))),
            hovertemplate=f"%{{x:.4~g}} ({bar.low:.4g} to {bar.high:.4g})",
            showlegend=False,
        )
    figure.update_layout(
        title=chart.title,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        height=380 if chart.lines else 130 + 28 * len(chart.bars),
        legend={"tracegroupgap": 0},
        xaxis={"title": chart.x_title, "range": chart.x_range},
        yaxis_title=chart.y_title,
    )
    if chart.bars:
        figure.update_yaxes(range=[len(chart.bars) - 0.5, -0.5], automargin=True)
    return figure


def _error(value: Array, low: Array, high: Array) -> dict[str, Any]:
    return {"type": "data", "array": high - value, "arrayminus": value - low}


def _opacity(chart: Chart) -> float:
    """Of the bands: many bands would hide the lines."""
    return 0.2 if len(chart.lines) <= 5 else 0.06


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _page(folder: Path, groups: Sequence[Group], metric: str, charts: Sequence[Chart]) -> str:
    runs = [run for group in groups for run in group.runs]
    lines = [*remarks(groups), *verdicts(groups, metric)]
    if len(groups) > MOST_GROUPS:
        lines.append(f"the charts show the {MOST_GROUPS} best of {len(groups)} groups")
    runs_in_groups = f"{_count(len(runs), 'run')} in {_count(len(groups), 'group')}"
    env = html.escape(runs[0].env)
    body = _BODY.format(
        env=env,
        when=datetime.now().astimezone().isoformat(" ", "minutes"),
        runs_in_groups=runs_in_groups,
        metric=html.escape(metric),
        verdicts=html_list(lines),
        groups=html_table(
            ["group", *groups[0].settings, *FIGURES],
            [[g.name, *g.settings.values(), *figures(g, metric)] for g in groups],
        ),
        charts="\n".join(map(html_chart, charts)),
        differences=_differences_html(runs),
        runs=_runs_html(folder, groups, metric),
    )
    return html_page(f"{env}: {runs_in_groups}", body)


def html_page(title: str, body: str) -> str:
    """A page that needs no network; ``title`` and ``body`` are HTML."""
    from plotly.offline import get_plotlyjs

    return _PAGE.format(title=title, script=get_plotlyjs(), body=body)


def html_list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def html_chart(chart: Chart) -> str:
    if chart.is_empty:
        note = f"<p class=note>{html.escape(chart.note)}</p>"
        return f"<section><h3>{html.escape(chart.title)}</h3>{note}</section>"
    return html_figure(_plotly(chart), chart.name, chart.note)


def html_figure(figure: Any, name: str, note: str) -> str:
    """A figure of plotly; ``name`` is the id of its element."""
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config={"responsive": True}
    )
    return f"<section>{drawn}<p class=note>{html.escape(note)}</p></section>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _differences_html(runs: Sequence[RunData]) -> str:
    """The keys that differ, with the number of runs per value."""
    rows = []
    for key in differing_keys([run.config for run in runs]):
        counts: dict[str, int] = {}
        for run in runs:
            value = str(run.config.get(key, "-"))
            counts[value] = counts.get(value, 0) + 1
        shown = ", ".join(f"{value} ({count})" for value, count in counts.items())
        rows.append([key, shown])
    if not rows:
        return "<p>All configs are equal.</p>"
    return html_table(["key", "values (number of runs)"], rows)


def _runs_html(folder: Path, groups: Sequence[Group], metric: str) -> str:
    rows = []
    for group in groups:
        for run in (*group.runs, *group.repeats):
            link = os.path.relpath(run.run.path, folder)
            name = f"{group.name}, repeat" if run in group.repeats else group.name
            facts = [name, run.config.get("seed", "-"), run.summary.get("status", "-")]
            figures = [f"{run.env_steps:,}", shown_return(run.final(metric))]
            commit = str(run.summary.get("git_commit") or "-")[:9]
            rows.append([(link, run.run.name), *facts, *figures, commit])
    return html_table(["run", "group", "seed", "status", "env steps", metric, "commit"], rows)


def html_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A cell that is a tuple is a link: its address and its text."""
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
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; color: #222; }}
h1 {{ margin-bottom: 0; }}
.when, .note {{ color: #666; font-size: 0.85rem; }}
.note {{ margin: 0 0 0 60px; }}
h3 {{ color: #2a3f5f; font-size: 17px; font-weight: normal; margin: 7px 0 8px 30px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(32rem, 1fr)); gap: 1rem; }}
section {{ min-width: 0; }}
table {{ border-collapse: collapse; margin: 0.5rem 0 1.5rem; }}
th, td {{ text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #ddd; }}
@media (max-width: 40rem) {{ .charts {{ grid-template-columns: 1fr; }} }}
</style>
<script>{script}</script>
</head>
<body>
{body}
<script>dispatchEvent(new Event("resize"));</script>
</body>
</html>
"""

_BODY = """<h1>{env}</h1>
<p class="when">{runs_in_groups}, compared by the final {metric} on {when}.
IQM is the interquartile mean over the seeds.</p>
{verdicts}
{groups}
<div class="charts">
{charts}
</div>
<h2>Config differences</h2>
{differences}
<h2>Runs</h2>
{runs}"""
