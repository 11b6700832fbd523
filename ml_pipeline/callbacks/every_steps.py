"""EverySteps: the base of callbacks that act every ``n_steps`` env steps and at the end."""

from __future__ import annotations

from ml_pipeline.config.checks import integer_steps
from ml_pipeline.training.contracts import Callback, RunningLoop


class EverySteps(Callback):
    """Due at the first iteration end at or after each multiple of ``n_steps``, and at the last.

    A subclass calls ``is_due`` once per iteration.
    """

    def __init__(self, key: str, n_steps: float) -> None:
        """``key`` is the config key of ``n_steps``; an error names it."""
        self.n_steps = integer_steps(key, n_steps)
        self._next = self.n_steps

    def on_train_start(self, loop: RunningLoop) -> None:
        """Skip the multiples that a resumed run has already passed."""
        self._next = (loop.env_steps // self.n_steps + 1) * self.n_steps

    def is_due(self, loop: RunningLoop) -> bool:
        if loop.env_steps < self._next and not loop.is_last_iteration():
            return False
        self._next = (loop.env_steps // self.n_steps + 1) * self.n_steps
        return True
