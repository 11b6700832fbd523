"""Checkpoints: saves the latest state of a run, and the best one by ``best_metric``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.config.checks import check
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import BEST, save_checkpoint
from ml_pipeline.runs.console import say
from ml_pipeline.runs.resuming import save_latest
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.contracts import RunningLoop


class Checkpoints(EverySteps):
    """Saves ``latest`` every ``every_steps`` and at the end, ``best`` on each new maximum.

    ``keep``: also save each ``latest`` as step_<env steps>, and keep the last ``keep`` of these.
    """

    def __init__(
        self,
        run: RunFolder,
        every_steps: float = 10_000,
        keep: int = 0,
        best_metric: str = EVAL_RETURN,
    ) -> None:
        super().__init__("every_steps", every_steps)
        check(type(keep) is int and keep >= 0, "keep", "an integer of at least 0", keep)
        self.run = run
        self.keep = keep
        self.best_metric = best_metric
        self.best_value = -math.inf

    def on_iteration_logged(self, loop: RunningLoop, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.best_metric, -math.inf)
        if value > self.best_value:
            self.best_value = value
            save_checkpoint(self.run, BEST, loop.state_dict())
        if self.is_due(loop):
            save_latest(self.run, loop, keep=self.keep)

    def on_train_end(self, loop: RunningLoop) -> None:
        # A run without evaluation intends to have no best checkpoint; another metric may be a typo.
        if self.best_value == -math.inf and self.best_metric != EVAL_RETURN:
            say(f"best_metric={self.best_metric}: no iteration logged it, so best.pt was not saved")

    def state_dict(self) -> StateDict:
        return {"best_return": self.best_value, "best_metric": self.best_metric}

    def load_state_dict(self, state: StateDict) -> None:
        # The maximum of another metric is not comparable.
        if state.get("best_metric", EVAL_RETURN) == self.best_metric:
            self.best_value = state["best_return"]
