"""HideVelocity: removes velocities from observations, so that a policy needs a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnyEnv

Vector = NDArray[np.generic]


class HideVelocity(gym.ObservationWrapper[Vector, object, Vector]):
    """Removes entries of a vector observation; the default is for CartPole."""

    def __init__(self, env: AnyEnv, hidden: Sequence[int] = (1, 3)) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, spaces.Box) or len(box.shape) != 1:
            raise ValueError(f"HideVelocity needs a vector observation, this env has {box}")
        self._shown = np.setdiff1d(np.arange(box.shape[0]), hidden)
        low, high = box.low[self._shown], box.high[self._shown]
        self.observation_space = spaces.Box(low, high, dtype=box.dtype.type)

    def observation(self, observation: Vector) -> Vector:
        return observation[self._shown]
