"""EverySteps: when something is due that is done every so many env steps, and at the end."""

from __future__ import annotations

from ml_pipeline.config.checks import integer_steps
from ml_pipeline.protocols import Trainer


class EverySteps:
    """Due at the first iteration's end at or beyond each multiple of ``n_steps``, and the last."""

    def __init__(self, key: str, n_steps: float) -> None:
        """``key``: what the config calls it, for the error if it is no whole number of steps."""
        self.n_steps = integer_steps(key, n_steps)
        self._next = self.n_steps

    def begin(self, trainer: Trainer) -> None:
        """Before the first iteration, also of a resumed run, whose earlier ones were done."""
        self._next = (trainer.env_steps // self.n_steps + 1) * self.n_steps

    def is_due(self, trainer: Trainer) -> bool:
        """At the end of an iteration, where it is asked once."""
        if trainer.env_steps < self._next and not trainer.is_last_iteration():
            return False
        self.begin(trainer)
        return True
