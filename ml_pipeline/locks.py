"""FileLock: a lock on a file or folder that the system releases when its process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLock:
    """An exclusive lock between the processes of one machine.

    ``path`` may be a folder; a missing path becomes an empty file. Windows and some network file
    systems have no such locks: there ``take`` always succeeds and ``is_supported`` is False.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_supported = True
        self._descriptor: int | None = None

    def take(self, *, wait: bool) -> bool:
        """False if another process holds the lock and ``wait`` is False."""
        is_folder = self.path.is_dir()
        if sys.platform == "win32":
            self.is_supported = False
            if not is_folder:
                self.path.touch()
            return True
        import fcntl

        # NFS locks only files that are open for writing; a folder can be opened for reading only.
        flags = os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT
        descriptor = os.open(self.path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            self.is_supported = False
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it for a block."""
        self.take(wait=True)
        try:
            yield
        finally:
            self.release()
