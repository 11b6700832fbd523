"""Journal: the file of a study's trials, written by many processes; any may be killed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

HOST = platform.node()


class Journal(JournalFileBackend):
    """Optuna's journal file, which also survives a writer that is killed.

    Optuna cannot read past a half-written line, so ``append_logs`` overwrites one at the end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._journal = path
        self._among_machines = JournalFileOpenLock(str(path))
        self._marker = path.with_name(f"{path.name}.lock")  # the file of that lock
        self._on_this_machine = FileLock(path.with_name(f"{path.name}.{HOST}.flock"))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._locked(), self._journal.open("rb+") as file:
            _seek_end_of_lines(file)
            file.truncate()
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Optuna's lock, but without its 30 s wait for a writer that died on this machine."""
        with self._on_this_machine.acquire(poll_interval=0.005):
            if self._owner() == HOST:  # a dead process: a live one would hold the file lock
                self._among_machines.release()
            self._among_machines.acquire()
            try:
                self._marker.write_text(HOST)
                yield
            finally:
                with suppress(RuntimeError):  # another machine considered this process dead
                    self._among_machines.release()

    def _owner(self) -> str | None:
        try:
            return self._marker.read_text()
        except OSError:
            return None


def _seek_end_of_lines(file: IO[bytes]) -> None:
    """Move to the position after the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            break
        end -= 1
    file.seek(end)
