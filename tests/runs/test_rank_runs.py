"""Runs of several ranks: stop signals, exact resume, and ranks that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_runs import torchrun
from stopped_runs import checkpoint_numbers

TRAIN = str(Path(__file__).parents[2] / "train_ppo.py")
OPTIONS = [
    "env=pendulum",
    "n_envs=4",
    "device=cpu",
    "logger=[]",
    "~callbacks.evaluation",
    "agent.n_steps=32",
    "agent.normalize_obs=true",
    "agent.scale_reward=true",
    "callbacks.checkpoints.every_steps=512",
]


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return torchrun(2, TRAIN, *OPTIONS, f"run_root={folder}", *overrides)


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def run_folder(root: Path) -> Path:
    (found,) = root.glob("*/*")
    return found


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=100)
    return output


@pytest.mark.slow
def test_stopped_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    size = "total_steps=7680"  # 30 iterations
    complete = ended(start(tmp_path / "complete", "vec_env=serial", size))
    stopped = start(tmp_path / "stopped", "vec_env=serial", size)
    read_until(stopped, "iteration 1 ")
    stopped.send_signal(signal.SIGTERM)
    stopped_output = ended(stopped)
    run = run_folder(tmp_path / "stopped")

    resumed = ended(torchrun(2, TRAIN, f"resume={run}"))

    assert "finished at env step 7,680 of 7,680" in complete
    assert "stopped by SIGTERM" in stopped_output
    assert "in the middle of its episodes" in resumed
    assert checkpoint_numbers(run) == checkpoint_numbers(run_folder(tmp_path / "complete"))


@pytest.mark.slow
def test_another_number_of_ranks_resumes_with_new_episodes(tmp_path: Path) -> None:
    ended(start(tmp_path, "vec_env=serial", "total_steps=512"))
    run = run_folder(tmp_path)

    command = [sys.executable, TRAIN, f"resume={run}", "total_steps=1024"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert "with new episodes: 2 ranks saved them, this run has 1" in resumed.stdout
    assert "finished at env step 1,024 of 1,024" in resumed.stdout
    assert checkpoint_numbers(run)["['agent']['model']['preprocess.moments.0.count']"] == 1024
