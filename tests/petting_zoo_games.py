"""Small games of PettingZoo for two: tug of war, and one with unequal sides."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from two_player_games import TugOfWar

from ml_pipeline.games.parallel_api import TwoPlayerParallelEnv

OBS = spaces.Box(-100.0, 100.0, (2,), np.float32)


def parallel_tug_of_war(**kwargs: Any) -> Any:
    return TwoPlayerParallelEnv(TugOfWar(**kwargs))


class UnequalSides(ParallelEnv):  # type: ignore[type-arg]
    """ "left" is paid twice as much as "right" for the same action, and sees 0 instead of 1."""

    metadata = {"name": "unequal_sides", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self, agents: Any = ("left", "right"), length: int = 3, render_mode: str | None = None
    ) -> None:
        self.possible_agents = list(agents)
        self.length = length
        self.render_mode = render_mode
        self.spaces = {agent: spaces.Box(-1.0, 1.0, (1,), np.float32) for agent in agents}

    def observation_space(self, agent: str) -> Any:
        return OBS

    def action_space(self, agent: str) -> Any:
        return self.spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.noise = float(np.random.default_rng(seed).random())
        self.n_steps = 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert all(self.spaces[agent].contains(action) for agent, action in actions.items())
        self.n_steps += 1
        is_late = self.n_steps >= self.length
        rewards = {"left": 2.0 * float(actions["left"][0]), "right": float(actions["right"][0])}
        # "right" is out at once if it plays 1.
        is_out = {"left": False, "right": bool(actions["right"][0] == 1.0)}
        result = self._observe(), rewards, is_out, dict.fromkeys(rewards, is_late)
        return *result, {agent: {} for agent in rewards}

    def render(self) -> Any:
        return np.zeros((4, 4, 3), dtype=np.uint8)

    def _observe(self) -> Any:
        return {
            agent: np.array([side, self.noise], dtype=np.float32)
            for side, agent in enumerate(self.possible_agents)
        }


class UnequalSpaces(UnequalSides):
    def __init__(self) -> None:
        super().__init__()
        self.spaces["right"] = spaces.Box(-1.0, 1.0, (2,), np.float32)
