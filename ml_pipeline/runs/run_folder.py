"""RunFolder: the files of a run, which are written completely or not at all.

<run_root>/<env>/<date>_<time>_<4 hex>[_<name>]/ holds config.yaml, metrics.csv, summary.json and
checkpoints/.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from ml_pipeline.errors import UserError, shorten
from ml_pipeline.foreign import TEXT_BYTES, check_folder, read_regular
from ml_pipeline.locks import FileLock

# The pure Python parser takes 10 ms for a config; PyYAML has the fast one if libyaml is there.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAX_YAML = 1_000_000  # characters
_MAX_DEPTH = 50
_OF_LOGGERS = ("wandb",)  # W&B links to its own logs, and adds a new folder for each process
_SUMMARY_END = 64 + len('"\n}\n')  # the checksum, and what follows it
_LIST = "python -m ml_pipeline runs lists the runs"  # the fix of a wrong path


class RunFolderError(UserError):
    """A run folder is missing, in use, or damaged."""


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path, *, shown: Path | None = None, trust: bool = False) -> None:
        """``shown`` is how output names the folder, if not by ``path``.

        ``trust`` accepts what its author could use to run code or to leave the folder.
        """
        self.path = path
        self.trust = trust
        self.shown = path if shown is None else shown
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.csv"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.replay = path / "replay"  # transitions of an off-policy run
        self.videos = path / "videos"
        self.traceback = path / "traceback.txt"  # of the part of a user that ended the run
        self.changes = path / "changes.diff"  # uncommitted changes of this package, if any
        self.user_changes = path / "user_changes.diff"  # of the user's own repository, if any

    @classmethod
    def unused(cls, root: Path, env_name: str, name: str | None = None) -> RunFolder:
        """A new folder; two runs may start in the same second, so random digits follow the time."""
        parent = root / re.sub(r"[^\w.-]+", "-", env_name)
        while True:
            run = cls(parent / "_".join(filter(None, (stamped_name(), name))))
            if not run.path.exists():
                return run

    @classmethod
    def open(cls, path: Path | str, *, trust: bool = False) -> RunFolder:
        """An existing run, by its path or that of one of its checkpoints.

        Links out of the folder are refused unless ``trust``, other special files always.
        """
        if not str(path):
            raise RunFolderError("the path of the run folder is empty")
        if is_checkpoint_file(Path(path)):
            path = Path(path).parents[1]
        run = cls(Path(path), trust=trust)
        try:
            if run.name in ("", ".."):  # "." has no name
                run = cls(Path(path).resolve(), trust=trust)
            if not run.path.is_dir():
                raise RunFolderError(f"{path} is not a run folder: it does not exist; {_LIST}")
            check_folder(run.path, trust=trust, unread=_OF_LOGGERS)
            if not run.config.is_file():
                raise RunFolderError(f"{path} is not a run folder: it has no config.yaml; {_LIST}")
        except OSError as error:
            shown = shorten(str(path))
            raise RunFolderError(f"{shown} is not a run folder: {error.strerror}") from error
        return run

    def absolute(self) -> RunFolder:
        """The same folder for a process that may change its current folder."""
        return RunFolder(Path(os.path.abspath(self.path)), shown=self.path, trust=self.trust)

    @property
    def name(self) -> str:
        return self.path.name

    def make(self) -> None:
        """Create the folder, if it does not exist."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot create the run folder {self.path}: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder; a kill releases the lock."""
        lock = FileLock(self.path)
        try:
            is_free = lock.take(wait=False)
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be locked: {error.strerror}") from error
        if not is_free:
            raise RunFolderError(
                f"{self.path} is being trained by another process; wait for it or stop it"
            )
        if not lock.is_supported:
            print(f"{self.path} cannot be locked; do not train in it twice at the same time")
        try:
            yield
        finally:
            lock.release()

    def is_locked(self) -> bool:
        """Whether a process is training in this folder."""
        lock = FileLock(self.path)
        try:
            is_free = lock.take(wait=False)
        except OSError:  # this user may not write there, so nothing here trains in it
            return False
        lock.release()
        return not is_free

    def sweep(self) -> None:
        """Remove unfinished files of a killed process."""
        for folder in (self.path, self.checkpoints, self.replay):
            for path in folder.glob(".*.tmp"):
                remove(path)

    def discard_unstarted(self) -> None:
        """Remove the folder of a run that did not start: it has no config yet."""
        if not self.config.exists():
            shutil.rmtree(self.path)

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json; empty before the first write."""
        try:
            content = read_regular(self.summary, most_bytes=TEXT_BYTES)
            summary = json.loads(content)
            json.dumps(summary, allow_nan=False)  # Python reads NaN, but JSON has none
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunFolderError(f"{self.summary} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise RunFolderError(f"{self.summary} is not valid JSON: {error}") from error
        if not isinstance(summary, dict):
            raise RunFolderError(f"{self.summary} is not a JSON object")
        checksum = summary.pop("checksum", None)  # older files have none
        if checksum not in (None, _checksum(content[:-_SUMMARY_END])):
            raise RunFolderError(
                f"{self.summary} is damaged: its checksum does not match its content; restore "
                "it, or delete it to continue without the times and results that it has"
            )
        return summary

    def update_summary(self, facts: Mapping[str, object]) -> None:
        """Add entries to summary.json, or replace them."""
        summary = {**self.read_summary(), **facts, "checksum": "0" * 64}
        write_text(self.summary, _sealed(json.dumps(summary, indent=2, allow_nan=False) + "\n"))

    def end_in_place(self, status: str) -> None:
        """Replace only the status "running", in the same file: a full disk has no room for more."""
        running = '"status": "running"'
        try:
            text = self.summary.read_text(encoding="utf-8")
            text = text.replace(running, f'"status": "{status}"'.ljust(len(running)), 1)
            with self.summary.open("r+", encoding="utf-8") as file:
                file.write(_sealed(text) if '"checksum": "' in text else text)
        except OSError as error:
            raise RunFolderError(f"could not write {self.summary}: {error}") from error


def _sealed(summary: str) -> str:
    """The text of summary.json with the SHA-256 of all before it in its last entry, checksum."""
    body, end = summary[:-_SUMMARY_END], summary[-_SUMMARY_END:]
    return body + _checksum(body.encode()) + end[64:]


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_checkpoint_file(path: Path) -> bool:
    """Whether a path looks like RUN/checkpoints/NAME.pt."""
    return path.suffix == ".pt" and path.parent.name == "checkpoints"


def check_yaml(text: str) -> None:
    """Refuse YAML that a run does not write and that can exhaust the memory or the stack."""
    if len(text) > _MAX_YAML:
        raise ValueError(f"{len(text):,} characters, more than {_MAX_YAML:,}")
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {event.start_mark.line + 1}: aliases are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested config with dotted keys: "agent.gamma" -> 0.99."""
    values: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def remove(path: Path) -> None:
    """Remove a file, if it exists."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"could not remove {path}: {error}") from error


def stamped_name() -> str:
    """A name for a new folder: local time and a random suffix."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    try:
        write_atomically(path, lambda file: file.write(text.encode("utf-8")))
    except OSError as error:
        raise RunFolderError(f"could not write {path}: {error}") from error


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file, which then replaces ``path``.

    A kill at any moment leaves the old file or the new one. It may also leave a temporary file,
    whose name starts with a dot and ends with .tmp.
    """
    # Not tempfile, whose files only this user can read: others may read a run.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    file = temporary.open("xb")
    try:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # a full disk fails here again
            file.close()
        temporary.unlink(missing_ok=True)  # missing if it already replaced ``path``
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the new and renamed files of a folder."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
