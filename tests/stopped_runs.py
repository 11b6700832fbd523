"""For tests that stop a run, resume it and compare it with an uninterrupted one."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.contracts import Callback
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
    for name in ("config", "env_snapshots"):  # these identify the run
        state.pop(name, None)
    leaves, _ = tree_flatten_with_path(state)
    return {
        keystr(path): leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves
    }
