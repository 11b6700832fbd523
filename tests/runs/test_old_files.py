"""Run folders and exported policies made before modules moved still load.

The files in tests/fixtures/old_runs were written by commit 50db61e, and those of sac_pendulum by
3b2ecd9, the last one with SAC's log-probabilities in the units of the env. ``NAME.resumed.csv`` is
the metrics.csv that this commit wrote when it resumed the run to 512 env steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture, read_rows
from reference_runs import machine
from test_reference_runs import RECORDED_ON

from ml_pipeline.__main__ import main
from ml_pipeline.assembly.run import train

OLD_RUNS = REPOSITORY / "tests" / "fixtures" / "old_runs"
RUNS = ["cartpole_memory", "cartpole", "torch_cartpole", "sac_pendulum"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RUNS)
def test_old_run_continues_its_episodes_with_the_same_numbers(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / name
    shutil.copytree(OLD_RUNS / name, run)

    train([f"resume={run}", "total_steps=512", "trust=true"])

    output = capsys.readouterr().out
    assert "resumed at env step 256" in output
    assert "new episodes" not in output
    rows, recorded = read_rows(run), read_rows(OLD_RUNS / f"{name}.resumed.csv")
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
def test_old_run_or_policy_works_as_before(
    arguments: str, words: str, here: Path, capsys: Capture
) -> None:
    assert main([each.format(old=OLD_RUNS, here=here) for each in arguments.split()]) == 0

    assert words in capsys.readouterr().out
