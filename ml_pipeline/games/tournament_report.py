"""The page of a tournament: ratings, the win matrix as a heat map, and all matches.

One HTML file that needs no network, and a PNG per chart, as in the report of ``compare``.
"""

from __future__ import annotations

import html
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ml_pipeline.analysis.charts import MOST_GROUPS, Bar, Chart
from ml_pipeline.analysis.report import (
    draw_png,
    html_chart,
    html_figure,
    html_list,
    html_page,
    html_table,
)
from ml_pipeline.errors import shorten
from ml_pipeline.extras import import_extra
from ml_pipeline.games.ratings import Results
from ml_pipeline.games.tournament import (
    RATING_TITLES,
    Tournament,
    draw_shares,
    rating_rows,
    remarks,
)
from ml_pipeline.runs.run_folder import RunFolderError, write_text

_NOTE = (
    "Points of the row player against the column player: a win is 1, a draw one half. "
    "Below it the share of draws."
)
_LONGEST_NAME = 40  # characters of a label


def write_page(folder: Path, tournament: Tournament) -> Path:
    """Write the page and the PNGs into ``folder``; returns the path of the page."""
    import_extra("plotly", needed_by="the page")
    import_extra("matplotlib", needed_by="the page")
    chart = _ratings_chart(tournament)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_png(chart, folder / "ratings.png")
        _draw_heat_map(tournament.results, folder / "win_matrix.png")
    except OSError as error:
        raise RunFolderError(f"--out {folder}: cannot write the page: {error}") from error
    page = folder / "tournament.html"
    write_text(page, _page(tournament, chart))
    return page


def _labels(names: list[str]) -> list[str]:
    return [f"{rank}  {shorten(name, _LONGEST_NAME)}" for rank, name in enumerate(names, 1)]


def _ratings_chart(tournament: Tournament) -> Chart:
    labels = _labels(tournament.results.names)
    bars = [
        Bar(label, rank % MOST_GROUPS, each.value, each.low, each.high, np.array([]))
        for rank, (label, each) in enumerate(zip(labels, tournament.ratings, strict=True))
    ]
    note = "Elo with its 95 % bootstrap interval. 400 points are odds of 10 to 1."
    return Chart("ratings", "Ratings", "rating", "", note, bars=bars)


def _cell_texts(results: Results, new_line: str) -> list[list[str]]:
    texts = []
    for scores, draws in zip(results.scores, draw_shares(results), strict=True):
        texts.append(
            [
                "" if np.isnan(score) else f"{score:.0%}{new_line}{draw:.0%} draws"
                for score, draw in zip(scores, draws, strict=True)
            ]
        )
    return texts


def _draw_heat_map(results: Results, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    n = len(results.names)
    with rc_context({"text.parse_math": False}):  # the name of a run may contain a $
        figure = Figure(figsize=(4.0 + 0.8 * n, 1.6 + 0.7 * n), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(100 * results.scores, cmap="RdBu", vmin=0, vmax=100, aspect="auto")
        texts = _cell_texts(results, "\n")
        for i, j in np.argwhere(results.games > 0).tolist():
            is_dark = abs(results.scores[i, j] - 0.5) > 0.3
            colour = "white" if is_dark else "black"
            axes.text(j, i, texts[i][j], ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(n), [str(rank) for rank in range(1, n + 1)])
        axes.set_yticks(range(n), _labels(results.names), fontsize="small")
        axes.set(title="Win matrix", xlabel="against")
        figure.colorbar(image, label="points of the row player, %")
        figure.savefig(path, dpi=110)


def _heat_map(results: Results) -> Any:
    from plotly import graph_objects

    labels = _labels(results.names)
    figure = graph_objects.Figure(
        graph_objects.Heatmap(
            z=[[None if np.isnan(each) else 100 * each for each in row] for row in results.scores],
            x=[str(rank) for rank in range(1, len(labels) + 1)],
            y=labels,
            text=_cell_texts(results, "<br>"),
            texttemplate="%{text}",
            zmin=0,
            zmax=100,
            colorscale="RdBu",
            hovertemplate="%{y}<br>against %{x}<br>%{text}<extra></extra>",
            colorbar={"title": "points, %"},
        )
    )
    figure.update_layout(
        title="Win matrix",
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        height=180 + 50 * len(labels),
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title="against", type="category")
    return figure


def _page(tournament: Tournament, chart: Chart) -> str:
    env = html.escape(tournament.env)
    facts = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in tournament.facts.items()
    )
    when = datetime.now().astimezone().isoformat(" ", "minutes")
    rows = [
        [match.first, match.second, *map(_counts, (games.counts, *games[:2]))]
        for match in tournament.matches
        for games in [match.games]
    ]
    titles = ["first", "second", "wins-draws-losses", "as player 0", "as player 1"]
    body = [
        f"<h1>{env}: tournament</h1>",
        f'<p class="when">{html.escape(facts)}, on {when}.</p>',
        html_list(remarks(tournament)),
        html_table(RATING_TITLES, list(rating_rows(tournament.ratings))),
        html_chart(chart),
        html_figure(_heat_map(tournament.results), "win_matrix", _NOTE),
        "<h2>Matches</h2>",
        html_table(titles, rows),
    ]
    return html_page(f"{env}: tournament", "\n".join(body))


def _counts(counts: tuple[int, int, int]) -> str:
    return "-".join(map(str, counts))
