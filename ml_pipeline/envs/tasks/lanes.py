"""Lanes: an action of two parts, a lane and a speed.

The observation has the speed limit of each lane, 0 if it is closed. The best action takes the lane
with the highest limit and drives exactly that fast. A closed lane, which the action mask forbids,
ends the episode.
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, Info

Obs = NDArray[np.float32]


class Lanes(AnyEnv):
    """Dict(lane, speed) actions; the best return is ``length``.

    The best lane at any fixed speed gets 80% of it, the right speed in a random open lane 83%.
    """

    def __init__(self, n_lanes: int = 4, n_open: int = 2, length: int = 32) -> None:
        if not 1 <= n_open <= n_lanes:
            raise ValueError(f"n_open must be between 1 and n_lanes={n_lanes}, got {n_open}")
        self.observation_space = spaces.Box(0.0, 1.0, (n_lanes,), np.float32)
        lane, speed = spaces.Discrete(n_lanes), spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Dict({"lane": lane, "speed": speed})
        self.n_lanes = n_lanes
        self.n_open = n_open
        self.length = length
        self._step = 0
        self._limits = np.zeros(n_lanes, dtype=np.float32)
        self._open = np.ones(n_lanes, dtype=np.int8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        super().reset(seed=seed)
        self._step = 0
        return self._next()

    def step(self, action: Info) -> tuple[Obs, float, bool, bool, Info]:
        self._step += 1
        lane, speed = int(action["lane"]), float(action["speed"][0])
        is_open = bool(self._open[lane])
        limit, best = float(self._limits[lane]), float(self._limits.max())
        reward = 1.0 - (best - limit) - abs(speed - limit) if is_open else 0.0
        obs, info = self._next()
        return obs, reward, not is_open, self._step >= self.length, info

    def _next(self) -> tuple[Obs, Info]:
        self._open = np.zeros(self.n_lanes, dtype=np.int8)
        self._open[self.np_random.permutation(self.n_lanes)[: self.n_open]] = 1
        self._limits = (self.np_random.random(self.n_lanes) * self._open).astype(np.float32)
        return self._limits.copy(), {"action_mask": {"lane": self._open.copy()}}
