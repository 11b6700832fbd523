"""Schedules: the factor of a setting, by the progress of the run from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Callable

from ml_pipeline.errors import UserError, type_and_line
from ml_pipeline.targets import import_dotted

Schedule = Callable[[float], float]

_FACTORS: dict[str, Schedule] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def find_schedule(name: str, *, key: str) -> Schedule:
    """The schedule that ``key`` names: constant, linear, cosine, or a function's dotted path."""
    if name in _FACTORS:
        return _FACTORS[name]
    function = import_dotted(name, key=key)
    try:
        factors = [function(progress) for progress in (0.0, 0.5, 1.0)]
        is_fine = all(math.isfinite(each) and each >= 0 for each in factors)
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{key}={name}: raised {type_and_line(error)}") from error
    if not is_fine:
        raise UserError(
            f"{key}={name}: returned {factors} for the progress 0, 0.5 and 1; "
            "return a factor of at least 0"
        )
    return lambda progress: float(function(progress))
