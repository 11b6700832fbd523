"""Elo ratings of players by maximum likelihood over all of their games, draws included.

Davidson's model (1970): its likelihood is concave in the ratings and in the draw rate, so Newton's
method finds the only maximum. 400 points are odds of 10 to 1 between winning and losing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ml_pipeline.analysis.statistics import Array, wilson

MEAN_RATING = 1_000.0

_POINTS = 400.0 / np.log(10.0)  # per unit of log strength
_PRIOR = 0.5  # wins and losses of each player against an imaginary one: ratings stay finite
_HALF_WIDTH = 1.96  # standard errors of a 95 % interval
_MOST_ITERATIONS = 100
_LONGEST_STEP = 1.0  # of one iteration, in log strength
_TOLERANCE = 1e-5  # of the last step: 0.002 points; millions of games leave such rounding errors


class Pairing(NamedTuple):
    """Games between two players, counted for the first."""

    first: str
    second: str
    wins: int
    draws: int
    losses: int


class Results(NamedTuple):
    """All games of some players."""

    names: list[str]
    wins: Array  # [n, n]: games that the row player has won against the column player
    draws: Array  # [n, n], symmetric

    @property
    def games(self) -> Array:
        """[n, n], symmetric."""
        return np.asarray(self.wins + self.wins.T + self.draws)

    @property
    def scores(self) -> Array:
        """[n, n]: the row player's share of the points; nan if the two have not met."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.wins + 0.5 * self.draws) / self.games)


class Rating(NamedTuple):
    """A player's rating with its 95 % interval, and the games behind it."""

    name: str
    value: float
    low: float
    high: float
    wins: int
    draws: int
    losses: int


def results_of(pairings: Iterable[Pairing]) -> Results:
    """Adds up the games; a pair may appear several times, in any order, or not at all."""
    pairings = list(pairings)
    names = list(dict.fromkeys(name for each in pairings for name in each[:2]))
    row = {name: index for index, name in enumerate(names)}
    wins, draws = np.zeros((2, len(names), len(names)))
    for each in pairings:
        i, j = row[each.first], row[each.second]
        if i == j:
            raise ValueError(f"{each.first} against itself: a rating needs two players")
        if min(each[2:]) < 0:
            raise ValueError(f"{each}: numbers of games must not be negative")
        wins[i, j] += each.wins
        wins[j, i] += each.losses
        draws[i, j] += each.draws
        draws[j, i] += each.draws
    return Results(names, wins, draws)


def rate(results: Results, *, anchor: str | None = None) -> list[Rating]:
    """The players from best to worst; their mean, or the player ``anchor``, has 1000 points.

    Intervals come from the curvature of the likelihood at its maximum. It contains all games and
    the uncertain draw rate, so the interval of an unbeaten player also extends above its rating.
    """
    names = results.names
    if anchor is not None and anchor not in names:
        raise ValueError(f"anchor={anchor}: has no games; choose from {', '.join(names)}")
    origin = None if anchor is None else names.index(anchor)
    log_strength, covariance = _fitted(results.wins, results.draws)
    value = _points(log_strength, origin)
    half_width = _HALF_WIDTH * _standard_errors(covariance, origin)
    wins, draws, losses = (
        each.sum(axis=1).astype(int) for each in (results.wins, results.draws, results.wins.T)
    )
    columns = (value, value - half_width, value + half_width, wins, draws, losses)
    rows = zip(names, *(each.tolist() for each in columns), strict=True)
    return sorted((Rating(*row) for row in rows), key=lambda rating: -rating.value)


def points(results: Results, *, anchor: str) -> dict[str, float]:
    """The rating of every player without intervals, which is much faster; ``anchor`` has 1000."""
    log_strength, _ = _fitted(results.wins, results.draws)
    value = _points(log_strength, results.names.index(anchor))
    return dict(zip(results.names, value.tolist(), strict=True))


def _points(log_strength: Array, origin: int | None) -> Array:
    """[n] -> [n]"""
    zero = log_strength.mean() if origin is None else log_strength[origin]
    return np.asarray(MEAN_RATING + _POINTS * (log_strength - zero))


