"""Games: two policies play against each other in a two-player env (``envs.two_players``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.analysis.evaluate import MAX_EPISODE_STEPS, Evaluation, evaluate_batch
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.errors import UserError
from ml_pipeline.games.two_players import Array, Scripted
from ml_pipeline.policy.contracts import Policy

WINNER = "winner"  # in the info of the last step: 1, 0 or -1 for player 0


class GameError(UserError):
    """These players cannot play in this env."""


class ScriptedPolicy:
    """A scripted opponent as a ``Policy``; it has no recurrent state and reads no masks."""

    def __init__(self, opponent: Scripted) -> None:
        self._opponent = opponent

    def act_batch(
        self,
        obs: Array,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> Array:
        return self._opponent.act_batch(obs, deterministic)

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, object]) -> None:
        return None


class DiscretePolicy:
    """A policy with discrete actions that plays in the continuous version of its env."""

    def __init__(self, policy: Policy, moves: Array) -> None:
        """``moves`` [n, *act]: the continuous action of each discrete one."""
        self._policy = policy
        self._moves = moves
        self.new_memory, self.mask_of = policy.new_memory, policy.mask_of

    def act_batch(
        self,
        obs: Array,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> Array:
        action: Any = self._policy.act_batch(
            obs, deterministic, action_mask=action_mask, memory=memory
        )
        return np.asarray(self._moves[action])


class PairPolicy:
    """Both players of a two-player env as one ``Policy``; each acts once per step for all envs.

    Its recurrent state holds that of both players side by side.
    """

    def __init__(self, first: Policy, second: Policy) -> None:
        self.players = (first, second)

    def act_batch(
        self,
        obs: Array,
        deterministic: bool = False,
        *,
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
    ) -> Array:
        """[n_envs, 2, *obs] -> [n_envs, 2, *act]"""
        memories = self._split(memory, len(obs))
        actions = [
            player.act_batch(obs[:, side], deterministic, memory=memories[side])
            for side, player in enumerate(self.players)
        ]
        return np.stack(actions, axis=1)

    def _split(self, memory: Tensor | None, n_envs: int) -> list[Tensor | None]:
        """The recurrent state of each player, as views that the player updates."""
        if memory is None:
            return [None, None]
        own = [player.new_memory(n_envs) for player in self.players]
        widths = [0 if each is None else each.shape[1] for each in own]
        views = torch.split(memory, widths, dim=1)
        return [None if w == 0 else view for w, view in zip(widths, views, strict=True)]

    def new_memory(self, n_envs: int) -> Tensor | None:
        memories = [player.new_memory(n_envs) for player in self.players]
        used = [each for each in memories if each is not None]
        return torch.cat(used, dim=1) if used else None

    def mask_of(self, infos: Mapping[str, object]) -> None:
        return None


class Counts(NamedTuple):
    """Results of one player."""

    wins: int
    draws: int
    losses: int

    @property
    def n_games(self) -> int:
        return sum(self)

    def swapped(self) -> Counts:
        """The same games from the other player's point of view."""
        return Counts(self.losses, self.draws, self.wins)


class Games(NamedTuple):
    """Results of the first of two players."""

    as_player_0: Counts
    as_player_1: Counts
    n_cut: int  # games that reached the step limit of an evaluation; they count as draws

    @property
    def counts(self) -> Counts:
        pairs = zip(self.as_player_0, self.as_player_1, strict=True)
        return Counts(*(one + other for one, other in pairs))


class Side(NamedTuple):
    """Games in which the players keep their sides; each game has a seed of its own."""

    policy: PairPolicy
    n_games: int
    seed: int  # of the first game
    is_swapped: bool


def play_games(
    first: Policy,
    second: Policy,
    envs: VectorEnv[Any, Any, Any],
    *,
    n_games: int,
    seed: int,
    deterministic: bool,
    max_steps: int = MAX_EPISODE_STEPS,
) -> Games:
    """Play ``n_games`` in the envs of ``make_evaluation_envs``; game k has the seed ``seed + k``.

    The games of an env are fixed before it starts, so short games are not counted more often.
    """

    def play(side: Side) -> Evaluation:
        return evaluate_batch(
            side.policy,
            envs,
            n_episodes=side.n_games,
            seed=side.seed,
            deterministic=deterministic,
            max_episode_steps=max_steps,
        )

    return play_sides(first, second, play, n_games=n_games, seed=seed)


def play_sides(
    first: Policy,
    second: Policy,
    play: Callable[[Side], Evaluation],
    *,
    n_games: int,
    seed: int,
) -> Games:
    """``play`` half of the games, then the other half with the sides changed."""
    half = (n_games + 1) // 2
    halves = (
        Side(PairPolicy(first, second), half, seed, is_swapped=False),
        Side(PairPolicy(second, first), n_games - half, seed + half, is_swapped=True),
    )
    results = [play(side) for side in halves]
    as_player_0, of_other = (_counts(result) for result in results)
    return Games(as_player_0, of_other.swapped(), sum(result.n_cut for result in results))


def _counts(result: Evaluation) -> Counts:
    """The results of player 0."""
    winners = [winner_of(episode, result.max_episode_steps) for episode in result.episodes]
    return Counts(wins=winners.count(1), draws=winners.count(0), losses=winners.count(-1))


def winner_of(episode: Episode, max_steps: int) -> int:
    """1 if player 0 has won, -1 if it has lost, 0 for a draw and for a game that was cut."""
    winner = episode.infos.get(WINNER)
    if winner is None and episode.length >= max_steps:
        return 0
    if winner not in (-1.0, 0.0, 1.0):
        found = "has none" if winner is None else f"has {winner:g}"
        raise GameError(
            f'info["{WINNER}"] must be 1, 0 or -1 in the last step of a game, but it {found}; '
            "see ml_pipeline/games/two_players.py"
        )
    return int(winner)
