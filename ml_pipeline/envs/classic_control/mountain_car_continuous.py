"""TorchMountainCarContinuous: Gymnasium's MountainCarContinuous-v0 as a tensor env."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv

MIN_POSITION, MAX_POSITION = -1.2, 0.6
GOAL = 0.45
MAX_SPEED = 0.07
POWER, GRAVITY = 0.0015, 0.0025


class TorchMountainCarContinuous(TorchVectorEnv):
    """State: position and speed, [n_envs] each."""

    single_observation_space = spaces.Box(
        np.array([MIN_POSITION, -MAX_SPEED], dtype=np.float32),
        np.array([MAX_POSITION, MAX_SPEED], dtype=np.float32),
        dtype=np.float32,
    )
    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    n_draws = 1
    max_episode_steps = 999
    gymnasium_id: ClassVar[str | None] = "MountainCarContinuous-v0"

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        position = draws[0] * 0.2 - 0.6
        return position, torch.zeros_like(position)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        position, speed = state
        force = action[:, 0].clamp(-1.0, 1.0)
        speed = speed + force * POWER - GRAVITY * torch.cos(3.0 * position)
        speed = speed.clamp(-MAX_SPEED, MAX_SPEED)
        position = (position + speed).clamp(MIN_POSITION, MAX_POSITION)
        at_the_wall = position <= MIN_POSITION
        speed = torch.where(at_the_wall, speed.clamp(min=0.0), speed)
        terminated = (position >= GOAL) & (speed >= 0.0)
        # As in Gymnasium, the cost is that of the action before clipping.
        reward = 100.0 * terminated.to(torch.float32) - 0.1 * action[:, 0] ** 2
        return (position, speed), reward, terminated

    def observe(self, state: EnvState) -> Tensor:
        return torch.stack(state, dim=1)
