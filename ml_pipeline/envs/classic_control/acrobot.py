"""TorchAcrobot: Gymnasium's Acrobot-v1 as a tensor env."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv

GRAVITY = 9.8
# Both links: mass 1, length 1, moment of inertia 1, centre of mass in the middle.
MIDDLE = 0.5
INERTIA = 1.0
MAX_SPEED_1, MAX_SPEED_2 = 4 * math.pi, 9 * math.pi
SECONDS_PER_STEP = 0.2


class TorchAcrobot(TorchVectorEnv):
    """State: both angles (0 hangs down, the second is relative) and speeds, [n_envs] each."""

    _high = np.array([1.0, 1.0, 1.0, 1.0, MAX_SPEED_1, MAX_SPEED_2], dtype=np.float32)
    single_observation_space = spaces.Box(-_high, _high, dtype=np.float32)
    single_action_space = spaces.Discrete(3)
    n_draws = 4
    max_episode_steps = 500
    gymnasium_id: ClassVar[str | None] = "Acrobot-v1"

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return tuple(draw * 0.2 - 0.1 for draw in draws)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        torque = action.to(torch.float32) - 1.0
        angle_1, angle_2, speed_1, speed_2 = _runge_kutta(state, torque)
        angle_1, angle_2 = _wrapped(angle_1), _wrapped(angle_2)
        speed_1 = speed_1.clamp(-MAX_SPEED_1, MAX_SPEED_1)
        speed_2 = speed_2.clamp(-MAX_SPEED_2, MAX_SPEED_2)
        height = -torch.cos(angle_1) - torch.cos(angle_1 + angle_2)
        terminated = height > 1.0
        return (angle_1, angle_2, speed_1, speed_2), terminated.to(torch.float32) - 1.0, terminated

    def observe(self, state: EnvState) -> Tensor:
        angle_1, angle_2, speed_1, speed_2 = state
        directions = (torch.cos(angle_1), torch.sin(angle_1), torch.cos(angle_2))
        return torch.stack((*directions, torch.sin(angle_2), speed_1, speed_2), dim=1)


def _runge_kutta(state: EnvState, torque: Tensor) -> EnvState:
    """One step of the classical fourth-order method."""
    half = SECONDS_PER_STEP / 2
    slope_1 = _slope(state, torque)
    slope_2 = _slope(_moved(state, slope_1, half), torque)
    slope_3 = _slope(_moved(state, slope_2, half), torque)
    slope_4 = _slope(_moved(state, slope_3, SECONDS_PER_STEP), torque)
    slopes = zip(slope_1, slope_2, slope_3, slope_4, strict=True)
    mean = tuple((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in slopes)
    return _moved(state, mean, SECONDS_PER_STEP)


def _moved(state: EnvState, slope: EnvState, seconds: float) -> EnvState:
    return tuple(x + seconds * change for x, change in zip(state, slope, strict=True))


def _slope(state: EnvState, torque: Tensor) -> EnvState:
    """Equations 11.1 of Sutton and Barto's book (Gymnasium's default, not the paper's)."""
    angle_1, angle_2, speed_1, speed_2 = state
    sin_2, cos_2 = torch.sin(angle_2), torch.cos(angle_2)
    d_1 = MIDDLE**2 + (1.0 + MIDDLE**2 + 2 * MIDDLE * cos_2) + 2 * INERTIA
    d_2 = MIDDLE**2 + MIDDLE * cos_2 + INERTIA
    # The book writes cos(angle - pi / 2), which is sin(angle).
    phi_2 = MIDDLE * GRAVITY * torch.sin(angle_1 + angle_2)
    phi_1 = (
        -MIDDLE * speed_2**2 * sin_2
        - 2 * MIDDLE * speed_2 * speed_1 * sin_2
        + (MIDDLE + 1.0) * GRAVITY * torch.sin(angle_1)
        + phi_2
    )
    change_2 = (torque + d_2 / d_1 * phi_1 - MIDDLE * speed_1**2 * sin_2 - phi_2) / (
        MIDDLE**2 + INERTIA - d_2**2 / d_1
    )
    change_1 = -(d_2 * change_2 + phi_1) / d_1
    return speed_1, speed_2, change_1, change_2


def _wrapped(angle: Tensor) -> Tensor:
    """The same angle in [-pi, pi]."""
    return angle - 2 * math.pi * torch.round(angle / (2 * math.pi))
