"""PaperLog: what a paper account did, one JSON line per bar, in a folder that one process owns.

A line holds the whole state after a bar and is written at once. So a process that is killed at any
point continues from the last whole line: the bars before it are never walked again, and a line that
the kill cut off is removed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.foreign import check_size
from ml_pipeline.locks import FileLock
from ml_pipeline.runs.run_folder import sync_folder

LOG_FILE = "paper.jsonl"

_BLOCK = 65_536  # bytes that are read at once while looking for the last line

Record = dict[str, Any]


class PaperError(UserError):
    """A policy, market file or log that cannot be used for paper trading."""


class PaperLog:
    """The lines of a log; the first one describes the policy, the others one bar each."""

    def __init__(self, path: Path, file: FileIO) -> None:
        """``file`` is open for reading and appending."""
        self.path = path
        self.last: Record | None = None  # line; None before the first bar
        self._file = file

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, header: Mapping[str, object]) -> Iterator[PaperLog]:
        """Create the log, or continue one with the same header; no other process may have it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PaperError(f"--log {folder}: cannot be created: {error.strerror}") from error
        lock = FileLock(folder)
        try:
            is_free = lock.take(wait=False)
        except OSError as error:
            raise PaperError(f"--log {folder}: cannot be locked: {error.strerror}") from error
        if not is_free:
            raise PaperError(
                f"--log {folder}: another process writes to it; stop it, or use another folder"
            )
        path = folder / LOG_FILE
        try:
            with _opened(path) as file:
                log = cls(path, file)
                log._begin(header)
                sync_folder(folder)
                yield log
                log.sync()
        finally:
            lock.release()

    def append(self, record: Record) -> None:
        """Write the next line; it survives a kill now, and a power cut after ``sync``."""
        left = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise PaperError(
                f"{self.path}: cannot be written: {error.strerror}; the same command continues"
            ) from error
        self.last = record

    def sync(self) -> None:
        """Wait until the disk has every line."""
        os.fsync(self._file.fileno())

    def _begin(self, header: Mapping[str, object]) -> None:
        """Remove a last line without its end, check the first line, and read the last one.

        A log without bars is begun again.
        """
        end = self._after_newline(self._file.seek(0, os.SEEK_END))
        start = self._after_newline(end - 1)  # of the last line; 0: that of the header
        self._file.truncate(end if start else 0)
        if start == 0:
            self.append(dict(header))
            self.last = None
        else:
            with self.path.open("rb") as file:
                self._check(self._parsed(file.readline()), header)
                file.seek(start)
                self.last = self._parsed(file.readline())
        self.sync()

    def _after_newline(self, end: int) -> int:
        """The place after the last newline before ``end``; 0 if there is none."""
        while end > 0:
            start = max(end - _BLOCK, 0)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _parsed(self, line: bytes) -> Record:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise PaperError(
                f"{self.path}: a line is damaged: {first_line(error)}; use another --log"
            ) from error
        if not isinstance(record, dict):
            raise PaperError(f"{self.path}: not a log of this command; use another --log")
        return record

    def _check(self, known: Record, header: Mapping[str, object]) -> None:
        for key, value in header.items():
            if known.get(key) != value:
                raise PaperError(
                    f"{self.path}: was started with {key}={known.get(key)}, not {value}; use "
                    "another --log"
                )


def _opened(path: Path) -> FileIO:
    try:
        if path.exists():
            check_size(path, most_bytes=sys.maxsize)  # a log grows for years
        return path.open("a+b", buffering=0)
    except OSError as error:
        raise PaperError(f"{path}: cannot be opened: {error.strerror}") from error
