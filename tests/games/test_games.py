"""Games between two policies: sides, seeds, exact numbers, and recurrent players."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from two_player_games import PULLS, Puller, ShortWins, TugOfWar

from ml_pipeline.analysis.evaluate import make_evaluation_envs
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.games.matches import (
    Counts,
    DiscretePolicy,
    GameError,
    Games,
    ScriptedPolicy,
    play_games,
)

STRONG, WEAK = ScriptedPolicy(Puller(1.0)), ScriptedPolicy(Puller(0.3))


def played(
    first: Any, second: Any, make_env: Callable[[], Any] = TugOfWar, *, n_envs: int = 3, **how: Any
) -> Games:
    how = {"n_games": 10, "seed": 5, "deterministic": True, **how}
    with closing(make_evaluation_envs(make_env, VecEnvConfig(), n_envs=n_envs)) as envs:
        return play_games(first, second, envs, **how)


def test_the_stronger_player_wins_on_both_sides() -> None:
    result = played(STRONG, WEAK, n_games=7)

    assert result.as_player_0 == Counts(4, 0, 0)
    assert result.as_player_1 == Counts(3, 0, 0)
    assert played(WEAK, STRONG, n_games=7).counts == Counts(0, 0, 7)


def test_equal_pulls_are_draws() -> None:
    assert played(STRONG, STRONG).counts == Counts(0, 10, 0)


def test_short_games_do_not_count_more_often() -> None:
    # The winner depends on the seed alone: 50 wins and 50 losses for player 0.
    result = played(STRONG, WEAK, ShortWins, n_envs=4, n_games=200)

    assert result.as_player_0 == result.as_player_1 == Counts(50, 0, 50)


def test_wins_draws_and_losses_have_the_probabilities_of_the_game() -> None:
    # Half of the games are decided by luck: 1/2 + 1/6 wins, 1/6 draws, 1/6 losses.
    wins, draws, losses = played(
        STRONG, WEAK, partial(TugOfWar, luck=0.5), n_envs=8, n_games=600
    ).counts

    assert abs(wins - 400) < 46  # four standard deviations
    assert abs(draws - 100) < 37
    assert abs(losses - 100) < 37


def test_results_do_not_depend_on_the_number_of_envs_or_on_workers() -> None:
    make_env = partial(TugOfWar, luck=0.5)
    alone = played(STRONG, WEAK, make_env, n_envs=1, n_games=25)

    assert played(STRONG, WEAK, make_env, n_envs=8, n_games=25) == alone
    settings = VecEnvConfig(n_workers=2, start_method="fork")
    with closing(make_evaluation_envs(make_env, settings, n_envs=4, in_workers=True)) as envs:
        in_workers = play_games(STRONG, WEAK, envs, n_games=25, seed=5, deterministic=True)
    assert in_workers == alone
    assert played(STRONG, WEAK, make_env, n_games=25, seed=6) != alone


def test_every_game_has_its_own_seed() -> None:
    seeds: list[Any] = []

    class Noted(TugOfWar):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed)

    played(STRONG, WEAK, Noted, n_games=9, seed=100)

    assert sorted(seeds) == list(range(100, 109))


class Chooser:
    """Always takes the same discrete action."""

    def __init__(self, action: int) -> None:
        self.action = action

    def act_batch(self, obs: Any, *_: Any, **__: Any) -> Any:
        return np.full(len(obs), self.action)

    def new_memory(self, n_envs: int) -> None: ...

    def mask_of(self, infos: Any) -> None: ...


def test_players_with_discrete_actions() -> None:
    make_env = partial(TugOfWar, discrete=True)

    assert played(Chooser(2), Chooser(1), make_env).counts == Counts(10, 0, 0)


def test_a_discrete_player_plays_in_the_continuous_game() -> None:
    hard, soft = (DiscretePolicy(Chooser(action), PULLS) for action in (2, 1))

    assert played(hard, WEAK).counts == Counts(10, 0, 0)
    assert played(soft, WEAK).counts == Counts(0, 10, 0)  # both pull with 0.3


class Counting(Chooser):
    """A recurrent player: its state counts the steps of the game, which it also observes."""

    def __init__(self, width: int) -> None:
        super().__init__(1)
        self.width = width
        self.n_right = self.n_wrong = 0

    def act_batch(self, obs: Any, *_: Any, memory: Any, **__: Any) -> Any:
        right = np.isclose(memory.numpy(), 20 * obs[:, 1:])
        self.n_right += int(right.all(axis=1).sum())
        self.n_wrong += int((~right).any(axis=1).sum())
        memory += 1
        return super().act_batch(obs)

    def new_memory(self, n_envs: int) -> Any:
        return torch.zeros(n_envs, self.width)


@pytest.mark.parametrize("other", [Counting(3), Chooser(0)])
def test_each_recurrent_player_keeps_its_own_state_per_game(other: Any) -> None:
    player = Counting(2)

    # The game against action 1 is a draw after 20 steps; against action 0, action 1 wins.
    games = played(player, other, partial(TugOfWar, discrete=True), n_envs=1, n_games=4)

    assert player.n_wrong == 0
    assert player.n_right >= 4 * 6
    assert games.counts == (Counts(0, 4, 0) if isinstance(other, Counting) else Counts(4, 0, 0))
    if isinstance(other, Counting):
        assert (other.n_right, other.n_wrong) == (80, 0)


def test_an_env_that_does_not_name_the_winner_is_refused() -> None:
    class Silent(TugOfWar):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {})

    class Odd(TugOfWar):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"winner": 2})

    with pytest.raises(GameError, match=r'info\["winner"\] must be .* but it has none'):
        played(STRONG, WEAK, Silent)
    with pytest.raises(GameError, match="but it has 2"):
        played(STRONG, WEAK, Odd)


def test_a_game_that_never_ends_is_cut_and_counts_as_a_draw() -> None:
    class Endless(TugOfWar):
        def step(self, action: Any) -> Any:
            return self._seen(), 0.0, False, False, {}

    result = played(STRONG, WEAK, Endless, n_games=2, n_envs=1, max_steps=50)

    assert (result.counts, result.n_cut) == (Counts(0, 2, 0), 2)
