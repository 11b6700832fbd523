"""Fixtures and helpers that several test files share."""

from __future__ import annotations

import contextlib
import csv
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vec_envs import forked
from warm_python import WarmPython

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent

Door = Callable[..., "subprocess.CompletedProcess[str]"]
Make = Callable[..., Any]  # takes the arguments of ParallelEnv
Capture = pytest.CaptureFixture[str]
Start = Callable[..., "subprocess.Popen[str]"]


def pytest_configure() -> None:
    """Prepare this process and, by its environment, those that tests start."""
    # Tests run beside each other: several threads of each would mostly wait for a core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Undo the ignored signals of ``&`` (SIGINT) and nohup (SIGHUP): tests send both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Continue after a test has crashed its worker or timed out."""
    from crash_scheduling import CrashScheduling  # needs xdist, unlike most runs of a few tests

    return CrashScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start slow tests first, so that at the end no process waits for a long one."""
    if hasattr(config, "workerinput"):  # a process of xdist
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which some tests trigger often."""
    if "ml_pipeline.assembly.compose" in sys.modules:  # these tests compose configs
        from remembered_configs import remember_configs

        remember_configs()
    gc.collect()
    gc.freeze()


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_wandb_account(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Hide the developer's W&B login: tests must not upload anything."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # tmp_path would make a folder for every test.
    monkeypatch.setenv("NETRC", str(tmp_path_factory.getbasetemp() / "no-netrc"))


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
    # mktemp would list all folders of the tests before.
    folder = tmp_path_factory.getbasetemp() / f"config_of_test_{next(_numbers)}"
    folder.mkdir()
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


@pytest.fixture
def leaves_no_child() -> Iterator[None]:
    """Check the test for leftover child processes."""
    yield
    if multiprocessing.active_children():
        gc.collect()  # an env that was not closed ends its workers when it is collected
    assert not multiprocessing.active_children()


@pytest.fixture
def way() -> Make:
    """How ``make`` runs envs: in forked workers, unless a test or module chooses another way."""
    return forked


@pytest.fixture
def make(way: Make) -> Iterator[Make]:
    """Makes vector envs, and closes them after the test."""
    with contextlib.ExitStack() as made:
        yield lambda *args, **options: made.enter_context(contextlib.closing(way(*args, **options)))


@pytest.fixture
def start(make: Make) -> Make:
    """Makes vector envs and resets them, and closes them after the test."""

    def made_and_reset(*args: Any, **options: Any) -> Any:
        env = make(*args, **options)
        env.reset()
        return env

    return made_and_reset


def door_command(*arguments: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "train_ppo.py"), *arguments]


def call(
    *command: str | Path, cwd: Path | None = None, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it."""
    # W&B's own variables lead to the W&B service of this process.
    inherited = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    """Runs programs without the time that imports take."""
    with contextlib.closing(WarmPython()) as python:
        yield python


@pytest.fixture
def door(here: Path) -> Door:
    """``door("n_envs=2")`` runs train_ppo.py in a new process and waits for it."""
    return lambda *arguments, **environment: call(
        *door_command(*arguments), cwd=here, **environment
    )


@pytest.fixture
def started(here: Path) -> Iterator[Start]:
    """``started("n_envs=2")`` runs train_ppo.py in the background until the test ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            door_command(*arguments),
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its own process group, so that a test can signal all of it
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def await_line(process: subprocess.Popen[str], beginning: str) -> None:
    """Read the output of a process up to the first line that begins so."""
    assert process.stdout is not None
    assert any(line.startswith(beginning) for line in iter(process.stdout.readline, "")), (
        "the process has ended"
    )


def read_rows(path: Path) -> list[dict[str, str]]:
    """The metrics.csv of a run, or another file, without the columns that measure the machine."""
    with (path / "metrics.csv" if path.is_dir() else path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "workers/", "gpu/"))}
        for row in rows
    ]


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def error_line(capsys: Capture) -> str:
    """The only line that a command has printed to stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("sprung").absolute(),)


def only_run(folder: Path) -> Path:
    runs = [path for path in folder.glob("runs/*/*") if path.parent.name != "sweeps"]
    assert len(runs) == 1, runs
    return runs[0]


def small(**more: Any) -> list[str]:
    """Overrides of a short run: two iterations of two envs; ``a__b`` sets the key a.b.

    With vec_env=auto, a busy machine would sometimes measure that workers are faster.
    """
    settings = {
        "n_envs": 2,
        "vec_env": "serial",
        "total_steps": 64,
        "agent.n_steps": 16,
        "agent.n_minibatches": 2,
        "agent.n_epochs": 2,
        "device": "cpu",
        "logger": "none",
        "callbacks.evaluation.n_episodes": 2,
        "callbacks.checkpoints.final_episodes": 2,
    }
    names = {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in {**settings, **names}.items()]


def small_auto(**more: Any) -> list[str]:
    """``small`` with vec_env=auto, which tensor envs need."""
    return small(vec_env="auto", **more)


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of ``finished_run``; copied, never changed."""
    from ml_pipeline.assembly.run import train  # imports torch, which many tests do not need

    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        train([*small(), "vec_env=serial"])
    return folder


@pytest.fixture
def finished_run(_template: Path, here: Path, config_home: Path) -> Path:
    """A run of 64 env steps by this user, with both checkpoints and its envs."""
    shutil.copytree(_template / "runs", here / "runs")
    shutil.copytree(_template / "config", config_home, dirs_exist_ok=True)
    return only_run(here)


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without evaluations, which this user signed; copied, never changed."""
    from ml_pipeline.assembly.run import train

    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / train([*small(), "~callbacks.evaluation", "~callbacks.media"]).run_dir


def change_config(run: Path, key: str, value: object) -> None:
    """Set ``key``, such as env.kwargs.x, in config.yaml."""
    import yaml

    config = yaml.safe_load((run / "config.yaml").read_text())
    *parents, last = key.split(".")
    part = config
    for parent in parents:
        part[parent] = part.get(parent) or {}
        part = part[parent]
    part[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


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


def children_of(pid: int) -> list[int]:
    if not Path("/proc").exists():
        pytest.skip("finds processes in /proc")
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended since
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                children.append(int(stat.parent.name))
    return children


@pytest.fixture(scope="session")
def old_python() -> str:
    """A Python below 3.10 that works; pyenv leaves stubs that do not."""
    for version in ("3.9", "3.8", "3.7"):
        managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
        for name in (f"python{version}", *map(str, managed)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                subprocess.run([name, "-c", ""], check=True, capture_output=True)
                return name
    pytest.skip("no Python older than 3.10 on this machine")


@pytest.fixture
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = driver.chromium.launch(executable_path=path, args=options)
        yield chromium
        chromium.close()
