"""Errors of a training, and the check of a metric."""

from __future__ import annotations

from typing import Any

from ml_pipeline.errors import UserError


class TrainingError(UserError):
    """Training cannot continue."""


class NonFiniteError(TrainingError):
    """A loss or a gradient is NaN or infinity."""


class PartError(UserError):
    """A callback, a loss, a network or another part of the user raised during a run."""


class BadValueError(UserError):
    """An env returned NaN or infinity, or an observation outside its space."""


def plain_number(name: str, value: Any) -> int | float:
    """A metric as a plain number: callbacks may add NumPy or torch scalars."""
    try:
        number: int | float = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"metric {name}={value!r}: must be a number") from error
    return number
