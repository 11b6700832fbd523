"""FileLock: one holder at a time; a kill releases it."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import REPOSITORY, Capture

from ml_pipeline.locks import FileLock
from ml_pipeline.runs.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")


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


def test_kill_releases_the_lock(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from ml_pipeline.locks import FileLock; "
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


def test_run_folder_on_a_file_system_without_locks_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)

    with RunFolder(tmp_path).locked():
        assert not RunFolder(tmp_path).is_locked()
    assert "cannot be locked; do not train in it twice" in capsys.readouterr().out
