"""Checks of what envs return; each error names the env."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import UserError


class TrainingError(UserError):
    """Training cannot continue."""


class BadValueError(UserError):
    """An env returned NaN or infinity, or an observation outside its space."""


class FiniteCheck:
    """Finds NaN and infinity in the observations and rewards of a rollout."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.n_steps = 0  # of each env, in complete rollouts

    def reward(self, reward: NDArray[Any], *, first_env: int, t: int) -> None:
        # One dot product is the cheapest test. If it overflows, the rewards may still be finite.
        if not self.enabled or math.isfinite(reward.dot(reward)):
            return
        for row in np.flatnonzero(~np.isfinite(reward)).tolist():
            raise BadValueError(
                f"env {first_env + row} returned the reward {reward[row]} at {self.when(t + 1)}; "
                "nothing was learned from it"
            )

    def obs(self, leaves: Mapping[str, NDArray[Any]], *, first_env: int, t: int) -> None:
        if not self.enabled:
            return
        for name, leaf in leaves.items():
            if leaf.dtype != np.float32:
                continue
            flat = leaf.reshape(-1)
            if math.isfinite(flat.dot(flat)):
                continue
            for row, *index in np.argwhere(~np.isfinite(leaf)).tolist():
                which = f" {name!r}" if name else ""
                raise BadValueError(
                    f"env {first_env + row} returned an observation{which} that is not finite at "
                    f"{self.when(t)}: entry {index} is {leaf[row][tuple(index)]}; nothing was "
                    "learned from it"
                )

    def when(self, t: int) -> str:
        return f"its step {self.n_steps + t:,} (step {t} of this rollout)"


def plain_number(name: str, value: Any) -> int | float:
    """A metric as a plain number: callbacks may add NumPy or torch scalars."""
    try:
        number: int | float = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"metric {name}={value!r}: must be a number") from error
    return number
