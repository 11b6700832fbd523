"""Replay files: what a checkpoint needs, and what is kept."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Capture, contents, error_line, only_run, read_rows
from stopped_runs import replay_rows

from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.replay import files as replay_files
from ml_pipeline.assembly.run import train
from ml_pipeline.errors import UserError
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    load_checkpoint,
    read_sealed,
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


def files_of(run: Path) -> list[Path]:
    """Those of rows 64 to 80 and 80 to 96; each row has 2 transitions."""
    older, newer = sorted((run / "replay").glob("*.rows"))
    return [older, newer]


def swap(run: Path) -> None:
    older, newer = files_of(run)
    other = run / "other"
    os.replace(older, other)
    os.replace(newer, older)
    os.replace(other, newer)


def flip(run: Path, which: int) -> None:
    path = files_of(run)[which]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "swapped": (swap, "was written under another name"),
    "newest flipped": (lambda run: flip(run, 1), "its checksum does not match"),
    "oldest flipped": (lambda run: flip(run, 0), "its checksum does not match"),
    "cut": (lambda run: os.truncate(files_of(run)[1], 9), "it is truncated or too old"),
    "missing": (lambda run: files_of(run)[1].unlink(), "is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_replay_file_is_named_with_the_way_out_and_changes_nothing(
    name: str, run: Path, capsys: Capture
) -> None:
    damage, message = DAMAGE[name]
    damage(run)
    before = contents(run)

    with pytest.raises(CheckpointError, match=rf"{message}.*; to .*, add salvage=true to resume="):
        train([f"resume={run}", "total_steps=224"])

    assert contents(run) == before
    capsys.readouterr()
    assert main(["replay", str(run)]) == 1
    assert message in error_line(capsys)


# The older file has rows 64 to 80, of which the last is only an observation, the newer one rows
# 80 to 96. Each row has 2 transitions, the buffer 60. The resume adds 32.
@pytest.mark.parametrize(
    ("name", "n_left"),
    [("oldest flipped", 32), ("newest flipped", 30), ("swapped", 0), ("missing", 30)],
)
def test_salvage_drops_what_is_lost_and_keeps_the_rest(
    name: str, n_left: int, run: Path, capsys: Capture
) -> None:
    DAMAGE[name][0](run)

    train([f"resume={run}", "total_steps=224", "salvage=true"])

    assert f"salvage=true: {60 - n_left} of 60 transitions are lost, and {n_left} are kept" in (
        capsys.readouterr().out
    )
    sizes = [int(float(row["replay/size"])) for row in read_rows(run)]
    assert sizes[12:] == [min(n_left + 16, 60), min(n_left + 32, 60)]
    train([f"resume={run}", "total_steps=256"])  # the damaged files are needed no more
    assert main(["replay", str(run)]) == 0


def test_other_checkpoints_stay_usable_beside_a_damaged_replay_file(here: Path) -> None:
    run = train([*DQN, "total_steps=192", "callbacks.checkpoints.keep=2"]).run_dir
    newest = max((run / "replay").glob("80-*"))
    newest.write_bytes(b"")

    with pytest.raises(CheckpointError, match="80-96-"):
        train([f"resume={run}", "total_steps=224"])
    assert train([f"resume={run}/checkpoints/step_160.pt", "total_steps=224"]).env_steps == 224


def test_a_run_folder_cannot_ask_for_salvage(run: Path) -> None:
    flip(run, 0)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("salvage: false", "salvage: true"))

    with pytest.raises(CheckpointError, match="add salvage=true"):
        train([f"resume={run}", "total_steps=224"])


STATES: dict[str, tuple[str, Any]] = {
    "no counter": ("n_steps", None),
    "no updates": ("n_updates", None),
    "no replay": ("replay", 5),
    "no segments": ("replay.segments", None),
    "segment of a number": ("replay.segments", [5, 5]),
    "name of a number": ("replay.segments.0.name", 5),
    "name outside": ("replay.segments.0.name", "../config.yaml"),
    "range of words": ("replay.segments.0.first", "x"),
    "huge range": ("replay.segments.0.last", 10**18),
    "negative counter": ("replay.n_written", -1),
    "no generator": ("noise_generator", torch.zeros(3)),
}
ROWS: dict[str, tuple[str, Any]] = {
    "other name": ("file", torch.zeros(2, 2)),
    "no reward": ("reward", None),
    "other reward": ("reward", torch.zeros(3)),
    "other observation": ("obs ", torch.zeros(32, 3)),
    "words": ("action", "x"),
    "huge final": ("final_at", torch.full((1,), 10**9)),
}


def put(content: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        content = content[int(parent) if isinstance(content, list) else parent]
    content[last] = value


def seal(path: Path, content: Any) -> None:
    data = io.BytesIO()
    torch.save(content, data)
    write_sealed(path, data.getvalue())


@pytest.mark.parametrize("name", [*STATES, *ROWS])
def test_wrong_value_with_a_right_checksum_is_one_line_in_every_command(
    name: str, run: Path, capsys: Capture
) -> None:
    path = run / "checkpoints" / "latest.pt" if name in STATES else files_of(run)[1]
    content = read_sealed(path)
    put(content, *{**STATES, **ROWS}[name])
    seal(path, content)

    with pytest.raises(UserError) as error:
        train([f"resume={run}", "total_steps=224"])
    assert "\n" not in str(error.value)
    capsys.readouterr()
    code = main(["replay", str(run)])
    assert code == 0 or error_line(capsys)  # it does not look at every counter
