"""Chart: lines with bands, or bars with intervals, as numbers and as a figure of a ``Page``."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ml_pipeline.analysis.statistics import Array
from ml_pipeline.errors import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure as PlotlyFigure

COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e"),
    *("#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"),
)
_LONGEST_NAME = 40  # characters of a label


class Line(NamedTuple):
    """A curve and the band around it."""

    label: str
    rank: int  # of its group, which gives the colour
    x: Array
    y: Array
    low: Array
    high: Array


class Mark(NamedTuple):
    """A vertical line: where a group enters a phase of its curriculum."""

    rank: int
    x: float


class Bar(NamedTuple):
    """A statistic with its interval, and the seeds behind it."""

    label: str
    rank: int
    value: float
    low: float
    high: float
    points: Array  # one per seed


class Chart(NamedTuple):
    """Lines, or horizontal bars; a chart has one kind, or is empty and its note says why."""

    name: str  # of the PNG file
    title: str
    x_title: str
    y_title: str
    note: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()
    x_range: tuple[float, float] | None = None  # None: fits the data
    marks: Sequence[Mark] = ()

    @property
    def is_empty(self) -> bool:
        return not self.lines and not self.bars

    @property
    def height(self) -> int:
        return 380 if self.lines else 130 + 28 * len(self.bars)

    @property
    def png_size(self) -> tuple[float, float]:
        return 7.5, 4.0 if self.lines else 1.4 + 0.35 * len(self.bars)

    @property
    def _band_opacity(self) -> float:
        """Many bands would hide the lines."""
        return 0.2 if len(self.lines) <= 5 else 0.06

    def draw_png(self, axes: Axes) -> None:
        for line in self.lines:
            colour = _colour(line.rank)
            if len(line.x) == 1:
                spread = [line.y - line.low, line.high - line.y]
                axes.errorbar(line.x, line.y, spread, fmt="o", color=colour, label=line.label)
                continue
            axes.plot(line.x, line.y, color=colour, label=line.label)
            axes.fill_between(
                line.x, line.low, line.high, color=colour, alpha=self._band_opacity, linewidth=0
            )
        for mark in self.marks:
            axes.axvline(mark.x, color=_colour(mark.rank), linestyle=":", linewidth=1)
        for row, bar in enumerate(self.bars):
            colour = _colour(bar.rank)
            axes.plot(bar.points, np.full(len(bar.points), row), "|", color=colour, markersize=9)
            axes.plot([bar.low, bar.high], [row, row], color=colour, linewidth=4, alpha=0.4)
            axes.plot([bar.value], [row], "o", color=colour)
        if self.bars:
            labels = [bar.label for bar in self.bars]
            axes.set_yticks(range(len(labels)), labels, fontsize="small")
            axes.set_ylim(len(labels) - 0.5, -0.5)
        else:
            axes.figure.legend(loc="outside right upper", fontsize="small")
        axes.set(xlabel=self.x_title, ylabel=self.y_title, xlim=self.x_range)
        axes.grid(alpha=0.3)

    def draw_plotly(self, figure: PlotlyFigure) -> None:
        for line in self.lines:
            _draw_line(figure, line, self._band_opacity)
        for mark in self.marks:
            figure.add_vline(mark.x, line={"color": _colour(mark.rank), "dash": "dot", "width": 1})
        for bar in self.bars:
            _draw_bar(figure, bar)
        figure.update_layout(
            legend={"tracegroupgap": 0},
            xaxis={"title": self.x_title, "range": self.x_range},
            yaxis_title=self.y_title,
        )
        if self.bars:
            figure.update_yaxes(range=[len(self.bars) - 0.5, -0.5], automargin=True)


def plotly_text(text: str) -> str:
    """``text`` as it is: plotly would read a tag such as <b> in it."""
    return html.escape(text, quote=False)


def numbered(rank: int, name: str) -> str:
    """A label that is unique although a long name is cut; rank 0 has the number 1."""
    return f"{rank + 1}  {shorten(name, _LONGEST_NAME)}"


def interval_bar(rank: int, name: str, value: float, low: float, high: float) -> Bar:
    """A bar without seeds, with a numbered label."""
    return Bar(numbered(rank, name), rank, value, low, high, np.array([]))


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _draw_line(figure: PlotlyFigure, line: Line, band_opacity: float) -> None:
    colour = _colour(line.rank)
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    band = f"rgba({red},{green},{blue},{band_opacity})"
    label = plotly_text(line.label)
    same = {"x": line.x, "legendgroup": label}
    edge = {**same, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    figure.add_scatter(y=line.high, showlegend=False, **edge)
    figure.add_scatter(y=line.low, showlegend=False, fill="tonexty", fillcolor=band, **edge)
    is_point = len(line.x) == 1
    figure.add_scatter(
        y=line.y,
        name=label,
        mode="markers" if is_point else "lines",
        line={"color": colour},
        marker={"color": colour, "size": 9},
        error_y=_error(line.y, line.low, line.high) if is_point else None,
        customdata=np.stack([line.low, line.high], axis=-1),
        hovertemplate="%{x:,.4~g}: %{y:.4~g} (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})",
        **same,
    )


def _draw_bar(figure: PlotlyFigure, bar: Bar) -> None:
    colour = _colour(bar.rank)
    label = plotly_text(bar.label)
    figure.add_scatter(
        x=bar.points,
        y=[label] * len(bar.points),
        mode="markers",
        marker={"color": colour, "symbol": "line-ns-open", "size": 9},
        hovertemplate="seed: %{x:.4~g}<extra></extra>",
        showlegend=False,
    )
    value, low, high = (np.array([each]) for each in (bar.value, bar.low, bar.high))
    figure.add_scatter(
        x=value,
        y=[label],
        name=label,
        mode="markers",
        marker={"color": colour, "size": 11},
        error_x=_error(value, low, high),
        hovertemplate=f"%{{x:.4~g}} ({bar.low:.4g} to {bar.high:.4g})",
        showlegend=False,
    )


def _error(value: Array, low: Array, high: Array) -> dict[str, str | Array]:
    return {"type": "data", "array": high - value, "arrayminus": value - low}
