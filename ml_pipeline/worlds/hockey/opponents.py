"""Scripted hockey players: "weak" and "strong", which is also called "basic".

They chase a puck that comes closer, fall back to their goal otherwise, and shoot soon after they
catch it. Rules and gains follow the BasicOpponent of the hockey-env package. That one swings its
racket by a phase that it keeps. These have no state: angle and speed of the racket tell its phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.hockey.physics import BACK_LIMIT, MAX_ANGLE, Maths, Number, Numbers

STRENGTH = {"weak": 0.5, "strong": 10.0, "basic": 10.0}  # proportional gain of the controller
EITHER = "either"  # weak or strong, drawn for each episode
_DAMPING = 0.5
_BRAKE_SECONDS = 0.1
# Radians per second of a swing, and how far ahead of its phase a strong and a weak controller aim.
# With these, angles and rhythm are close to those of the package's player.
_SWING_RATE, _STRONG_LEAD, _WEAK_LEAD = 2.5, 0.5, 1.5
_SHOOT_BELOW = 7.0  # steps left to keep the puck


def scripted_action(m: Maths, view: Numbers, strength: float) -> Numbers:
    """The action for the 18 numbers that a player observes: floats, arrays [n] or tensors [n].

    ``m`` has where, clip and sqrt for them: ``FLOATS``, numpy or torch.
    """
    x, y, angle, vx, vy, omega = (view[i] for i in range(6))
    puck_x, puck_y, puck_vx, puck_vy, keep = (view[i] for i in range(12, 17))
    comes = puck_vx < 0.5
    distance = m.sqrt((x - puck_x) * (x - puck_x) + (y - puck_y) * (y - puck_y))
    chases = comes & (x < puck_x) & (abs(y - puck_y) < 0.5)
    aim_x = m.where(chases, puck_x + 0.2, -BACK_LIMIT)
    aim_y = m.where(chases, puck_y + puck_vy * distance * 0.1, m.where(comes, puck_y, 0.0))
    aim_angle = _next_angle(m, angle, m.where(omega != 0.0, omega / _SWING_RATE, puck_y), strength)
    shoots = m.where((keep > 0.0) & (keep < _SHOOT_BELOW), 1.0, 0.0)
    return (
        _control(m, aim_x - x, vx, strength, _BRAKE_SECONDS),
        _control(m, aim_y - y, vy, strength / 5, _BRAKE_SECONDS),
        _control(m, aim_angle - angle, omega, strength / 2, 10 * _BRAKE_SECONDS),
        shoots,
    )


def _next_angle(m: Maths, angle: Number, speed: Number, strength: float) -> Number:
    """Where a racket that swings as MAX_ANGLE * sin(phase) will be after the lead.

    ``speed`` is that of the angle per radian of phase.
    """
    lead = _STRONG_LEAD if strength > 1.0 else _WEAK_LEAD
    radius = m.sqrt(angle * angle + speed * speed) + 1e-6
    return MAX_ANGLE * (math.cos(lead) * angle + math.sin(lead) * speed) / radius


def _control(m: Maths, error: Number, speed: Number, gain: float, brake_seconds: float) -> Number:
    """A PD controller that damps only shortly before it arrives."""
    arrives = abs(error) < brake_seconds * abs(speed + 0.01)
    return m.clip(error * gain - m.where(arrives, _DAMPING * speed, 0.0), -1.0, 1.0)


def drawn_opponent(random: np.random.Generator) -> str:
    """weak or strong, equally likely."""
    return ("weak", "strong")[int(random.integers(2))]


class ScriptedPlayer:
    """A policy without state or random numbers, for batches of observations."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def act_batch(
        self, obs: NDArray[np.float32], deterministic: bool = True
    ) -> NDArray[np.float32]:
        """Actions [n, 4] for observations [n, 18]."""
        columns = np.asarray(obs, dtype=np.float32).T
        return np.stack(scripted_action(np, columns, self.strength), axis=1).astype(np.float32)


SCRIPTED: Mapping[str, Callable[[], ScriptedPlayer]] = {
    name: partial(ScriptedPlayer, strength) for name, strength in STRENGTH.items()
}
