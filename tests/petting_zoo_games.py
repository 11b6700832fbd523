"""Small games for two: a two-player env, and a ParallelEnv of PettingZoo with unequal sides."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from ml_pipeline.games.parallel_api import TwoPlayerParallelEnv
from ml_pipeline.games.two_players import both_spaces

OBS = spaces.Box(-100.0, 100.0, (2,), np.float32)


class TugOfWar(gym.Env[Any, Any]):
    """Player 0 wins at +2 and player 1 at -2; a player sees the rope from its own end."""

    def __init__(self, discrete: bool = False, length: int = 20) -> None:
        self.observation_space = both_spaces(OBS)
        act = spaces.Discrete(3) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = both_spaces(act)
        self.discrete = discrete
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.rope = float(self.np_random.uniform(-0.5, 0.5))
        self.n_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        pulls = np.asarray(action, dtype=np.float64).reshape(2) - (1.0 if self.discrete else 0.0)
        before = self.rope
        self.rope += pulls[0] - pulls[1]
        self.n_steps += 1
        is_over = abs(self.rope) >= 2.0
        is_late = self.n_steps >= self.length
        info = {"winner": int(np.sign(self.rope)) if is_over else 0} if is_over or is_late else {}
        return self._observe(), self.rope - before, is_over, is_late and not is_over, info

    def _observe(self) -> Any:
        rope = np.array([[self.rope], [-self.rope]])
        return np.hstack([rope, [[self.n_steps]] * 2]).astype(np.float32)


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
