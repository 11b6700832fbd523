"""Checkpoints: the latest state of a run, and the best by evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ml_pipeline.callbacks.every_steps import EverySteps
from ml_pipeline.protocols import Callback, StateDict, Trainer
from ml_pipeline.runs.checkpoint import BEST, save_checkpoint
from ml_pipeline.runs.resuming import save_latest
from ml_pipeline.runs.run_folder import RunFolder


class Checkpoints(Callback):
    """Saves ``latest`` every ``every_steps`` and at the end, ``best`` whenever it is beaten."""

    def __init__(self, run: RunFolder, every_steps: float = 10_000) -> None:
        self.run = run
        self._every = EverySteps("every_steps", every_steps)
        self.best_return = -math.inf

    def on_train_start(self, trainer: Trainer) -> None:
        self._every.begin(trainer)

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        score = metrics.get("eval/episode_return", -math.inf)
        if score > self.best_return:
            self.best_return = score
            save_checkpoint(self.run, BEST, trainer.state_dict())
        if self._every.is_due(trainer):
            save_latest(self.run, trainer)

    def state_dict(self) -> StateDict:
        return {"best_return": self.best_return}

    def load_state_dict(self, state: StateDict) -> None:
        self.best_return = state["best_return"]
