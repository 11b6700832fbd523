"""Pruning: stops a trial early if it does worse than other trials did at the same point."""

from __future__ import annotations

from typing import Protocol

from ml_pipeline.config.checks import integer_steps
from ml_pipeline.metrics import EVAL_RETURN, shown_return
from ml_pipeline.records import Metrics
from ml_pipeline.training.contracts import Callback, RunningLoop


class PrunableTrial(Protocol):
    """The part of an Optuna trial that pruning uses."""

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool: ...

    def set_user_attr(self, key: str, value: object) -> None: ...


class Pruning(Callback):
    """Reports each evaluation to ``trial`` and stops the run if the trial should be pruned.

    Trials have rollouts of different sizes, so they evaluate at different env steps. They are
    compared by the number of ``every_steps`` intervals that they have completed. A config cannot
    name this callback: it needs the trial of a study.
    """

    def __init__(
        self,
        trial: PrunableTrial,
        *,
        every_steps: float,
        reported: set[int],
        metric: str = EVAL_RETURN,
    ) -> None:
        """``reported`` holds the intervals that the run reported before it was resumed."""
        self._trial = trial
        self._metric = metric
        self._every_steps = integer_steps("every_steps", every_steps)
        self._reported = set(reported)

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        # Not in on_iteration_logged: a stop must be known before the last checkpoint is saved.
        value = metrics.get(self._metric)
        if value is None or loop.is_last_iteration():
            return
        point = loop.env_steps // self._every_steps
        if point not in self._reported:
            self._trial.report(value, point)
            self._reported.add(point)
        if self._trial.should_prune():
            # Before the run ends, so that a process that continues a killed trial knows.
            self._trial.set_user_attr("pruned", True)
            loop.request_stop(f"pruned with {self._metric} {shown_return(value)}")
