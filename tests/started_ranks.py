"""Starts ``train_ppo.py`` on two ranks and finds their processes, for tests of faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from rank_runs import torchrun

TRAIN = str(REPOSITORY / "train_ppo.py")
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
SIZE = "total_steps=3840"  # 15 iterations


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
    output, _ = process.communicate(timeout=180)
    return output


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    direct = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, direct) for each in (child, *children(child))]


def rank_pid(launcher: int, rank: int) -> int:
    """The process of a rank: the child of torchrun with this RANK."""
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process has rank {rank}")


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
