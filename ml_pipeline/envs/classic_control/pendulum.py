"""TorchPendulum: Gymnasium's Pendulum-v1 as a tensor env."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv

GRAVITY = 10.0
MAX_SPEED = 8.0
MAX_TORQUE = 2.0
SECONDS_PER_STEP = 0.05


class TorchPendulum(TorchVectorEnv):
    """State: angle (0 is upright, not wrapped) and angular speed, [n_envs] each."""

    _high = np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
    single_observation_space = spaces.Box(-_high, _high, dtype=np.float32)
    single_action_space = spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)
    n_draws = 2
    max_episode_steps = 200
    gymnasium_id: ClassVar[str | None] = "Pendulum-v1"

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        angle, speed = (draw * 2.0 - 1.0 for draw in draws)
        return angle * math.pi, speed

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        angle, speed = state
        torque = action[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = from_upright**2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = speed + (1.5 * GRAVITY * torch.sin(angle) + 3.0 * torque) * SECONDS_PER_STEP
        speed = speed.clamp(-MAX_SPEED, MAX_SPEED)
        angle = angle + speed * SECONDS_PER_STEP
        return (angle, speed), -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: EnvState) -> Tensor:
        angle, speed = state
        return torch.stack((torch.cos(angle), torch.sin(angle), speed), dim=1)
