"""For tests that stop a run, resume it and compare it with an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TESTS, door_command, read_rows
from torch.utils._pytree import keystr, tree_flatten_with_path

from ml_pipeline.assembly.run import train
from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint
from ml_pipeline.runs.large_files import LargeFiles
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.signals import Interrupted
from ml_pipeline.training.checks import PartError
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


def stopped_run(settings: Sequence[str], ending: str, *, iteration: int = 0) -> Path:
    """Train in the current folder until the run ends in the way of ``own_parts.EndAt``."""
    end = f"+callbacks.end={{_target_: own_parts.EndAt, iteration: {iteration}}}"
    arguments, before = [*settings, end], set(Path.cwd().glob("runs/*/*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENDING", ending)
        if ending == "stop":
            train(arguments)
        elif ending == "kill":
            environment = {**os.environ, "PYTHONPATH": str(TESTS)}
            killed = subprocess.run(door_command(*arguments), env=environment, check=False)
            assert killed.returncode == -signal.SIGKILL
        elif ending == "error":
            with pytest.raises(PartError, match=f"error at iteration {iteration}"):
                train(arguments)
        else:
            with pytest.raises(Interrupted):
                train(arguments)
    (run,) = set(Path.cwd().glob("runs/*/*")) - before
    return run


def assert_same_runs(run: Path, other: Path) -> None:
    """The metrics, every number of the latest checkpoint and the replayed transitions are equal."""
    assert read_rows(run) == read_rows(other)
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert replay_rows(run) == replay_rows(other)


def checkpoint_numbers(run_dir: Path) -> dict[str, Any]:
    """Every number of the latest checkpoint by its path: weights, Adam, envs, generators."""
    state = load_checkpoint(RunFolder.open(run_dir), LATEST)
    for name in ("config", "env_snapshots"):  # these identify the run
        state.pop(name, None)
    state.get("replay", {}).pop("segments", None)  # files have random names
    leaves, _ = tree_flatten_with_path(state)
    return {
        keystr(path): leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves
    }


def replay_rows(run: Path) -> dict[int, Any]:
    """Every row that the latest checkpoint may draw, by its number; empty without replay."""
    checkpoint = load_checkpoint(RunFolder.open(run), LATEST)
    if "replay" not in checkpoint:
        return {}
    state = checkpoint["replay"]
    rows: dict[int, Any] = {}
    for segment in state["segments"]:
        read = LargeFiles(RunFolder(run)).read(segment["name"])
        n_envs = len(read["reward"]) // (segment["last"] - segment["first"])
        finals = dict(zip(read["final_at"].tolist(), read.get("final obs ", ()), strict=False))
        for number in range(segment["first"], segment["last"]):
            at = (number - segment["first"]) * n_envs
            rows[number] = {
                name: values[at : at + n_envs].tolist()
                for name, values in read.items()
                if not name.startswith("final")
            }
            ends = range(at, at + n_envs)
            rows[number]["final"] = [finals[i].tolist() if i in finals else None for i in ends]
    # A file that was saved at a stop may begin before the oldest row that the ring still holds.
    capacity = yaml.safe_load(checkpoint["config"])["agent"]["buffer_size"]
    oldest = state["n_written"] - capacity // state["n_envs"]
    return {number: rows[number] for number in sorted(rows) if number >= oldest}
