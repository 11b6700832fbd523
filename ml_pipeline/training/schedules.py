"""annealed: a setting that changes with the progress of the run."""

from __future__ import annotations

import math


def annealed(value: float, schedule: str, progress: float) -> float:
    """``value`` at ``progress`` (0 to 1) through the run: constant, or annealed to zero."""
    if schedule == "linear":
        return value * (1.0 - progress)
    if schedule == "cosine":
        return value * 0.5 * (1.0 + math.cos(math.pi * progress))
    return value
