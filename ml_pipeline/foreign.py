"""The one way in for folders and files that someone else may have made.

Before a byte is read, links out of the folder, files that are not regular, and sizes that exhaust
the memory are refused. ``trust`` accepts links; nothing accepts a FIFO or a device.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ml_pipeline.errors import UserError, shorten

TEXT_BYTES = 10_000_000  # of a config, a summary or a study
TABLE_BYTES = 1_000_000_000  # of metrics.csv or a journal

_MOST_DEPTH = 50
# Do not wait for the writer of a FIFO; Windows has no such flag.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class ForeignFileError(UserError):
    """A file is a link, is not a regular file, or is too large."""


def check_folder(folder: Path, *, trust: bool = False, unread: Collection[str] = ()) -> None:
    """Refuse a folder with entries that must not be read, replaced or written into.

    ``folder`` itself may be a link. Nothing reads or replaces the content of the folders
    ``unread``, names in ``folder``, so their content is not checked.
    """
    root = os.path.realpath(folder)
    for entry in _entries(folder, 0, unread):
        if entry.is_symlink():
            if not (trust or _is_inside(os.path.realpath(entry.path), root)):
                raise ForeignFileError(
                    f"{entry.path} is a link out of the folder; copy what it names, or add "
                    "--trust (with resume=: trust=true) if you trust the author of the folder"
                )
        elif not (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)):
            raise _not_regular(entry.path)


def read_regular(path: Path | str, *, most_bytes: int | None = None) -> bytes:
    """The content of a file, or of one that a link names; raises ``OSError`` as ``open`` does.

    ``most_bytes`` None: half of this machine's memory.
    """
    most_bytes = half_of_memory() if most_bytes is None else most_bytes
    _check_regular(path, os.stat(path), most_bytes)  # opening some devices has an effect
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        _check_regular(path, os.fstat(file.fileno()), most_bytes)
        content = file.read(most_bytes + 1)  # files of /proc have no size
    if len(content) > most_bytes:
        raise _too_large(path, len(content), most_bytes)
    return content


def check_size(path: Path | str, *, most_bytes: int) -> None:
    """Refuse a file that another library will read, if it is not regular or too large."""
    _check_regular(path, os.stat(path), most_bytes)


def absolute_folder(variable: str, default: str) -> Path:
    """The folder that an environment variable names, or ``default`` in the home folder.

    A relative path is ignored, as the XDG specification says: it could lead into a foreign folder.
    """
    given = Path(os.environ.get(variable) or "")
    return given if given.is_absolute() else Path.home() / default


def half_of_memory() -> int:
    """Bytes; reading more would leave no room for what is made of it."""
    if not hasattr(os, "sysconf"):
        return 2**34
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _entries(
    folder: Path | str, depth: int, unread: Collection[str] = ()
) -> Iterator[os.DirEntry[str]]:
    if depth > _MOST_DEPTH:
        raise ForeignFileError(f"{shorten(str(folder))}: nested deeper than {_MOST_DEPTH} folders")
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.name not in unread and entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path, depth + 1)


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(os.path.join(root, ""))


def _check_regular(path: Path | str, facts: os.stat_result, most_bytes: int) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not stat.S_ISREG(facts.st_mode):
        raise _not_regular(path)
    if facts.st_size > most_bytes:
        raise _too_large(path, facts.st_size, most_bytes)


def _not_regular(path: Path | str) -> ForeignFileError:
    return ForeignFileError(
        f"{path} is not a regular file: a FIFO, a socket or a device; remove it"
    )


def _too_large(path: Path | str, size: int, most_bytes: int) -> ForeignFileError:
    return ForeignFileError(f"{path} has {size:,} bytes or more; at most {most_bytes:,} are read")
