"""Reward terms of hockey, for ``RewardShaping``; they read the 18 numbers that a player observes.

Own x, y, angle, vx, vy and omega; the same six of the other player; x, y, vx and vy of the puck;
how long each player may still keep the puck. Every player sees itself attack to the right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Obs = NDArray[np.float32]

_PLAYER, _PUCK, _PUCK_VX, _OWN_KEEP = slice(0, 2), slice(12, 14), 14, 16
_RINK_LENGTH = 10.0  # metres, walls included
_FAST_PUCK = 25.0  # m/s; above, the puck slows down quickly


def closeness(obs: Obs) -> float:
    """A potential: 0 at the puck, -1 at a distance of 10 metres."""
    return -float(np.hypot(*(obs[_PLAYER] - obs[_PUCK]))) / _RINK_LENGTH


def touch(obs: Obs, action: object, next_obs: Obs, info: object) -> float:
    """A plain term: 1 in the step in which the player gets hold of the puck."""
    return float(obs[_OWN_KEEP] <= 0.0 < next_obs[_OWN_KEEP])


def direction(obs: Obs, action: object, next_obs: Obs, info: object) -> float:
    """A plain term: the speed of the puck towards the other goal, between -1 and 1."""
    return float(np.clip(next_obs[_PUCK_VX] / _FAST_PUCK, -1.0, 1.0))
