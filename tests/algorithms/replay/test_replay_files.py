"""Replay files: what a checkpoint needs, and what is kept."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from conftest import only_run, read_rows
from stopped_runs import replay_rows

from ml_pipeline.algorithms.replay import files as replay_files
from ml_pipeline.assembly.run import train
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    load_checkpoint,
    write_sealed,
)
from ml_pipeline.runs.run_folder import RunFolder

COMMON = [
    *("n_envs=2", "vec_env=serial", "device=cpu", "logger=none", "network.hidden_sizes=[8]"),
    *("agent.buffer_size=60", "agent.learning_starts=32", "agent.batch_size=4"),
    *("agent.iteration_length=8", "~callbacks.evaluation", "callbacks.checkpoints.every_steps=32"),
]
DQN = ["agent=dqn", "env=cartpole", *COMMON, "agent.n_step=3"]


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 192 env steps; copied, never changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train([*DQN, "total_steps=192"])
    return folder


@pytest.fixture
def run(_trained: Path, here: Path) -> Path:
    shutil.copytree(_trained / "runs", here / "runs")
    return only_run(here)


# The files hold rows 64 to 96, of which 66 to 96 were in the buffer; the run adds 8 rows.
@pytest.mark.parametrize(
    ("size", "expected", "exponent"), [(40, 40, 0.0), (100, 2 * (32 + 8), 0.0), (100, 80, 0.6)]
)
def test_a_resumed_run_may_have_another_buffer(
    run: Path, size: int, expected: int, exponent: float
) -> None:
    changes = [f"agent.buffer_size={size}", f"agent.priority_exponent={exponent}"]

    train([*DQN, f"resume={run}", "total_steps=208", *changes])

    sizes = [float(row["replay/size"]) for row in read_rows(run)]
    assert sizes[11:] == [60, expected]
    priorities = load_checkpoint(RunFolder.open(run), LATEST)["replay"]["priorities"]
    assert exponent == 0.0 or priorities.count_nonzero() == expected


def test_a_checkpoint_without_its_newest_transitions_is_refused(run: Path) -> None:
    state = load_checkpoint(RunFolder.open(run), LATEST)
    state["replay"]["segments"] = state["replay"]["segments"][:-1]
    name = RunFolder.open(run).checkpoints / "best.pt"
    content = io.BytesIO()
    torch.save(state, content)
    write_sealed(name, content.getvalue())

    with pytest.raises(CheckpointError, match="saved without its newest transitions; resume from"):
        train([f"resume={name}", "total_steps=256"])


def test_a_large_save_is_split_into_files(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_files, "_FILE_BYTES", 400)  # a few rows
    split = train([*DQN, "total_steps=192"]).run_dir

    assert len(list((split / "replay").iterdir())) > 2 * len(list((run / "replay").iterdir()))
    ours, theirs = replay_rows(split), replay_rows(run)
    assert all(theirs[number] == row for number, row in ours.items())
    assert len(ours) >= 30


def test_a_resume_removes_unfinished_files(run: Path) -> None:
    litter = run / "replay" / ".90-96-0123.rows.0123.tmp"
    orphan = run / "replay" / "96-104-01234567.rows"
    litter.touch()
    orphan.touch()

    train([f"resume={run}", "total_steps=224"])

    assert not litter.exists()
    assert not orphan.exists()
