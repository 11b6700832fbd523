"""The results of a judgement: one HTML page that needs no network, pictures, CSV and JSON files."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis.charts import MOST_GROUPS, Bar, Chart
from ml_pipeline.analysis.report import (
    draw_png,
    html_chart,
    html_figure,
    html_list,
    html_page,
    html_table,
)
from ml_pipeline.analysis.statistics import Array, Estimate
from ml_pipeline.errors import shorten
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.run_folder import RunFolderError, write_text
from ml_pipeline.worlds.trading.judgement import (
    CONFIDENCE,
    Activity,
    Figures,
    Judgement,
    Part,
    as_json,
)

TITLES = (
    *("", "return", "per year", "volatility", "Sharpe", "95 % interval", "Sortino"),
    *("max drawdown", "Calmar", "turnover per year", "exposure", "net", "trades", "deflated"),
)
_MOST_POINTS, _FEW_POINTS = 1_500, 150  # of a curve
_MOST_PARTS = 9  # runs, and symbols, in a picture
_LONGEST_NAME = 40  # characters of a label
_RULE = (
    "An edge is claimed only on bars that the policy was not trained on, if the deflated Sharpe "
    f"ratio is at least {CONFIDENCE} and the interval of the Sharpe ratio minus that of the better "
    "of cash and buy-and-hold is above 0. Past bars promise nothing about new ones."
)


class Curve(NamedTuple):
    """A line over time."""

    label: str
    colour: str
    time: Any  # datetime64
    value: Array
    is_faint: bool = False


class Picture(NamedTuple):
    """Curves with common axes."""

    name: str  # of the PNG file
    title: str
    y_title: str
    note: str
    curves: list[Curve]

    @property
    def scale(self) -> str:
        """Equity is drawn by its growth, unless it is lost."""
        grows = self.name == "equity" and all(curve.value.min() > 0.0 for curve in self.curves)
        return "log" if grows else "linear"


def rows(judgement: Judgement) -> list[list[str]]:
    """The table of all figures, below ``TITLES``."""
    activity, sharpe = judgement.activity, judgement.interval
    found = [_row("policy", judgement.figures, activity, sharpe, judgement.deflated)]
    for parts in (judgement.runs, judgement.symbols):
        if len(parts) > 1:
            found += [_part_row(part) for part in parts]
    found.append(_row("buy and hold", judgement.hold, None, None, None))
    found.append(["cash", "0.0%", "0.0%", "0.0%", "0.00", *[""] * (len(TITLES) - 5)])
    return found


def table(judgement: Judgement) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        shown.add_column(title)
    for row in rows(judgement):
        shown.add_row(*row)
    return shown


def _part_row(part: Part) -> list[str]:
    return _row(part.name, part.figures, part.activity, part.sharpe, part.deflated)


def _row(
    name: str,
    figures: Figures,
    activity: Activity | None,
    sharpe: Estimate | None,
    deflated: float | None,
) -> list[str]:
    interval = "" if sharpe is None else f"{sharpe.low:.2f} to {sharpe.high:.2f}"
    row = [
        name,
        _growth(figures.total_return),
        _growth(figures.annual_return),
        f"{figures.volatility:.1%}",
        f"{figures.sharpe:.2f}",
        interval,
        f"{figures.sortino:.2f}",
        f"{figures.max_drawdown:.1%}",
        f"{figures.calmar:.2f}",
    ]
    if activity is None:
        return [*row, *[""] * (len(TITLES) - len(row))]
    return [
        *row,
        f"{activity.turnover:,.1f}",
        f"{activity.exposure:.2f}",
        f"{activity.net_exposure:+.2f}",
        f"{activity.trades:,}",
        "" if deflated is None else f"{deflated:.3f}",
    ]


def _growth(share: float) -> str:
    return f"{share:.1%}" if share < 100.0 else f"x {1.0 + share:.3g}"


def write_results(folder: Path, judgement: Judgement) -> None:
    """Write judgement.json, equity.csv and trades.csv."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"--out {folder}: cannot write the results: {error}") from error
    text = json.dumps(as_json(judgement), indent=2, allow_nan=False)
    write_text(folder / "judgement.json", text + "\n")
    names = [
        f"{run}/{account}" for run, walk in judgement.walks.items() for account in walk.accounts
    ]
    columns = [walk.equity for walk in judgement.walks.values()]
    values = np.column_stack([judgement.equity, judgement.hold_equity, *columns])
    times = _iso(judgement.time)
    _write_csv(
        folder / "equity.csv",
        ["bar_end_utc", "all", "buy_and_hold", *names],
        ([time, *row] for time, row in zip(times, values.tolist(), strict=True)),
    )
    _write_csv(
        folder / "trades.csv",
        ["bar_end_utc", "run", "symbol", "units", "price", "cost", "reason", "equity"],
        (
            [time, run, *trade[1:]]
            for run, walk in judgement.walks.items()
            for time, trade in zip(
                _iso(np.array([each.time for each in walk.trades], dtype=np.int64)),
                walk.trades,
                strict=True,
            )
        ),
    )


