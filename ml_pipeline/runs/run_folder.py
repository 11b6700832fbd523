"""RunFolder: where a run keeps its record, and the rule that files in it are never half written.

runs/<env>/<date>_<time>_<4 hex>/ holds config.yaml, metrics.csv, summary.json and checkpoints/.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from ml_pipeline.errors import UserError


class RunFolderError(UserError):
    """A path that is not the folder of a run."""


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.videos = path / "videos"
        self.changes = path / "changes.diff"  # of the code, since its commit; often not there

    @classmethod
    def unused(cls, root: Path, env_name: str) -> RunFolder:
        """A folder that does not exist yet; a second is not unique, so random digits follow."""
        parent = root / re.sub(r"[^\w.-]+", "-", env_name)
        while True:
            stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            run = cls(parent / f"{stamp}_{secrets.token_hex(2)}")
            if not run.path.exists():
                return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run, or one line on why ``path`` is none."""
        if not str(path):
            raise RunFolderError("a run folder is needed, and the path given is empty")
        run = cls(Path(path))
        if run.name in ("", ".."):  # ".", from inside the folder
            run = cls(Path(path).resolve())
        if not run.path.is_dir():
            raise RunFolderError(f"{path} is no run folder: there is no such folder")
        if not run.config.is_file():
            raise RunFolderError(f"{path} is no run folder: it has no config.yaml")
        return run

    @property
    def name(self) -> str:
        return self.path.name

    def make(self) -> None:
        """Put a new run's folder on the disk; of a resumed run it is there."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {self.path}: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process from training in the same folder; a kill releases it."""
        if sys.platform == "win32":
            yield  # a folder cannot be locked there
            return
        import fcntl

        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunFolderError(
                    f"{self.path} is being trained by another process; wait for it or stop it"
                ) from error
            except OSError:
                # Some network file systems have no locks: better unguarded than not at all.
                print(f"{self.path} cannot be locked; do not train in it twice at once")
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a process trains in it at this moment."""
        try:
            with self.locked():
                return False
        except RunFolderError:
            return True

    def sweep(self) -> None:
        """Remove what a kill has left of files that were being written."""
        for folder in (self.path, self.checkpoints):
            for path in folder.glob(".*.tmp"):
                remove(path)

    def discard_unstarted(self) -> None:
        """Remove what was made for a run that has not begun; a folder with a config stays."""
        if not self.config.exists():
            shutil.rmtree(self.path)

    def read_summary(self) -> dict[str, Any]:
        """What is known of the run; empty before the first write."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunFolderError(f"{self.summary} is not valid JSON: {error}") from error
        if not isinstance(summary, dict):
            raise RunFolderError(f"{self.summary} holds no JSON object")
        return summary

    def update_summary(self, facts: Mapping[str, Any]) -> None:
        """Add to the summary, or replace what it said."""
        text = json.dumps({**self.read_summary(), **facts}, indent=2, allow_nan=False)
        write_text(self.summary, text + "\n")


def remove(path: Path) -> None:
    """Take a file away, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"could not remove {path}: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    try:
        write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        raise RunFolderError(f"could not write {path}: {error}") from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file that takes the place of ``path`` only when it is on the disk.

    A kill at any moment leaves the old file or the new one; what is left of a temporary file
    starts with a dot and ends with .tmp.
    """
    with _temporary_beside(path) as (file, temporary):
        write(file)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must reach the disk; not on Windows
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    # Not tempfile: its files are for this user alone, and a run is often looked at by others.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("xb") as file:
        try:
            yield file, temporary
        except BaseException:
            with suppress(OSError):  # a full disk fails here once more
                file.close()
            temporary.unlink(missing_ok=True)  # gone if it has taken its place already
            raise
