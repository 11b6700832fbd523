"""The page of a tournament: ratings, the win matrix as a heat map, and all matches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ml_pipeline.analysis import page
from ml_pipeline.analysis.figures import Chart, interval_bar, numbered, plotly_text
from ml_pipeline.games.matches import Counts
from ml_pipeline.games.ratings import Results
from ml_pipeline.games.tournament import (
    RATING_TITLES,
    Tournament,
    draw_shares,
    rating_rows,
    remarks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure as PlotlyFigure


def write_report(folder: Path, tournament: Tournament) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in tournament.facts.items()]
    title = f"{tournament.env}: tournament"
    overview: list[page.Part] = [
        page.Bullets(remarks(tournament)),
        page.Table(RATING_TITLES, list(rating_rows(tournament.ratings))),
        page.Figures([_ratings(tournament), _HeatMap(tournament.results)], are_side_by_side=False),
    ]
    report = page.Page(
        title=title,
        heading=title,
        facts=f"{', '.join(facts)}, on {page.now_text()}.",
        sections=[page.Section("", overview), page.Section("Matches", [_matches(tournament)])],
    )
    return page.write_page(folder / "tournament.html", report)


def _matches(tournament: Tournament) -> page.Table:
    titles = ["first", "second", "wins-draws-losses", "as player 0", "as player 1"]
    rows = []
    for first, second, games in tournament.matches:
        counts = (games.counts, games.as_player_0, games.as_player_1)
        rows.append([first, second, *map(_joined, counts)])
    return page.Table(titles, rows)


def _joined(counts: Counts) -> str:
    return "-".join(map(str, counts))


def _ratings(tournament: Tournament) -> Chart:
    bars = [
        interval_bar(rank, each.name, each.value, each.low, each.high)
        for rank, each in enumerate(tournament.ratings)
    ]
    note = "Elo with its 95 % interval. 400 points are odds of 10 to 1."
    return Chart("ratings", "Ratings", "rating", "", note, bars=bars)


class _HeatMap:
    """The win matrix as a ``Figure``; rows and columns are players, by rank."""

    name = "win_matrix"
    title = "Win matrix"
    note = (
        "Points of the row player against the column player: a win is 1, a draw one half. "
        "Below it the share of draws."
    )
    is_empty = False

    def __init__(self, results: Results) -> None:
        n_players = len(results.names)
        self.height = 180 + 50 * n_players
        self.png_size = (4.0 + 0.8 * n_players, 1.6 + 0.7 * n_players)
        self._results = results
        self._labels = [numbered(rank, name) for rank, name in enumerate(results.names)]
        self._ranks = [str(rank) for rank in range(1, n_players + 1)]

    def _cell_texts(self, new_line: str) -> list[list[str]]:
        texts = []
        for scores, draws in zip(self._results.scores, draw_shares(self._results), strict=True):
            texts.append(
                [
                    "" if np.isnan(score) else f"{score:.0%}{new_line}{draw:.0%} draws"
                    for score, draw in zip(scores, draws, strict=True)
                ]
            )
        return texts

    def draw_png(self, axes: Axes) -> None:
        scores = self._results.scores
        image = axes.imshow(100 * scores, cmap="RdBu", vmin=0, vmax=100, aspect="auto")
        texts = self._cell_texts("\n")
        for i, j in np.argwhere(self._results.games > 0).tolist():
            is_dark = abs(scores[i, j] - 0.5) > 0.3
            colour = "white" if is_dark else "black"
            axes.text(j, i, texts[i][j], ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(len(scores)), self._ranks)
        axes.set_yticks(range(len(scores)), self._labels, fontsize="small")
        axes.set_xlabel("against")
        axes.figure.colorbar(image, label="points of the row player, %")

    def draw_plotly(self, figure: PlotlyFigure) -> None:
        scores = self._results.scores
        figure.add_heatmap(
            z=[[None if np.isnan(each) else 100 * each for each in row] for row in scores],
            x=self._ranks,
            y=[plotly_text(label) for label in self._labels],
            text=self._cell_texts("<br>"),
            texttemplate="%{text}",
            zmin=0,
            zmax=100,
            colorscale="RdBu",
            hovertemplate="%{y}<br>against %{x}<br>%{text}<extra></extra>",
            colorbar={"title": "points, %"},
        )
        figure.update_yaxes(autorange="reversed", automargin=True)
        figure.update_xaxes(title="against", type="category")
