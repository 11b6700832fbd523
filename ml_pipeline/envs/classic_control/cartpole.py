"""TorchCartPole: Gymnasium's CartPole-v1 as a tensor env."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv

GRAVITY = 9.8
POLE_MASS, TOTAL_MASS = 0.1, 1.1
HALF_LENGTH = 0.5  # of the pole
FORCE = 10.0
SECONDS_PER_STEP = 0.02
MAX_X = 2.4
MAX_ANGLE = math.radians(12)


class TorchCartPole(TorchVectorEnv):
    """State: position and speed of the cart, angle and angular speed of the pole, [n_envs] each."""

    # Twice the limits, so that the last observation of an episode is inside.
    _high = np.array([2 * MAX_X, np.inf, 2 * MAX_ANGLE, np.inf], dtype=np.float32)
    single_observation_space = spaces.Box(-_high, _high, dtype=np.float32)
    single_action_space = spaces.Discrete(2)
    n_draws = 4
    max_episode_steps = 500
    gymnasium_id: ClassVar[str | None] = "CartPole-v1"

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return tuple(draw * 0.1 - 0.05 for draw in draws)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        x, speed, angle, turn = state
        push = (action == 1).to(torch.float32) * (2 * FORCE) - FORCE
        sin, cos = torch.sin(angle), torch.cos(angle)
        pole = POLE_MASS * HALF_LENGTH
        push = (push + pole * turn**2 * sin) / TOTAL_MASS
        turn_change = (GRAVITY * sin - cos * push) / (
            HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos**2 / TOTAL_MASS)
        )
        speed_change = push - pole * turn_change * cos / TOTAL_MASS
        x = x + SECONDS_PER_STEP * speed
        speed = speed + SECONDS_PER_STEP * speed_change
        angle = angle + SECONDS_PER_STEP * turn
        turn = turn + SECONDS_PER_STEP * turn_change
        terminated = (x.abs() > MAX_X) | (angle.abs() > MAX_ANGLE)
        return (x, speed, angle, turn), torch.ones_like(x), terminated

    def observe(self, state: EnvState) -> Tensor:
        return torch.stack(state, dim=1)