def _write_csv(path: Path, titles: Sequence[str], lines: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(lines)
    write_text(path, text.getvalue())


def _iso(time: Any) -> list[str]:
    return [str(each) for each in time.astype("datetime64[ns]").astype("datetime64[s]")]


def write_page(folder: Path, judgement: Judgement) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    import_extra("plotly", needed_by="the page")
    import_extra("matplotlib", needed_by="the page")
    pictures, chart = _pictures(judgement), _sharpe_chart(judgement)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            _draw(picture, folder / f"{picture.name}.png")
        draw_png(chart, folder / f"{chart.name}.png")
    except OSError as error:
        raise RunFolderError(f"--out {folder}: cannot write the page: {error}") from error
    page = folder / "judgement.html"
    write_text(page, _page(judgement, pictures, chart))
    return page


def _pictures(judgement: Judgement) -> list[Picture]:
    shown = list(judgement.walks.items())[:_MOST_PARTS] if len(judgement.walks) > 1 else []
    note = "Equal capital per run and symbol at the start, costs included."
    equity = Picture(
        "equity",
        "Equity",
        "multiple of the first equity",
        f"{note} Grey: single runs." if shown else note,
        [
            *(
                _curve(name, "#bbbbbb", judgement, walk.equity.mean(axis=1), is_faint=True)
                for name, walk in shown
            ),
            _curve("cash", "#7f7f7f", judgement, np.ones_like(judgement.equity)),
            _curve("buy and hold", "#ff7f0e", judgement, judgement.hold_equity),
            _curve("policy", "#1f77b4", judgement, judgement.equity),
        ],
    )
    drawdown = Picture(
        "drawdown",
        "Drawdown",
        "%",
        "Loss since the highest equity before; the worst bar of each interval.",
        [
            _curve("buy and hold", "#ff7f0e", judgement, _falls(judgement.hold_equity), np.minimum),
            _curve("policy", "#1f77b4", judgement, _falls(judgement.equity), np.minimum),
        ],
    )
    walks = list(judgement.walks.values())
    net = np.mean([walk.exposure.mean(axis=1) for walk in walks], axis=0)
    gross = np.mean([walk.gross.mean(axis=1) for walk in walks], axis=0)
    exposure = Picture(
        "exposure",
        "Exposure",
        "multiple of the equity",
        "Means over the bars of each interval, of all runs and symbols.",
        [
            _curve("net", "#1f77b4", judgement, net, np.add),
            _curve("long and short", "#2ca02c", judgement, gross, np.add),
        ],
    )
    return [equity, drawdown, exposure]


def _falls(equity: Array) -> Array:
    return 100.0 * (equity / np.maximum.accumulate(equity) - 1.0)


def _curve(
    label: str,
    colour: str,
    judgement: Judgement,
    values: Array,
    reduce: np.ufunc | None = None,
    *,
    is_faint: bool = False,
) -> Curve:
    """Some points of a curve; ``reduce`` gathers the bars between them, np.add by their mean."""
    n, n_points = len(values), _FEW_POINTS if reduce is np.add else _MOST_POINTS
    ends = np.unique(np.linspace(0, n - 1, min(n, n_points)).astype(int))
    time = judgement.time.astype("datetime64[ns]")[ends]
    if reduce is None:
        return Curve(label, colour, time, values[ends], is_faint)
    starts = np.concatenate(([0], ends[:-1] + 1))
    gathered = reduce.reduceat(values, starts)
    if reduce is np.add:
        gathered = gathered / np.diff(np.concatenate((starts, [n])))
    return Curve(label, colour, time, gathered, is_faint)


def _sharpe_chart(judgement: Judgement) -> Chart:
    estimates = [("policy", judgement.interval), ("policy - better benchmark", judgement.excess)]
    for parts in (judgement.runs, judgement.symbols):
        if len(parts) > 1:
            estimates += [(part.name, part.sharpe) for part in parts[:_MOST_PARTS]]
    bars = [
        Bar(
            f"{rank}  {shorten(name, _LONGEST_NAME)}",
            (rank - 1) % MOST_GROUPS,
            float(each.value),
            float(each.low),
            float(each.high),
            np.array([]),
        )
        for rank, (name, each) in enumerate(estimates, start=1)
    ]
    note = (
        f"Sharpe ratio of a year with its 95 % interval from blocks of {judgement.block} bars. "
        f"The best of {judgement.n_trials:,} without skill: {judgement.best_without_skill:.2f}."
    )
    return Chart("sharpe", "Sharpe ratio", "Sharpe ratio of a year", "", note, bars=bars)


def _draw(picture: Picture, path: Path) -> None:
    from matplotlib import dates, rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    with rc_context({"text.parse_math": False}):  # the name of a run may contain a $
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        axes = figure.subplots()
        for curve in picture.curves:
            axes.plot(
                curve.time,
                curve.value,
                color=curve.colour,
                linewidth=0.8 if curve.is_faint else 1.4,
                label="_" if curve.is_faint else curve.label,
            )
        axes.set(title=picture.title, ylabel=picture.y_title, yscale=picture.scale)
        # A logarithmic axis would write its numbers in the mathematics that is off here.
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
        untyped: Any = dates
        days = untyped.AutoDateLocator(maxticks=8)
        axes.xaxis.set_major_locator(days)
        axes.xaxis.set_major_formatter(untyped.ConciseDateFormatter(days))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=110)


