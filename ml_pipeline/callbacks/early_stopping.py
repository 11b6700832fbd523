"""EarlyStopping: ends a run once a metric is good enough, or no longer improves."""

from __future__ import annotations

import math

from ml_pipeline.config.checks import check, integer_steps
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.runs.console import say
from ml_pipeline.training.contracts import Callback, RunningLoop


class EarlyStopping(Callback):
    """Stops at ``threshold``, or after ``patience`` values in a row without a new best.

    Only iterations that have the metric count. It must come after the callback that adds the
    metric. The best value and the count survive a resume, unless ``metric`` or ``mode`` changes.
    """

    def __init__(
        self,
        metric: str | None = None,
        threshold: float | None = None,
        patience: int | None = 10,
        mode: str = "max",
        best_metric: str = EVAL_RETURN,
    ) -> None:
        """``metric`` None: ``best_metric`` of the run. ``mode``: max or min is better."""
        check(mode in ("max", "min"), "mode", "max | min", mode)
        if threshold is None and patience is None:
            raise ValueError("patience=null: must be a number if threshold is null too")
        if patience is not None:
            patience = integer_steps("patience", patience)
        self.metric = metric or best_metric
        self.threshold = threshold
        self.patience = patience
        self.mode = mode
        self.best: float | None = None  # None: no value yet
        self.n_waited = 0

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        # Not in on_iteration_logged: a stop must be known before the last checkpoint is saved.
        if self.metric not in metrics:
            return
        value = float(metrics[self.metric])
        if not math.isnan(value) and (self.best is None or self._is_better(value, self.best)):
            self.best, self.n_waited = value, 0
        else:
            self.n_waited += 1
        if self.threshold is not None and self._reaches(value, self.threshold):
            loop.request_stop(f"{self.metric} {value:g} reached {self.threshold:g}")
        elif self.patience is not None and self.n_waited >= self.patience:
            best = "none" if self.best is None else f"{self.best:g}"
            loop.request_stop(
                f"{self.metric} did not improve in {self.patience} values (best {best})"
            )

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.mode == "max" else value < other

    def _reaches(self, value: float, threshold: float) -> bool:
        return value == threshold or self._is_better(value, threshold)

    def on_train_end(self, loop: RunningLoop) -> None:
        if self.best is None:
            say(f"early stopping: no iteration logged {self.metric}")

    def state_dict(self) -> StateDict:
        which = {"metric": self.metric, "mode": self.mode}
        return {**which, "best": self.best, "n_waited": self.n_waited}

    def load_state_dict(self, state: StateDict) -> None:
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.best, self.n_waited = state["best"], state["n_waited"]
