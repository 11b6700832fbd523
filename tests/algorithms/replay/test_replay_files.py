"""Replay files: what a checkpoint needs, what is kept, and 20 kills that change nothing."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import only_run, read_rows
from stopped_runs import checkpoint_numbers

from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.replay import files as replay_files
from ml_pipeline.assembly.run import train
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
STACK = "{_target_: gymnasium.wrappers.FrameStackObservation, stack_size: 4}"
FRAMES = [
    *("agent=dqn", "env.target=tiny_envs.FramesEnv", f"+env.wrappers.stack={STACK}"),
    *(*COMMON, "agent.n_step=3", "agent.stacked_frames=4"),
]
SAC = ["agent=sac", "env=pendulum", *COMMON]


def replay_rows(run: Path) -> dict[str, Any]:
    """Every row of the latest checkpoint's transitions, in order."""
    state = load_checkpoint(RunFolder.open(run), LATEST)["replay"]
    rows: dict[int, Any] = {}
    for segment in state["segments"]:
        read = read_sealed(run / "replay" / segment["name"])
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
    return {str(number): rows[number] for number in sorted(rows)}


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


def _die_at(call: str, n_calls: int) -> None:
    """SIGKILL this process before its ``n_calls``-th call of os.fsync or os.replace."""
    plain, left = getattr(os, call), [n_calls]

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    setattr(os, call, counted)


def _train_in_process(settings: list[str], death: tuple[str, int] | None) -> None:
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
    if death is not None:
        _die_at(*death)
    train(settings)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize(
    ("settings", "n_kills"),
    [
        pytest.param([*FRAMES, "agent.priority_exponent=0.6", "total_steps=1536"], 20, id="dqn"),
        pytest.param([*SAC, "total_steps=512"], 6, id="sac"),
    ],
)
def test_a_run_killed_many_times_equals_an_unbroken_one(
    here: Path, settings: list[str], n_kills: int
) -> None:
    draw = random.Random(7)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["ml_pipeline.assembly.run", "ml_pipeline.algorithms.dqn.algorithm"]
    )
    now, saved = settings, 0
    repeated, killed_while_saving, n_steps = [], 0, int(settings[-1].split("=")[1])
    for kill in range(n_kills):
        # Every other kill comes from outside, at any moment; the others hit the writing of files.
        call = draw.choice(["fsync", "replace"])
        death = (call, draw.randrange(8, 20)) if kill % 2 else None
        process = context.Process(target=_train_in_process, args=(now, death))
        process.start()
        if death is None:
            _wait_for_a_save(here, saved)
            time.sleep(draw.uniform(0.0, 0.15))
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"kill {kill}"
        run = only_run(here)
        state = load_checkpoint(RunFolder.open(run), LATEST)
        assert state["env_steps"] >= saved
        saved, now = state["env_steps"], [f"resume={run}"]
        repeated.append(int(read_rows(run)[-1]["env_steps"]) - saved)
        killed_while_saving += bool(list(run.rglob("*.tmp")))
    train(now)
    broken = here / "broken"
    (here / "runs").rename(broken)
    whole = train(settings).run_dir
    run = next(broken.glob("*/*"))

    assert max(repeated) <= 32  # the steps between two checkpoints
    assert killed_while_saving >= n_kills // 4
    assert saved < n_steps
    assert read_rows(run) == read_rows(whole)
    ours, theirs = checkpoint_numbers(run), checkpoint_numbers(whole)
    assert [name for name in theirs if ours[name] != theirs[name] and "'name'" not in name] == []
    assert replay_rows(run) == replay_rows(whole)
    assert main(["replay", str(run)]) == 0


def _wait_for_a_save(here: Path, saved: int) -> None:
    """Until a run has saved a later checkpoint."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in here.glob("runs/*/*/checkpoints/latest.pt"):
            state = torch.load(path, weights_only=True)
            if state["env_steps"] > saved:
                return
        time.sleep(0.01)
    raise AssertionError("no new checkpoint")