def _standard_errors(covariance: Array, origin: int | None) -> Array:
    """Of the points: [n, n] -> [n]. The player with 1000 points by definition has 0."""
    n = len(covariance)
    zero = np.full(n, 1.0 / n) if origin is None else np.eye(n)[origin]
    difference = np.eye(n) - zero  # each row: a player minus the one that has 1000 points
    variance = np.diag(difference @ covariance @ difference.T)
    return np.asarray(_POINTS * np.sqrt(np.maximum(variance, 0.0)))


def _fitted(wins: Array, draws: Array) -> tuple[Array, Array]:
    """Maximise the likelihood by Newton's method: the log strengths, [n], and their covariance.

    For strengths a and b, P(win) : P(draw) : P(loss) = a : nu sqrt(a b) : b. The last row is the
    imaginary player with log strength 0; after it, the parameters hold log nu.
    """
    n = len(wins)
    wins, draws = np.pad(wins, (0, 1)), np.pad(draws, (0, 1))
    wins[n, :n] = wins[:n, n] = _PRIOR
    games = wins + wins.T + draws
    points = (wins + 0.5 * draws).sum(axis=1)[:n]
    n_draws = 0.5 * draws.sum()
    parameters = np.zeros(n + 1)
    for _ in range(_MOST_ITERATIONS):
        strength = np.append(parameters[:n], 0.0)
        nu = np.exp(parameters[n]) if n_draws else 0.0
        half = np.exp(0.5 * (strength[:, None] - strength))
        total = half + 1.0 / half + nu
        draw = nu / total
        score = half / total + 0.5 * draw  # expected points of the row player in one game
        # Gradient, and the negative Hessian: covariances of points and draws.
        gradient = np.empty(n + 1)
        gradient[:n] = points - (games * score).sum(axis=1)[:n]
        gradient[n] = n_draws - 0.5 * (games * draw).sum()
        spread = games * (half / total + 0.25 * draw - score**2)
        curvature = np.empty((n + 1, n + 1))
        curvature[:n, :n] = np.diag(spread.sum(axis=1)[:n]) - spread[:n, :n]
        curvature[:n, n] = curvature[n, :n] = (games * draw * (0.5 - score)).sum(axis=1)[:n]
        curvature[n, n] = 0.5 * (games * draw * (1.0 - draw)).sum() if n_draws else 1.0
        step = np.linalg.solve(curvature, gradient)
        longest = np.abs(step).max()
        parameters += step * min(1.0, _LONGEST_STEP / max(longest, 1e-300))
        if longest < _TOLERANCE:
            return parameters[:n], np.asarray(np.linalg.inv(curvature))[:n, :n]
    raise ArithmeticError(f"ratings did not converge in {_MOST_ITERATIONS} iterations")


def find_cycles(results: Results) -> list[list[str]]:
    """For each player the shortest cycle through it, if any: each beats the next significantly.

    A player beats another if the 95 % interval of its share of the decided games is above 0.5.
    """
    low = wilson(results.wins, results.wins + results.wins.T).low
    beaten = [np.flatnonzero(row > 0.5).tolist() for row in low]
    cycles = {_canonical(cycle) for cycle in _shortest_cycles(beaten)}
    ordered = sorted(cycles, key=lambda cycle: (len(cycle), cycle))
    return [[results.names[player] for player in cycle] for cycle in ordered]


def _shortest_cycles(beaten: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    for start in range(len(beaten)):
        paths: list[tuple[int, ...]] = [(start,)]
        seen = {start}
        while paths:
            path = paths.pop(0)
            if start in beaten[path[-1]]:
                yield path
                break
            new = [player for player in beaten[path[-1]] if player not in seen]
            seen.update(new)
            paths += [(*path, player) for player in new]


def _canonical(cycle: tuple[int, ...]) -> tuple[int, ...]:
    """The same cycle, starting with its lowest number."""
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
