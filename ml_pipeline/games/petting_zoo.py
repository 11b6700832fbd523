"""PettingZoo: a ParallelEnv of PettingZoo with two agents of equal spaces as a two-player env.

Games need not be symmetric, so the agents swap sides: each is player 0 in every other episode. The
episode ends as soon as one agent is done. The agent with the larger sum of rewards wins.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle
from numpy.typing import ArrayLike

from ml_pipeline.extras import import_extra
from ml_pipeline.games.two_players import N_PLAYERS, Array, Info, both_spaces
from ml_pipeline.targets import import_entry

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


class PettingZoo(gym.Env[Array, Array]):
    """``game``: the ``_target_`` of a class or function that makes the ParallelEnv, and its kwargs.

    This env's generator gives each episode of the game its seed.
    """

    def __init__(
        self,
        game: Mapping[str, object],
        swap_sides: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self._game = _make_game(game, render_mode)
        self._agents: list[Hashable] = list(self._game.possible_agents)
        _check_agents(self._game, f"game._target_={game['_target_']}")
        self.observation_space = both_spaces(self._game.observation_space(self._agents[0]))
        self.action_space = both_spaces(self._game.action_space(self._agents[0]))
        self.swap_sides = swap_sides
        self.render_mode = render_mode
        self.metadata = dict(self._game.metadata)
        self._is_swapped = False
        self._returns = np.zeros(N_PLAYERS)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        if self.swap_sides:
            # If every episode is seeded, both sides must occur too.
            is_seeded = seed is not None
            swap = self.np_random.integers(2) if is_seeded else not self._is_swapped
            self._is_swapped = bool(swap)
        obs, _ = self._game.reset(seed=int(self.np_random.integers(2**31)), options=options)
        self._returns = np.zeros(N_PLAYERS)
        return self._by_player(obs), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, Info]:
        actions = dict(zip(self._players(), action, strict=True))
        obs, rewards, terminated, truncated, _ = self._game.step(actions)
        both = np.array([rewards[agent] for agent in self._players()], np.float64)
        self._returns += both
        info: Info = {"reward_opponent": float(both[1])}
        is_terminated, is_truncated = any(terminated.values()), any(truncated.values())
        if is_terminated or is_truncated:
            info["winner"] = int(np.sign(self._returns[0] - self._returns[1]))
        return self._by_player(obs), float(both[0]), is_terminated, is_truncated, info

    def render(self) -> Any:
        return self._game.render()

    def close(self) -> None:
        self._game.close()

    def _players(self) -> list[Hashable]:
        """The agents, player 0 first."""
        return self._agents[::-1] if self._is_swapped else self._agents

    def _by_player(self, obs: Mapping[Hashable, ArrayLike]) -> Array:
        dtype = self.observation_space.dtype
        return np.stack([np.asarray(obs[agent], dtype=dtype) for agent in self._players()])

    def __getstate__(self) -> dict[str, object]:
        kind = type(self._game.unwrapped)
        if getattr(kind, "__setstate__", None) is EzPickle.__setstate__:
            raise TypeError(f"{kind.__name__} is an EzPickle, which is unpickled as a new env")
        return vars(self)


def _make_game(entry: Mapping[str, object], render_mode: str | None) -> ParallelEnv:
    pettingzoo = import_extra("pettingzoo", needed_by="PettingZoo")
    make, arguments = import_entry(entry, key="env.kwargs.game")
    if render_mode is not None:
        arguments["render_mode"] = render_mode
    game = make(**arguments)
    if not isinstance(game, pettingzoo.ParallelEnv):
        raise ValueError(
            f"game._target_={entry['_target_']}: returned {type(game).__name__}, not a "
            "ParallelEnv; games that take turns often have a function parallel_env"
        )
    return game


def _check_agents(game: ParallelEnv, name: str) -> None:
    """Refuse a game that is not for two agents of equal spaces."""
    agents = list(game.possible_agents)
    if len(agents) != N_PLAYERS:
        raise ValueError(f"{name}: has {len(agents)} agents; choose a game for two")
    for kind, space_of in (("observation", game.observation_space), ("action", game.action_space)):
        ours, theirs = map(space_of, agents)
        if ours != theirs:
            raise ValueError(
                f"{name}: the {kind} spaces of the agents differ, {ours} and {theirs}; "
                "choose a game with equal spaces, or wrap it"
            )
