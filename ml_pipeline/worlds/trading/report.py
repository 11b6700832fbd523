"""The results of a judgement: one HTML page that needs no network, pictures, CSV and JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ml_pipeline.analysis import page
from ml_pipeline.analysis.figures import Chart, interval_bar, plotly_text
from ml_pipeline.analysis.statistics import Array
from ml_pipeline.errors import shorten
from ml_pipeline.metrics import counted
from ml_pipeline.runs.console import plain_table
from ml_pipeline.runs.run_folder import RunFolderError, write_text
from ml_pipeline.worlds.trading.judgement import (
    CONFIDENCE,
    Figures,
    Judgement,
    Part,
    as_json,
    iso_times,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure as PlotlyFigure

TITLES = (
    *("", "return", "per year", "volatility", "Sharpe", "95 % interval", "Sortino"),
    *("max drawdown", "Calmar", "turnover per year", "exposure", "net", "trades", "deflated"),
)
_MOST_POINTS, _FEW_POINTS = 1_500, 150  # of a curve
_MOST_PARTS = 9  # runs, and symbols, in a picture
_LONGEST_NAME = 40  # characters of a label
_LEGEND = {"orientation": "h", "x": 1.0, "xanchor": "right", "y": 1.0, "yanchor": "bottom"}
_RULE = (
    "An edge is claimed only on bars that the policy was not trained on, if the deflated Sharpe "
    f"ratio is at least {CONFIDENCE} and the interval of the Sharpe ratio minus that of the better "
    "of cash and buy-and-hold is above 0. Past bars promise nothing about new ones."
)
_FIGURES_NOTE = (
    "Ratios are those of a year. Turnover and exposure are multiples of the equity, means over "
    "the accounts. trades.csv has all trades, equity.csv all curves."
)


class Curve(NamedTuple):
    """A line over time."""

    label: str
    colour: str
    time: NDArray[np.datetime64]
    value: Array
    is_faint: bool = False


class Picture(NamedTuple):
    """A ``Figure`` of curves over time."""

    name: str
    title: str
    y_title: str
    note: str
    curves: list[Curve]
    is_empty: bool = False
    height: int = 380
    png_size: tuple[float, float] = (9.0, 3.6)

    @property
    def scale(self) -> str:
        """Equity is drawn by its growth, unless it is lost."""
        grows = self.name == "equity" and all(curve.value.min() > 0.0 for curve in self.curves)
        return "log" if grows else "linear"

    def draw_png(self, axes: Axes) -> None:
        from matplotlib import dates
        from matplotlib.ticker import FormatStrFormatter

        for curve in self.curves:
            axes.plot(
                curve.time,
                curve.value,
                color=curve.colour,
                linewidth=0.8 if curve.is_faint else 1.4,
                label="_" if curve.is_faint else curve.label,
            )
        axes.set(ylabel=self.y_title, yscale=self.scale)
        # A page turns mathematics off, in which a logarithmic axis would write its numbers.
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
        untyped: Any = dates
        days = untyped.AutoDateLocator(maxticks=8)
        axes.xaxis.set_major_locator(days)
        axes.xaxis.set_major_formatter(untyped.ConciseDateFormatter(days))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")

    def draw_plotly(self, figure: PlotlyFigure) -> None:
        for curve in self.curves:
            figure.add_scatter(
                x=curve.time,
                y=curve.value,
                name=plotly_text(shorten(curve.label, _LONGEST_NAME)),
                mode="lines",
                line={"color": curve.colour, "width": 1 if curve.is_faint else 2},
                hovertemplate="%{x|%Y-%m-%d %H:%M}: %{y:.4~g}",
                showlegend=not curve.is_faint,
            )
        figure.update_layout(
            yaxis={"title": self.y_title, "type": self.scale},
            legend=_LEGEND,
        )


def rows(judgement: Judgement) -> list[list[str]]:
    """The table of all figures, below ``TITLES``."""
    hold = ["buy and hold", *_figure_texts(judgement.hold, interval="")]
    cash = ["cash", "0.0%", "0.0%", "0.0%", "0.00"]
    benchmarks = [[*row, *[""] * (len(TITLES) - len(row))] for row in (hold, cash)]
    return [*map(_part_row, [judgement.policy, *_shown_parts(judgement)]), *benchmarks]


def _shown_parts(judgement: Judgement, most: int | None = None) -> list[Part]:
    """The runs if there are several, then the symbols if there are several."""
    return [
        part
        for parts in (judgement.runs, judgement.symbols)
        if len(parts) > 1
        for part in parts[:most]
    ]


def table(judgement: Judgement) -> Table:
    shown = plain_table(*TITLES)
    for row in rows(judgement):
        shown.add_row(*row)
    return shown


def _part_row(part: Part) -> list[str]:
    return [
        part.name,
        *_figure_texts(part.figures, f"{part.sharpe.low:.2f} to {part.sharpe.high:.2f}"),
        f"{part.activity.turnover:,.1f}",
        f"{part.activity.exposure:.2f}",
        f"{part.activity.net_exposure:+.2f}",
        f"{part.activity.trades:,}",
        f"{part.deflated:.3f}",
    ]


def _figure_texts(figures: Figures, interval: str) -> list[str]:
    return [
        _growth(figures.total_return),
        _growth(figures.annual_return),
        f"{figures.volatility:.1%}",
        f"{figures.sharpe:.2f}",
        interval,
        f"{figures.sortino:.2f}",
        f"{figures.max_drawdown:.1%}",
        f"{figures.calmar:.2f}",
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
    times = iso_times(judgement.time)
    equity = [[time, *row] for time, row in zip(times, values.tolist(), strict=True)]
    page.write_csv(folder / "equity.csv", [["bar_end_utc", "all", "buy_and_hold", *names], *equity])
    titles = ("bar_end_utc", "run", "symbol", "units", "price", "cost", "reason", "equity")
    trades: list[list[object]] = [[*titles]]
    for run, walk in judgement.walks.items():
        times = iso_times(np.array([trade.time for trade in walk.trades], dtype=np.int64))
        trades += [[time, run, *trade[1:]] for time, trade in zip(times, walk.trades, strict=True)]
    page.write_csv(folder / "trades.csv", trades)


def write_report(folder: Path, judgement: Judgement) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    title = "An edge can be claimed" if judgement.claims_edge else "No edge can be claimed"
    first, last = (each.replace("T", " ") for each in iso_times(judgement.time[[0, -1]]))
    facts = (
        f"{counted(len(judgement.walks), 'run')}, period {judgement.period} "
        f"from {first} to {last} UTC, {len(judgement.time) - 1:,} bars, "
        f"{judgement.periods_per_year:,.0f} per year, "
        f"greedy actions, {counted(judgement.n_trials, 'trial')}, judged on {page.now_text()}."
    )
    overview: list[page.Part] = [
        page.Paragraph(f"{judgement.verdict}.", "bold"),
        page.Bullets(judgement.remarks),
        page.Paragraph(_RULE),
        _conditions(judgement),
        page.Figures([*_pictures(judgement), _sharpe_chart(judgement)]),
    ]
    figures: list[page.Part] = [
        page.Table(TITLES, rows(judgement)),
        page.Paragraph(_FIGURES_NOTE, "note"),
    ]
    sections = [page.Section("", overview), page.Section("Figures", figures)]
    report = page.Page(title, title, facts, sections)
    return page.write_page(folder / "judgement.html", report)


def _conditions(judgement: Judgement) -> page.Table:
    excess = judgement.excess
    interval = f"{excess.value:.2f} ({excess.low:.2f} to {excess.high:.2f})"
    return page.Table(
        ["test", "value", "needed"],
        [
            ["deflated Sharpe ratio", f"{judgement.policy.deflated:.3f}", f"at least {CONFIDENCE}"],
            ["Sharpe ratio minus that of the better benchmark", interval, "above 0"],
            ["probabilistic Sharpe ratio (one trial)", f"{judgement.probabilistic:.3f}", ""],
            ["best of the trials without skill", f"{judgement.best_without_skill:.2f}", ""],
        ],
    )


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
    estimates = [
        ("policy", judgement.policy.sharpe),
        ("policy - better benchmark", judgement.excess),
    ]
    estimates += [(part.name, part.sharpe) for part in _shown_parts(judgement, _MOST_PARTS)]
    bars = [
        interval_bar(rank, name, float(each.value), float(each.low), float(each.high))
        for rank, (name, each) in enumerate(estimates)
    ]
    note = (
        f"Sharpe ratio of a year with its 95 % interval from blocks of {judgement.block} bars. "
        f"The best of {judgement.n_trials:,} without skill: {judgement.best_without_skill:.2f}."
    )
    return Chart("sharpe", "Sharpe ratio", "Sharpe ratio of a year", "", note, bars=bars)
