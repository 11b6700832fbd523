"""Checkpoints: the latest state of a run, and the best by evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ml_pipeline.config import whole_steps
from ml_pipeline.protocols import Callback, State, Trainer
from ml_pipeline.runs.checkpoint import BEST, LATEST, save_checkpoint
from ml_pipeline.runs.run_folder import RunFolder


class Checkpoints(Callback):
    """Saves ``latest`` every ``every_steps`` and at the end, ``best`` whenever it is beaten."""

    def __init__(self, run: RunFolder, every_steps: float = 10_000) -> None:
        self.run = run
        self.every_steps = whole_steps("every_steps", every_steps)
        self.best_return = -math.inf
        self._next = self.every_steps

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        score = metrics.get("eval/episode_return")
        is_best = score is not None and score > self.best_return
        is_due = trainer.env_steps >= self._next or trainer.is_last_iteration()
        if is_best:
            self.best_return = float(metrics["eval/episode_return"])
        if is_due:
            self._next = (trainer.env_steps // self.every_steps + 1) * self.every_steps
        if is_best:
            save_checkpoint(self.run, BEST, trainer.state_dict())
        if is_due:
            save_checkpoint(self.run, LATEST, trainer.state_dict())

    def state_dict(self) -> State:
        return {"best_return": self.best_return, "next": self._next}

    def load_state_dict(self, state: State) -> None:
        self.best_return = state["best_return"]
        self._next = state["next"]
