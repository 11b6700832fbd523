"""Ratings: hand arithmetic, simulated games with known strengths, missing games, and cycles."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ml_pipeline.analysis.statistics import wilson
from ml_pipeline.games.ratings import (
    Pairing,
    Rating,
    find_cycles,
    rate,
    results_of,
)


def rated(*pairings: Pairing, anchor: str | None = None) -> dict[str, Rating]:
    return {each.name: each for each in rate(results_of(pairings), anchor=anchor)}


def test_one_win_gives_the_rating_of_the_hand_calculation() -> None:
    # By symmetry the log strengths are +x and -x. With r = exp(x), the slope of the likelihood is
    # 1 - r^2/(1 + r^2) for the game and 1/2 - r/(1 + r) for the imaginary player; their sum is 0
    # where r^3 = r^2 + r + 3.
    (root,) = [r.real for r in np.roots([1.0, -1.0, -1.0, -3.0]) if abs(r.imag) < 1e-9]

    players = rated(Pairing("winner", "loser", 1, 0, 0))

    assert players["winner"].value == pytest.approx(1000 + 400 * np.log10(root), abs=0.01)
    assert players["loser"].value == pytest.approx(1000 - 400 * np.log10(root), abs=0.01)


@pytest.mark.parametrize("draws", [0, 20_000])
def test_odds_of_ten_to_one_between_wins_and_losses_are_400_points(draws: int) -> None:
    players = rated(Pairing("a", "b", 100_000, draws, 10_000))

    assert players["a"].value - players["b"].value == pytest.approx(400.0, abs=0.1)
    assert players["a"].value + players["b"].value == pytest.approx(2000.0)


def test_equal_results_give_1000_points_each() -> None:
    for counts in ((5, 0, 5), (5, 7, 5), (0, 9, 0), (0, 0, 0)):
        players = rated(Pairing("a", "b", *counts))

        assert [each.value for each in players.values()] == pytest.approx([1000.0, 1000.0])


def test_expected_points_equal_points_that_were_won() -> None:
    # The likelihood is greatest where this holds; the imaginary player shifts it by less than 1.
    pairings = [Pairing("a", "b", 50, 20, 30), Pairing("b", "c", 60, 10, 30)]
    players = rated(*pairings)
    strength = {name: 10 ** ((each.value - 1000) / 400) for name, each in players.items()}

    def expected(nu: float, one: str, other: str) -> np.ndarray:
        a, b = strength[one], strength[other]
        return 100 * np.array([a, nu * np.sqrt(a * b), b]) / (a + b + nu * np.sqrt(a * b))

    # The nu at which 30 draws are expected.
    n_draws = [
        sum(expected(nu, one, other)[1] for one, other in (("a", "b"), ("b", "c")))
        for nu in np.linspace(0, 2, 2001)
    ]
    nu = float(np.linspace(0, 2, 2001)[np.argmin(np.abs(np.array(n_draws) - 30))])
    wins, draws, _ = expected(nu, "a", "b")
    assert wins + draws / 2 == pytest.approx(60.0, abs=0.5)


@pytest.mark.parametrize("anchor", [None, "0"])
@pytest.mark.parametrize("draw_rate", [0.0, 0.8])
@pytest.mark.parametrize(
    ("n_players", "n_games", "spread"),
    [(2, 20, 200.0), (3, 5, 300.0), (5, 200, 150.0), (6, 20, 600.0), (12, 20, 300.0)],
)
def test_true_strengths_of_simulated_games_are_in_most_intervals(
    n_players: int, n_games: int, spread: float, draw_rate: float, anchor: str | None
) -> None:
    generator = np.random.default_rng(3)
    n_inside = n_intervals = 0
    while n_intervals < 600:
        true = generator.normal(0.0, spread, n_players)
        true += 1000.0 - (true.mean() if anchor is None else true[0])
        pairings = []
        for i, j in combinations(range(n_players), 2):
            odds = 10 ** ((true[i] - true[j]) / 400)
            weights = np.array([odds, draw_rate * np.sqrt(odds), 1.0])
            counts = generator.multinomial(n_games, weights / weights.sum())
            pairings.append(Pairing(str(i), str(j), *counts.tolist()))
        for each in rate(results_of(pairings), anchor=anchor):
            if each.name != anchor:
                n_intervals += 1
                n_inside += each.low <= true[int(each.name)] <= each.high

    assert n_inside / n_intervals >= 0.88  # 0.95 expected; a bootstrap had 0.61 in a wide field


def test_interval_narrows_with_the_square_root_of_the_games() -> None:
    few, many = (rated(Pairing("a", "b", 6 * n, n, 3 * n))["a"] for n in (10, 1000))

    ratio = (few.high - few.low) / (many.high - many.low)

    assert 8.0 < ratio < 12.5


def test_an_unbeaten_player_has_a_finite_rating_that_grows_with_its_games() -> None:
    values = [rated(Pairing("a", "b", n, 0, 0))["a"].value for n in (1, 10, 1000, 1_000_000)]

    assert all(np.isfinite(values))
    assert values == sorted(values)
    players = rated(Pairing("a", "b", 200, 0, 0), Pairing("b", "c", 200, 0, 0))
    for each in players.values():  # although every game of a and c had the same result
        assert each.low < each.value - 10.0
        assert each.high > each.value + 10.0
    assert players["a"].value > players["b"].value > players["c"].value


def test_pairings_add_up_in_any_order() -> None:
    once = rated(Pairing("a", "b", 30, 5, 10), Pairing("b", "c", 20, 5, 10))
    split = rated(
        Pairing("a", "b", 10, 0, 4),
        Pairing("b", "c", 20, 5, 10),
        Pairing("b", "a", 6, 5, 20),
    )

    assert once == split
    assert (split["b"].wins, split["b"].draws, split["b"].losses) == (30, 10, 40)


def test_players_who_have_not_met_are_rated_through_others() -> None:
    players = rated(Pairing("a", "b", 75, 0, 25), Pairing("b", "c", 75, 0, 25))

    # 3 to 1 twice: 9 to 1 between a and c, up to the imaginary player.
    assert players["a"].value - players["c"].value == pytest.approx(800 * np.log10(3), abs=5)


def test_groups_that_have_not_met_have_finite_ratings() -> None:
    players = rated(Pairing("a", "b", 1, 0, 0), Pairing("c", "d", 1, 0, 0))

    assert all(np.isfinite(each.value) for each in players.values())


def test_the_anchor_has_1000_points() -> None:
    pairing = Pairing("weak", "strong", 10, 0, 90)
    free, anchored = rated(pairing), rated(pairing, anchor="weak")

    assert anchored["weak"][1:4] == (1000.0, 1000.0, 1000.0)
    difference = free["strong"].value - free["weak"].value
    assert anchored["strong"].value == pytest.approx(1000.0 + difference)


def test_wrong_results_are_refused() -> None:
    with pytest.raises(ValueError, match="a against itself"):
        results_of([Pairing("a", "a", 1, 0, 0)])
    with pytest.raises(ValueError, match="must not be negative"):
        results_of([Pairing("a", "b", 1, 0, -1)])
    with pytest.raises(ValueError, match="anchor=c: has no games; choose from a, b"):
        rated(Pairing("a", "b", 1, 0, 0), anchor="c")


def test_rock_paper_scissors_is_a_cycle() -> None:
    results = results_of(
        [
            Pairing("rock", "scissors", 70, 10, 20),
            Pairing("scissors", "paper", 70, 10, 20),
            Pairing("paper", "rock", 70, 10, 20),
            Pairing("rock", "stone", 45, 10, 45),
        ]
    )

    assert find_cycles(results) == [["rock", "scissors", "paper"]]


def test_a_longer_cycle_is_found_and_an_insignificant_one_is_not() -> None:
    four = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]

    assert find_cycles(results_of(Pairing(*each, 70, 0, 30) for each in four)) == [list("abcd")]
    assert find_cycles(results_of(Pairing(*each, 55, 0, 45) for each in four)) == []


def test_wilson_interval_of_textbook_values() -> None:
    # 81 successes in 263 trials: 0.2553 to 0.3662 (Newcombe 1998, method 3).
    share, low, high = (float(each) for each in wilson(81, 263))

    assert (round(share, 4), round(low, 4), round(high, 4)) == (0.308, 0.2553, 0.3662)
    assert float(wilson(0, 20).low) == 0.0
    assert round(float(wilson(0, 20).high), 4) == 0.1611
    assert np.isnan(wilson(0, 0).low)
