"""What several tests share: the door as a user calls it, and a quiet place to call it from."""

from __future__ import annotations

import csv
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent

Door = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    """A shell's ``&`` has SIGINT ignored, and nohup SIGHUP: the tests send both, and mean them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a test that collects garbage need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may be logged in; the tests must not upload anything."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture(autouse=True)
def config_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snapshots of envs are sealed with a key in the user's config folder: not in the real one."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to stand in; runs/ appears here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def door_command(*arguments: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "train_ppo.py"), *arguments]


@pytest.fixture
def door(here: Path) -> Door:
    """``door("n_envs=2")`` runs train_ppo.py to its end, in a process of its own."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            door_command(*arguments),
            cwd=here,
            # Without W&B's own variables: they would lead to this process's W&B service.
            env={**{k: v for k, v in os.environ.items() if "WANDB" not in k}, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )

    return call


def read_rows(run_dir: Path) -> list[dict[str, str]]:
    """metrics.csv without the columns that depend on the clock, the workers and the GPU."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "workers/", "gpu/"))}
        for row in rows
    ]


def only_run(folder: Path) -> Path:
    runs = [path for path in folder.glob("runs/*/*") if path.parent.name != "sweeps"]
    assert len(runs) == 1, runs
    return runs[0]


def small(**more: Any) -> list[str]:
    """Overrides of a run that takes a moment: two iterations of two envs."""
    settings = {
        "n_envs": 2,
        "total_steps": 64,
        "agent.n_steps": 16,
        "agent.n_minibatches": 2,
        "agent.n_epochs": 2,
        "device": "cpu",
        "logger": "none",
        "callbacks.evaluation.n_episodes": 2,
    }
    names = {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in {**settings, **names}.items()]


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> None:
    """Wait until none of these processes runs any more."""
    wait_until(lambda: not any(map(is_running, pids)), seconds)


def wait_until(fact: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that is dead and only waits to be reaped does not."""
    if Path("/proc").exists():
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it is gone, or goes as we look
            return False
        return status.rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def old_python() -> str | None:
    """A Python too old for us that really runs: a version manager leaves stubs that do not."""
    for version in ("3.9", "3.8", "3.7"):
        managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
        for name in (f"python{version}", *map(str, managed)):
            try:
                subprocess.run([name, "-c", ""], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return name
    return None