def _plotly(picture: Picture) -> Any:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for curve in picture.curves:
        figure.add_scatter(
            x=curve.time,
            y=curve.value,
            name=shorten(curve.label, _LONGEST_NAME),
            mode="lines",
            line={"color": curve.colour, "width": 1 if curve.is_faint else 2},
            hovertemplate="%{x|%Y-%m-%d %H:%M}: %{y:.4~g}",
            showlegend=not curve.is_faint,
        )
    figure.update_layout(
        title=picture.title,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        height=380,
        yaxis={"title": picture.y_title, "type": picture.scale},
        legend={"orientation": "h", "x": 1.0, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
    )
    return figure


def _page(judgement: Judgement, pictures: Sequence[Picture], chart: Chart) -> str:
    first, last = (each.replace("T", " ") for each in _iso(judgement.time[[0, -1]]))
    facts = (
        f"{_count(len(judgement.walks), 'run')}, period {judgement.period} from {first} to {last} "
        f"UTC, {len(judgement.time) - 1:,} bars, {judgement.periods_per_year:,.0f} per year, "
        f"greedy actions, {_count(judgement.n_trials, 'trial')}"
    )
    when = datetime.now().astimezone().isoformat(" ", "minutes")
    title = "An edge can be claimed" if judgement.claims_edge else "No edge can be claimed"
    tests = [
        ["deflated Sharpe ratio", f"{judgement.deflated:.3f}", f"at least {CONFIDENCE}"],
        ["Sharpe ratio minus that of the better benchmark", _interval(judgement.excess), "above 0"],
        ["probabilistic Sharpe ratio (one trial)", f"{judgement.probabilistic:.3f}", ""],
        ["best of the trials without skill", f"{judgement.best_without_skill:.2f}", ""],
    ]
    figures = [html_figure(_plotly(picture), picture.name, picture.note) for picture in pictures]
    body = [
        f"<h1>{title}</h1>",
        f'<p class="when">{html.escape(facts)}, judged on {when}.</p>',
        f"<p><b>{html.escape(judgement.verdict)}.</b></p>",
        html_list(judgement.remarks),
        f"<p>{html.escape(_RULE)}</p>",
        html_table(["test", "value", "needed"], tests),
        '<div class="charts">',
        *figures,
        html_chart(chart),
        "</div>",
        "<h2>Figures</h2>",
        html_table(TITLES, rows(judgement)),
        '<p class="note">Ratios are those of a year. Turnover and exposure are multiples of the '
        "equity, means over the accounts. trades.csv has all trades, equity.csv all curves.</p>",
    ]
    return html_page(title, "\n".join(body))


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
