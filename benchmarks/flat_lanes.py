"""Lanes with one kind of action, as policies need it that have no actions of several parts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv, Info
from ml_pipeline.envs.tasks.lanes import Lanes


class Levels(gym.Wrapper[Any, Any, Any, Any]):
    """MultiDiscrete actions: the lane, and one of ``n`` speeds."""

    def __init__(self, env: AnyEnv, n: int = 8) -> None:
        super().__init__(env)
        assert isinstance(env.unwrapped, Lanes)
        self.action_space = spaces.MultiDiscrete([env.unwrapped.n_lanes, n])
        self._n = n

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self._flat(info)

    def step(self, action: NDArray[np.int64]) -> tuple[Any, Any, bool, bool, Info]:
        lane, level = action
        speed = np.array([(level + 0.5) / self._n], dtype=np.float32)
        obs, reward, terminated, truncated, info = self.env.step({"lane": lane, "speed": speed})
        return obs, reward, terminated, truncated, self._flat(info)

    def _flat(self, info: Info) -> Info:
        every_level = np.ones(self._n, dtype=np.int8)
        return {"action_mask": np.concatenate([info["action_mask"]["lane"], every_level])}


class Numbers(gym.Wrapper[Any, Any, Any, Any]):
    """Box actions: a number for each lane, and the speed. The largest of an open lane decides."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        assert isinstance(env.unwrapped, Lanes)
        self._open = np.ones(env.unwrapped.n_lanes, dtype=bool)
        self.action_space = spaces.Box(0.0, 1.0, (env.unwrapped.n_lanes + 1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self._kept(info)

    def step(self, action: NDArray[np.float32]) -> tuple[Any, Any, bool, bool, Info]:
        lane = int(np.where(self._open, action[:-1], -np.inf).argmax())
        step = self.env.step({"lane": lane, "speed": action[-1:]})
        obs, reward, terminated, truncated, info = step
        return obs, reward, terminated, truncated, self._kept(info)

    def _kept(self, info: Info) -> Info:
        self._open = info["action_mask"]["lane"].astype(bool)
        return {}
