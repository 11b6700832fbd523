"""JournalLock: lets many processes write Optuna's journal of a study; any may be killed."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack, suppress
from pathlib import Path

from filelock import FileLock
from optuna.storages.journal import JournalFileOpenLock

from ml_pipeline.foreign import TEXT_BYTES, read_regular

HOST = platform.node()


class JournalLock(JournalFileOpenLock):
    """Optuna's lock between machines, which also cleans up after a killed writer.

    Optuna alone would wait 30 s for a dead writer, and could not read past its half-written line.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._marker = journal.with_name(f"{journal.name}.lock")  # the file of Optuna's lock
        # Not super(): Optuna's ``acquire`` calls ``release`` to end the lock of a dead machine.
        self._among_machines = JournalFileOpenLock(str(journal))
        self._on_this_machine = FileLock(journal.with_name(f"{journal.name}.{HOST}.flock"))
        self._held = ExitStack()

    def acquire(self) -> bool:
        with ExitStack() as stack:
            stack.enter_context(self._on_this_machine.acquire(poll_interval=0.005))
            if self._owner() == HOST:  # a dead process: a live one would hold the file lock
                self._release_among_machines()
            self._among_machines.acquire()
            stack.callback(self._release_among_machines)
            self._marker.write_text(HOST)
            _remove_half_line(self._journal)
            self._held = stack.pop_all()
        return True

    def release(self) -> None:
        self._held.close()

    def _release_among_machines(self) -> None:
        with suppress(RuntimeError):  # another machine considered its owner dead
            self._among_machines.release()

    def _owner(self) -> str | None:
        try:
            return read_regular(self._marker, most_bytes=TEXT_BYTES).decode(errors="replace")
        except OSError:
            return None


def _remove_half_line(path: Path) -> None:
    """Remove the text after the last newline."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
