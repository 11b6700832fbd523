"""Mirror images of three envs, for ``symmetric_loss``: left and right change places."""

from __future__ import annotations

from torch import Tensor


def _flipped(obs: Tensor, *signs: float) -> Tensor:
    return obs * obs.new_tensor(signs)


def cartpole_obs(obs: Tensor) -> Tensor:
    return -obs


def cartpole_action(action: Tensor) -> Tensor:
    return 1 - action


def pendulum_obs(obs: Tensor) -> Tensor:
    """cos, sin and speed of the angle."""
    return _flipped(obs, 1, -1, -1)


def pendulum_action(action: Tensor) -> Tensor:
    return -action


def acrobot_obs(obs: Tensor) -> Tensor:
    """cos and sin of both angles, then their speeds."""
    return _flipped(obs, 1, -1, 1, -1, -1, -1)


def acrobot_action(action: Tensor) -> Tensor:
    """Torque -1, 0 or 1."""
    return 2 - action
