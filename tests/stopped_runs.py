"""For tests that stop a run, resume it and compare it with an uninterrupted one."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ml_pipeline.protocols import Callback
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.loop import Loop


class StopAfter(Callback):
    """Interrupts like SIGTERM; 0 iterations means before the first rollout."""

    def __init__(self, n_iterations: int) -> None:
        self.n_iterations = n_iterations

    def on_train_start(self, loop: Loop) -> None:
        if self.n_iterations == 0:
            raise Interrupted(signal.SIGTERM)

    def on_iteration_logged(self, loop: Loop, metrics: Mapping[str, float]) -> None:
        if loop.iteration == self.n_iterations:
            raise Interrupted(signal.SIGTERM)


def checkpoint_numbers(run_dir: Path) -> dict[str, Any]:
    """Every number of the latest checkpoint by its path: weights, Adam, envs, generators."""
    state = load_checkpoint(RunFolder.open(run_dir), LATEST)
    # These identify the run.
    return _numbers({name: part for name, part in state.items() if name not in _SKIPPED}, "")


_SKIPPED = ("config", "env_snapshots")


def _numbers(state: Any, path: str) -> dict[str, Any]:
    if isinstance(state, dict):
        parts = {str(name): part for name, part in state.items()}
    elif isinstance(state, (list, tuple)):
        parts = {str(place): part for place, part in enumerate(state)}
    else:
        return {path: state.tolist() if isinstance(state, torch.Tensor) else state}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        found |= _numbers(part, f"{path}/{name}")
    return found
