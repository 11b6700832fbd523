"""FileLock: one holder at a time; a kill releases it."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture

from ml_pipeline import locks
from ml_pipeline.locks import FileLock
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError


@pytest.fixture(params=["flock", "filelock"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Unix locks the file or folder itself; without fcntl, as on Windows, filelock does."""
    if request.param == "flock":
        pytest.importorskip("fcntl", reason="Windows has no flock")
    else:
        monkeypatch.setattr(locks, "fcntl", None)
    return str(request.param)


@pytest.fixture(params=["file", "folder"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path if request.param == "folder" else tmp_path / "new.lock"


def test_second_holder_is_refused_until_the_first_releases(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)

    assert first.take(wait=False)
    assert not second.take(wait=False)
    first.release()
    assert second.take(wait=False)
    second.release()


def test_held_waits_for_the_other_holder(path: Path) -> None:
    lock, order = FileLock(path), []
    lock.take(wait=False)

    def wait() -> None:
        with FileLock(path).held():
            order.append("second")

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    order.append("first")
    lock.release()
    thread.join()

    assert order == ["first", "second"]


def test_kill_releases_the_lock(path: Path, kind: str) -> None:
    script = (
        "import sys; from pathlib import Path; from ml_pipeline import locks; "
        "from ml_pipeline.locks import FileLock; "
        f"locks.fcntl = {'None' if kind == 'filelock' else 'locks.fcntl'}; "
        "lock = FileLock(Path(sys.argv[1])); print(lock.take(wait=False), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert not FileLock(path).take(wait=False)
        process.kill()

    lock = FileLock(path)
    assert lock.take(wait=False)
    lock.release()


def test_run_folder_refuses_a_second_process(tmp_path: Path) -> None:
    (run := RunFolder(tmp_path / "run")).make()

    with run.locked():
        assert RunFolder(run.path).is_locked()
        with (
            pytest.raises(RunFolderError, match="is being trained by another process; wait for it"),
            RunFolder(run.path).locked(),
        ):
            pass
    assert not run.is_locked()
    assert [path.name for path in run.path.iterdir()] == ["checkpoints"]


def test_folder_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "gone" / "run")

    with pytest.raises(RunFolderError, match="gone/run cannot be locked: No such file"):
        run.locked().__enter__()
    assert not run.is_locked()


def test_run_folder_on_a_file_system_without_locks_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, kind: str
) -> None:
    (tmp_path / "run").mkdir()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    # On Windows filelock raises the error of the system; on Unix it may wait instead.
    monkeypatch.setattr("fcntl.flock" if kind == "flock" else "filelock.FileLock._acquire", refuse)

    with RunFolder(tmp_path / "run").locked():
        assert not RunFolder(tmp_path / "run").is_locked()
    assert "cannot be locked; do not train in it twice" in capsys.readouterr().out
