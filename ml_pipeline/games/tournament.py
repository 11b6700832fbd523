"""Tournament: the games of a round robin, its ratings, tables, remarks and result files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis.statistics import Array, wilson
from ml_pipeline.games.matches import Counts, Games
from ml_pipeline.games.ratings import (
    Pairing,
    Rating,
    Results,
    find_cycles,
    rate,
    results_of,
)
from ml_pipeline.runs.run_folder import RunFolderError, write_text

MANY_DRAWS = 0.5  # a larger share gets a remark
DRAWS_HINT = "standing still also draws, so look at a video before you call it defence"


class Match(NamedTuple):
    """The games of two players, counted for the first."""

    first: str
    second: str
    games: Games


class Tournament(NamedTuple):
    """A finished tournament; players are ordered by rating, the best first."""

    env: str
    facts: Mapping[str, int | str]  # how it was played: seed, games, actions
    matches: list[Match]
    ratings: list[Rating]
    results: Results


def rated(
    env: str, facts: Mapping[str, int | str], matches: Sequence[Match], anchor: str | None
) -> Tournament:
    results = results_of(Pairing(each.first, each.second, *each.games.counts) for each in matches)
    ratings = rate(results, anchor=anchor)
    rows = [results.names.index(each.name) for each in ratings]
    wins, draws = (each[np.ix_(rows, rows)] for each in (results.wins, results.draws))
    ordered = Results([each.name for each in ratings], wins, draws)
    return Tournament(env, facts, list(matches), ratings, ordered)


RATING_TITLES = ("", "player", "rating", "95 % interval", "games", "wins", "draws", "losses")


def rating_rows(ratings: Sequence[Rating]) -> Iterator[list[str]]:
    """The texts of ``RATING_TITLES``."""
    for rank, each in enumerate(ratings, start=1):
        counts = Counts(each.wins, each.draws, each.losses)
        interval = f"{each.low:.0f} to {each.high:.0f}"
        rating = f"{each.value:.0f}"
        yield [str(rank), each.name, rating, interval, *map(str, (counts.n_games, *counts))]


def ratings_table(ratings: Sequence[Rating]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in RATING_TITLES:
        is_name = title == "player"
        table.add_column(title, justify="left" if is_name else "right", overflow="fold")
    for row in rating_rows(ratings):
        table.add_row(*row)
    return table


def win_matrix_table(results: Results) -> Table:
    """Wins, draws and losses of the row player against each column player, by rank."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("player", overflow="fold")
    for rank in range(1, len(results.names) + 1):
        table.add_column(str(rank), justify="right", no_wrap=True)
    for i, name in enumerate(results.names):
        table.add_row(str(i + 1), name, *(_cell(results, i, j) for j in range(len(results.names))))
    return table


def _cell(results: Results, i: int, j: int) -> str:
    if not results.games[i, j]:
        return "-"
    return f"{results.wins[i, j]:.0f}-{results.draws[i, j]:.0f}-{results.wins[j, i]:.0f}"


def remarks(tournament: Tournament) -> list[str]:
    """What the ratings do not show: cycles, bounds, many draws, and games that were cut."""
    lines = []
    for cycle in find_cycles(tournament.results):
        beats = ", ".join(
            f"{one} beats {other}" for one, other in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        )
        lines.append(
            f"cycle: {beats}, each with a 95 % interval above one half; no rating can express "
            "this, so read the win matrix"
        )
    for each in tournament.ratings:
        counts = Counts(each.wins, each.draws, each.losses)
        if counts.wins == counts.n_games:
            lines.append(f"{each.name} has won all of its games: its rating is a lower bound")
        if counts.losses == counts.n_games:
            lines.append(f"{each.name} has lost all of its games: its rating is an upper bound")
        if counts.draws > MANY_DRAWS * counts.n_games:
            share = counts.draws / counts.n_games
            lines.append(f"{each.name} draws {share:.0%} of its games: {DRAWS_HINT}")
    n_cut = sum(match.games.n_cut for match in tournament.matches)
    if n_cut:
        lines.append(f"{n_cut} games did not end, were cut, and count as draws")
    return lines


def counts_lines(counts: Counts) -> Iterator[str]:
    """Wins, draws and losses with their Wilson intervals."""
    for name, number in counts._asdict().items():
        share, low, high = (float(each) for each in wilson(number, counts.n_games))
        yield f"{name:<7}{number:>7,}  {share:6.1%}  (95 % interval {low:.1%} to {high:.1%})"


def write_results(folder: Path, tournament: Tournament) -> None:
    """Write ratings.csv, games.csv (results of player 0 by match and side) and results.json."""
    players = [
        {"player": each.name, "rating": each.value, **dict(list(each._asdict().items())[2:])}
        for each in tournament.ratings
    ]
    sides = [
        {"player_0": one, "player_1": other, **counts._asdict()}
        for first, second, games in tournament.matches
        for one, other, counts in (
            (first, second, games.as_player_0),
            (second, first, games.as_player_1.swapped()),
        )
    ]
    values = {
        "env": tournament.env,
        **tournament.facts,
        "players": players,
        "games": sides,
        "cycles": find_cycles(tournament.results),
        "remarks": remarks(tournament),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"--out {folder}: cannot create the folder: {error}") from error
    write_text(folder / "ratings.csv", _csv(players))
    write_text(folder / "games.csv", _csv(sides))
    write_text(folder / "results.json", json.dumps(values, indent=2) + "\n")


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def draw_shares(results: Results) -> Array:
    """[n, n]: the share of drawn games; nan if the two have not met."""
    with np.errstate(invalid="ignore"):
        return np.asarray(results.draws / results.games)
