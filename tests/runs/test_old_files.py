"""Run folders and exported policies made before modules moved still load.

The files in tests/fixtures/old_runs were written by commit 50db61e. ``NAME.resumed.csv`` is the
metrics.csv that this commit wrote when it resumed the run to 512 env steps.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from reference_runs import machine, read_rows
from test_reference_runs import RECORDED_ON

OLD_RUNS = REPOSITORY / "tests" / "fixtures" / "old_runs"
slow = pytest.mark.slow
RUNS = ["cartpole_memory", pytest.param("cartpole", marks=slow), "torch_cartpole"]


def call(*arguments: str) -> str:
    """The output of a Python command, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_old_run_continues_its_episodes_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    shutil.copytree(OLD_RUNS / name, run)

    output = call("train_ppo.py", f"resume={run}", "total_steps=512", "trust=true")

    assert "resumed at env step 256" in output
    assert "new episodes" not in output
    rows, recorded = read_rows(run / "metrics.csv"), read_rows(OLD_RUNS / f"{name}.resumed.csv")
    assert len(rows) == len(recorded)
    if machine() == RECORDED_ON:
        assert rows == recorded


@slow
@pytest.mark.parametrize(
    ("name", "mean"), [("cartpole", 137.0), ("cartpole_memory", 24.3), ("torch_cartpole", 60.3)]
)
def test_old_run_evaluates_to_the_same_return(name: str, mean: float) -> None:
    run = str(OLD_RUNS / name)

    output = call("-m", "ml_pipeline", "evaluate", run, "--deterministic", "--episodes", "3")

    assert f"mean {mean}" in output


@slow
@pytest.mark.parametrize("file", ["policy.pt2", "policy.onnx", "."])
def test_old_policy_plays(file: str) -> None:
    policy = str(OLD_RUNS / "cartpole" / file)

    output = call("-m", "ml_pipeline", "play", policy, "--episodes", "1")

    assert "seed 0: return" in output


@slow
def test_old_runs_compare(tmp_path: Path) -> None:
    runs = [str(OLD_RUNS / name) for name in ("cartpole", "cartpole_memory")]

    output = call("-m", "ml_pipeline", "compare", *runs, "--report", str(tmp_path))

    assert "fewer than 5 seeds, too few to claim a difference: A, B" in output
