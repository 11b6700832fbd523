"""Envs whose settings a curriculum changes, and reward terms for them. Workers import this file."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ml_pipeline.games.two_players import both_spaces


class Line(gym.Env[Any, Any]):
    """A walk from ``start`` by action - 1; reward 1 per step; ends after ``length`` steps.

    ``length`` and ``goal`` take effect at the next reset. The final info says whether the walk
    reached ``goal``, and which length was in effect.
    """

    def __init__(
        self, length: int = 4, goal: int = 2, ending: str = "terminated", start: int = 0
    ) -> None:
        self.observation_space = spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length, self.goal, self.ending, self.start = length, goal, ending, start
        self._buffer = np.zeros(2, dtype=np.float32)
        self._now = (length, goal)
        self._x = self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.length < 1:
            raise ValueError(f"length={self.length}: must be at least 1")
        self._now = (self.length, self.goal)
        self._x, self._step = self.start, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._x += int(action) - 1
        self._step += 1
        length, goal = self._now
        is_over = self._step >= length
        info = {"is_success": self._x >= goal, "length": length} if is_over else {}
        terminated = is_over and self.ending == "terminated"
        return self._observe(), 1.0, terminated, is_over and not terminated, info

    def _observe(self) -> Any:
        self._buffer[:] = self._x, self._step  # always the same array, as emulators do
        return self._buffer


class Swing(Line):
    """The same walk with real-valued actions, for SAC."""

    def __init__(self, length: int = 4, goal: int = 2) -> None:
        super().__init__(length, goal)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step(round(float(action[0])) + 1)


class Bounded(Line):
    """Actions between two bounds; they change nothing."""

    def __init__(self, length: int = 8, bound: float = 1.0) -> None:
        super().__init__(length)
        self.action_space: Any = spaces.Box(-bound, bound, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step(0)


class Duel(gym.Env[Any, Any]):
    """Two players; row p of an observation is 10 * p + step. Player 0 wins after three steps."""

    def __init__(self, opponent: str | None = None) -> None:
        self.opponent = opponent
        obs, action = spaces.Box(-100, 100, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = both_spaces(obs) if opponent is None else obs
        self.action_space = both_spaces(action) if opponent is None else action
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        is_over = self._step == 3
        return self._observe(), float(is_over), is_over, False, {"winner": 1} if is_over else {}

    def _observe(self) -> Any:
        rows = np.array([[self._step] * 3, [10 + self._step] * 3], dtype=np.float32)
        return rows if self.opponent is None else rows[0]


def position(obs: Any) -> float:
    """A potential."""
    return 10.0 * float(obs[0])


def moved(obs: Any, action: Any, next_obs: Any, info: Any) -> float:
    return float(next_obs[0] - obs[0])


def first_action(obs: Any, action: Any, next_obs: Any, info: Any) -> float:
    return float(action[0])


def not_a_number(obs: Any) -> float:
    return float("nan")
