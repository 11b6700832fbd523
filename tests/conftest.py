"""Fixtures and helpers that several test files share."""

from __future__ import annotations

import csv
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent

Door = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    """Undo the ignored signals of ``&`` (SIGINT) and nohup (SIGHUP): tests send both."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which some tests trigger often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the developer's W&B login: tests must not upload anything."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture(autouse=True, scope="session")
def user_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    """The key that signs files in all tests: some of them share what they sign."""
    key, folder = os.urandom(32), tmp_path_factory.mktemp("session_config")
    _write_key(folder, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield key


@pytest.fixture(autouse=True)
def config_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, user_key: bytes
) -> Path:
    """Use a new config folder, which holds only the key."""
    folder = tmp_path_factory.mktemp("config")
    _write_key(folder, user_key)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


def _write_key(config_home: Path, key: bytes) -> None:
    path = config_home / "ml_pipeline" / "snapshot.key"
    path.parent.mkdir()
    path.touch(0o600)
    path.write_bytes(key)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory; runs/ appears here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def door_command(*arguments: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "train_ppo.py"), *arguments]


@pytest.fixture
def door(here: Path) -> Door:
    """``door("n_envs=2")`` runs train_ppo.py in a new process and waits for it."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            door_command(*arguments),
            cwd=here,
            # W&B's own variables lead to the W&B service of this process.
            env={**{k: v for k, v in os.environ.items() if "WANDB" not in k}, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )

    return call


def read_rows(run_dir: Path) -> list[dict[str, str]]:
    """metrics.csv without the columns that measure the machine."""
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
    """Overrides of a short run: two iterations of two envs; ``a__b`` sets the key a.b."""
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
    """Wait until all these processes have ended."""
    wait_until(lambda: not any(map(is_running, pids)), seconds)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another process to make a condition true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} seconds"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    if Path("/proc").exists():
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended, perhaps just now
            return False
        return status.rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def old_python() -> str | None:
    """A Python below 3.10 that works; pyenv leaves stubs that do not."""
    for version in ("3.9", "3.8", "3.7"):
        managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
        for name in (f"python{version}", *map(str, managed)):
            try:
                subprocess.run([name, "-c", ""], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return name
    return None
