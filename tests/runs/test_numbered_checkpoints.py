"""Numbered checkpoints: how many stay, and how a resume or an evaluation names one."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Capture, only_run, read_rows, small

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import load_agent, train
from ml_pipeline.runs.checkpoint import CheckpointError, load_checkpoint, numbered_steps
from ml_pipeline.runs.run_folder import RunFolder

KEEPING = [
    *small(total_steps=32 * 5, callbacks__checkpoints__every_steps=32),
    "vec_env=serial",
    "callbacks.checkpoints.keep=3",
]


def files(run: Path, kind: str) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob(f"*.{kind}"))


@pytest.fixture
def run(here: Path) -> Path:
    return train(KEEPING).run_dir


def test_the_last_checkpoints_stay_with_their_envs(run: Path) -> None:
    assert files(run, "pt") == ["best.pt", "latest.pt", "step_128.pt", "step_160.pt", "step_96.pt"]
    tokens = [
        load_checkpoint(RunFolder.open(run), f"step_{step}")["env_snapshots"]
        for step in (96, 128, 160)
    ]
    assert files(run, "envs") == sorted(f"{token}.envs" for token in tokens)


def test_resume_from_a_numbered_checkpoint_repeats_the_run_bit_for_bit(
    run: Path, capsys: Capture
) -> None:
    rows = read_rows(run)

    train([f"resume={run}/checkpoints/step_96.pt"])

    assert "resumed at env step 96 in the middle of its episodes" in capsys.readouterr().out
    assert read_rows(run) == rows
    assert numbered_steps(RunFolder.open(run)) == [96, 128, 160]
    assert len(files(run, "envs")) == 3


@pytest.mark.slow
def test_checkpoints_of_replaced_iterations_are_removed(run: Path) -> None:
    train([f"resume={run}/checkpoints/step_96.pt", "total_steps=128"])

    assert numbered_steps(RunFolder.open(run)) == [96, 128]
    assert load_checkpoint(RunFolder.open(run), "latest")["env_steps"] == 128
    assert len(files(run, "envs")) == 2


def test_checkpoints_are_removed_only_after_the_next_one_is_complete(run: Path) -> None:
    (run / "checkpoints" / "step_192.pt").mkdir()  # so it cannot be saved

    with pytest.raises(CheckpointError, match=r"could not save .*step_192\.pt"):
        train([f"resume={run}", "total_steps=192"])

    assert numbered_steps(RunFolder.open(run)) == [96, 128, 160, 192]
    for step in (96, 128, 160):
        assert load_agent(run, f"step_{step}").env_steps == step


def test_evaluate_names_a_checkpoint_by_name_or_path(run: Path, capsys: Capture) -> None:
    capsys.readouterr()
    by_name = ["evaluate", str(run), "--checkpoint", "step_128", "--episodes", "1"]
    by_path = ["evaluate", str(run / "checkpoints" / "step_128.pt"), "--episodes", "1"]

    assert [main(arguments) for arguments in (by_name, by_path)] == [0, 0]

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("CartPole-v1, checkpoint step_128 of env step 128")
    assert lines[:2] == lines[2:]
    assert main(["play", by_path[1], "--episodes", "1"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--checkpoint", "step_32"]) == 1
    expected = f"{run} has no checkpoint step_32; it has best, latest, step_128, step_160, step_96"
    assert capsys.readouterr().err == f"{expected}\n"


def test_without_keep_no_checkpoint_is_numbered(finished_run: Path, here: Path) -> None:
    assert files(only_run(here), "pt") == ["best.pt", "latest.pt"]


@pytest.mark.parametrize("keep", ["-1", "1.5", "true"])
def test_keep_must_be_a_count(keep: str, here: Path) -> None:
    with pytest.raises(Exception, match=r"callbacks\.checkpoints\.keep=.*: must be an integer"):
        train([*small(), f"callbacks.checkpoints.keep={keep}"])


@pytest.mark.slow
def test_numbered_checkpoints_keep_their_transitions(here: Path) -> None:
    settings = [
        *("agent=dqn", "env=cartpole", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"),
        *("agent.buffer_size=40", "agent.learning_starts=16", "agent.batch_size=4"),
        *("agent.iteration_length=8", "network.hidden_sizes=[8]", "~callbacks.evaluation"),
        *("total_steps=192", "callbacks.checkpoints.every_steps=16"),
        "callbacks.checkpoints.keep=4",
    ]
    run = train(settings).run_dir
    rows = read_rows(run)

    train([f"resume={run}/checkpoints/step_144.pt"])

    assert read_rows(run) == rows
    named = set()
    for name in ("latest", "step_144", "step_160", "step_176", "step_192"):
        state = load_checkpoint(RunFolder.open(run), name)
        named |= {segment["name"] for segment in state["replay"]["segments"]}
    assert {path.name for path in (run / "replay").iterdir()} == named
