"""TwoPlayerParallelEnv: a two-player env as a ParallelEnv of PettingZoo, for tools that use these.

Importing this module needs the extra pettingzoo.
"""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from ml_pipeline.extras import missing_extra
from ml_pipeline.games.two_players import Array, Info, Space, player_space

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise missing_extra(__name__, error) from error

Value = TypeVar("Value")


class TwoPlayerParallelEnv(ParallelEnv):  # type: ignore[misc]  # PettingZoo has no types
    """The agents ``player_0`` and ``player_1`` of ``env``, which has the spaces of two players.

    If ``env`` reports no ``reward_opponent``, the game is zero-sum.
    """

    def __init__(self, env: gym.Env[Array, Array]) -> None:
        self._env = env
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        # Two copies of each space: every agent seeds its own.
        self.observation_spaces = {
            agent: player_space(env.observation_space) for agent in self.possible_agents
        }
        self.action_spaces = {
            agent: player_space(env.action_space) for agent in self.possible_agents
        }
        self.render_mode = env.render_mode
        self.metadata = {**env.metadata, "name": type(env.unwrapped).__name__}

    def observation_space(self, agent: str) -> Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Space:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: Info | None = None
    ) -> tuple[dict[str, Array], dict[str, Info]]:
        obs, info = self._env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return self._by_agent(*obs), self._by_agent(info, {})

    def step(
        self, actions: dict[str, Array]
    ) -> tuple[
        dict[str, Array],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, Info],
    ]:
        action = np.stack([actions[agent] for agent in self.possible_agents])
        obs, reward, terminated, truncated, info = self._env.step(action)
        reward = float(reward)
        other_reward = float(info.pop("reward_opponent", -reward))
        other_info = {"winner": -info["winner"]} if "winner" in info else {}
        if terminated or truncated:
            self.agents = []
        return (
            self._by_agent(*obs),
            self._by_agent(reward, other_reward),
            self._by_agent(terminated, terminated),
            self._by_agent(truncated, truncated),
            self._by_agent(info, other_info),
        )

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _by_agent(self, first: Value, second: Value) -> dict[str, Value]:
        return dict(zip(self.possible_agents, (first, second), strict=True))
