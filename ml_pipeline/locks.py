"""FileLock: a lock on a file or folder that the system releases when its process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, ENOENT, EPERM, EROFS
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import filelock

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class FileLock:
    """An exclusive lock between the processes of one machine.

    ``path`` may be a folder; a missing path becomes an empty file. Some network file systems have
    no such locks: there ``take`` always succeeds and ``is_supported`` is False. Windows cannot
    lock a folder, so there the file ``.NAME.lock`` beside it is locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_supported = True
        self._descriptor: int | None = None
        self._lock: filelock.BaseFileLock | None = None

    def take(self, *, wait: bool) -> bool:
        """False if another process holds the lock and ``wait`` is False.

        Raises ``OSError`` if the path cannot be opened.
        """
        return self._take_file(wait) if fcntl is None else self._take_descriptor(fcntl, wait)

    def _take_descriptor(self, fcntl: ModuleType, wait: bool) -> bool:
        # NFS locks only files that are open for writing; a folder can be opened for reading only.
        flags = os.O_RDONLY if self.path.is_dir() else os.O_RDWR | os.O_CREAT
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

    def _take_file(self, wait: bool) -> bool:
        import filelock  # only for Windows; it takes as long as listing 100 runs

        path = self.path
        if path.is_dir():
            path = path.resolve()
            path = path.with_name(f".{path.name}.lock")
        if not path.parent.is_dir():  # filelock would make it
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
        # Not local to a thread: another thread may release it.
        lock = filelock.FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=-1 if wait else 0, poll_interval=0.01)
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno in (EACCES, EPERM, EROFS):
                raise
            self.is_supported = False
            return True
        self._lock = lock
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it for a block."""
        self.take(wait=True)
        try:
            yield
        finally:
            self.release()
