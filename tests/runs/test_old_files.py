"""Run folders and exported policies made before modules moved still load.

The files in tests/fixtures/old_runs were written by commit 50db61e. ``NAME.resumed.csv`` is the
metrics.csv that this commit wrote when it resumed the run to 512 env steps.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, call
from reference_runs import machine, read_rows
from test_reference_runs import RECORDED_ON

OLD_RUNS = REPOSITORY / "tests" / "fixtures" / "old_runs"
RUNS = ["cartpole_memory", "cartpole", "torch_cartpole"]
pytestmark = pytest.mark.slow


def output_of(*arguments: str) -> str:
    """The output of a Python command, which must succeed."""
    done = call(sys.executable, *arguments, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_old_run_continues_its_episodes_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    shutil.copytree(OLD_RUNS / name, run)

    output = output_of("train_ppo.py", f"resume={run}", "total_steps=512", "trust=true")

    assert "resumed at env step 256" in output
    assert "new episodes" not in output
    rows, recorded = read_rows(run / "metrics.csv"), read_rows(OLD_RUNS / f"{name}.resumed.csv")
    assert len(rows) == len(recorded)
    if machine() == RECORDED_ON:
        assert rows == recorded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("evaluate {old}/cartpole --deterministic --episodes 3", "mean 137.0"),
        ("evaluate {old}/cartpole_memory --deterministic --episodes 3", "mean 24.3"),
        ("evaluate {old}/torch_cartpole --deterministic --episodes 3", "mean 60.3"),
        ("play {old}/cartpole/policy.pt2 --episodes 1 --trust", "seed 0: return"),
        ("play {old}/cartpole/policy.onnx --episodes 1", "seed 0: return"),
        ("play {old}/cartpole --episodes 1", "seed 0: return"),
        ("compare {old}/cartpole {old}/cartpole_memory --report {here}", "fewer than 5 seeds"),
    ],
)
def test_old_run_or_policy_works_as_before(arguments: str, words: str, here: Path) -> None:
    command = [each.format(old=OLD_RUNS, here=here) for each in arguments.split()]

    assert words in output_of("-m", "ml_pipeline", *command)
