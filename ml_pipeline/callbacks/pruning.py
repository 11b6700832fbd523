"""Pruning: a run that does worse than others did at the same point is not trained to its end."""

from __future__ import annotations

from typing import Any, Protocol

from ml_pipeline.config.checks import integer_steps
from ml_pipeline.protocols import Callback, Metrics, Trainer

METRIC = "eval/episode_return"


class PrunableTrial(Protocol):
    """What is asked of a trial; Optuna's has it."""

    def report(self, value: float, step: int) -> None: ...

    def should_prune(self) -> bool: ...

    def set_user_attr(self, key: str, value: Any) -> None: ...


class Pruning(Callback):
    """Tells ``trial`` of each evaluation and stops the run where the trial says so.

    Trials differ in the size of their rollouts, so no two are evaluated at the same env step;
    they are compared by how many times ``every_steps`` they have behind them. Not a callback to
    be named in a config: it needs the trial of a study.
    """

    def __init__(self, trial: PrunableTrial, *, every_steps: float, reported: set[int]) -> None:
        """``reported`` are the points that a resumed run has told already."""
        self._trial = trial
        self._every_steps = integer_steps("every_steps", every_steps)
        self._reported = set(reported)

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        # Not in on_iteration_logged: the last checkpoint is saved there, and this may be the last.
        point = trainer.env_steps // self._every_steps
        if METRIC not in metrics or trainer.is_last_iteration():
            return
        if point not in self._reported:
            self._trial.report(metrics[METRIC], point)
            self._reported.add(point)
        if self._trial.should_prune():
            # Noted before the run ends: whoever takes up a killed trial must know.
            self._trial.set_user_attr("pruned", True)
            trainer.request_stop(f"pruned with {METRIC} {metrics[METRIC]:.1f}")
