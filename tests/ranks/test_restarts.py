"""torchrun restarts ranks that died; the same command then continues their run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import small
from rank_runs import torchrun
from started_ranks import (
    OPTIONS,
    TRAIN,
    children,
    ended,
    is_running,
    rank_pid,
    read_until,
    run_folder,
)
from stopped_runs import checkpoint_numbers
from torch.distributed import TCPStore

from ml_pipeline.assembly.compose import compose_config
from ml_pipeline.assembly.restarts import Start, find_start
from ml_pipeline.assembly.run import run as run_command
from ml_pipeline.ranks.rendezvous import RankError, launcher_store

SIZE = "total_steps=3840"  # 15 iterations
# Several launches of torchrun, and a run that several tests share.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("restarts")]
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    words = ["--max-restarts=2", TRAIN, *OPTIONS, "vec_env=serial", SIZE, f"run_root={folder}"]
    return torchrun(2, *words, *overrides)


def wait_for_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not list(folder.glob("*/*/checkpoints/latest.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing interrupted."""
    folder = tmp_path_factory.mktemp("complete")
    output = ended(start(folder))
    assert "finished at env step 3,840 of 3,840" in output, output
    assert "restart" not in output
    return run_folder(folder)


@needs_proc
@pytest.mark.slow
def test_restarted_ranks_continue_their_run_bit_for_bit(complete: Path, tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_checkpoint(tmp_path)
    os.kill(rank_pid(process.pid, 0), signal.SIGKILL)
    output = ended(process)

    run = run_folder(tmp_path)  # the only one
    assert process.returncode == 0, output
    assert f"restart 1 of torchrun: resuming {run} from env step " in output, output
    assert "in the middle of its episodes" in output
    assert checkpoint_numbers(run) == checkpoint_numbers(complete)


@needs_proc
@pytest.mark.slow
def test_restart_without_a_checkpoint_starts_the_command_again(
    complete: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "callbacks.checkpoints.every_steps=1e9")
    read_until(process, "iteration 1 ")
    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    output = ended(process)

    first, second = sorted(tmp_path.glob("*/*"))
    assert process.returncode == 0, output
    line = f"restart 1 of torchrun: {first} has no new checkpoint yet, so the command starts again"
    assert line in output
    assert checkpoint_numbers(second) == checkpoint_numbers(complete)


@needs_proc
@pytest.mark.slow
def test_ranks_of_a_killed_torchrun_save_and_stop(tmp_path: Path) -> None:
    process = torchrun(2, TRAIN, *OPTIONS, "total_steps=1e7", f"run_root={tmp_path}")
    read_until(process, "iteration 1 ")
    ranks = children(process.pid)
    process.kill()
    output = ended(process)  # the ranks have closed it

    assert "stopped by SIGTERM" in output, output
    assert (run_folder(tmp_path) / "checkpoints" / "latest.pt").exists()
    deadline = time.monotonic() + 40.0  # a process closes its output shortly before it ends
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def new_launcher() -> TCPStore:
    """The store of a torchrun."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Start]:
    """Starts the command of a torchrun with one rank."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    def find(launcher: TCPStore, *more: str) -> Start:
        overrides = [*small(run_root=tmp_path), "~callbacks.evaluation", *more]
        monkeypatch.setenv("MASTER_PORT", str(launcher.port))
        launcher_store.cache_clear()  # a restarted rank is a new process
        return find_start(compose_config(overrides), overrides)

    return find


def test_only_the_same_torchrun_finds_its_run_again(
    launch: Callable[..., Start], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = new_launcher(), new_launcher()
    first = launch(own)
    again = launch(own)
    assert "has no new checkpoint yet, so the command starts again" in capsys.readouterr().out
    result = run_command(again.cfg, again.overrides, folder=again.folder)

    complete = launch(own)
    assert f"restart 2 of torchrun: {result.run_dir} is complete" in capsys.readouterr().out
    assert complete.is_complete
    assert complete.cfg.resume == str(result.run_dir)
    assert launch(other).cfg.resume is None
    folders = [each.folder.path for each in (first, again) if each.folder is not None]
    assert len(set(folders)) == 2
    assert folders[1] == result.run_dir


def test_resumed_checkpoint_is_used_again_until_a_newer_one_exists(
    launch: Callable[..., Start], tmp_path: Path
) -> None:
    start = launch(new_launcher())
    run = run_command(start.cfg, start.overrides, folder=start.folder).run_dir
    resume = f"resume={run}/checkpoints/latest.pt"

    other = new_launcher()
    assert launch(other, resume).cfg.resume == f"{run}/checkpoints/latest.pt"
    restarted = launch(other, resume)
    assert restarted.cfg.resume == f"{run}/checkpoints/latest.pt"
    assert resume in restarted.overrides
    os.utime(run / "checkpoints" / "latest.pt")  # a save
    assert launch(other, resume).cfg.resume == str(run)


def test_a_launch_leaves_no_file_for_later_runs(
    launch: Callable[..., Start], tmp_path: Path
) -> None:
    launcher = new_launcher()
    launch(launcher)
    launch(launcher)

    assert list(tmp_path.iterdir()) == []


def test_launcher_without_an_answer_is_an_error_in_one_line(launch: Callable[..., Start]) -> None:
    launcher = SimpleNamespace(port=1)  # nothing listens there
    with pytest.raises(RankError, match="WORLD_SIZE=1: not all ranks joined rank 0 within 1 s"):
        launch(launcher, "rank_timeout_seconds=1")
