"""The cache of markets: memory-mapped arrays that all processes of a machine share.

An entry is a folder with one .npy file per array and manifest.json, which has their checksums. It
is written aside and renamed, under a lock, so that a reader never sees half of it. Deleting the
whole cache is always safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import UserError
from ml_pipeline.foreign import (
    TEXT_BYTES,
    absolute_folder,
    check_folder,
    check_size,
    half_of_memory,
    read_regular,
)
from ml_pipeline.locks import FileLock
from ml_pipeline.worlds.trading.data.market import DataError, Market

_MANIFEST = "manifest.json"
_VERSION = 1  # raise it when the numbers in an entry change
_ARRAYS = Market._fields[2:]
_BLOCK = 1 << 22


class Entry(NamedTuple):
    """A market and what was computed with it."""

    market: Market
    facts: dict[str, Any]  # JSON


def default_folder() -> Path:
    """The cache of this user."""
    return absolute_folder("XDG_CACHE_HOME", ".cache") / "ml_pipeline/markets"


def cached(folder: Path, key: str, build: Callable[[], Entry]) -> Entry:
    """The entry ``key``; builds it if it is missing or damaged. Its arrays are memory-mapped."""
    path = folder / key
    entry = _opened(path)
    if entry is None:
        with _writing(folder), FileLock(folder / f"{key}.lock").held():
            entry = _opened(path) or _written(path, build())
    return entry


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Create the cache; one line for a disk that is full or read-only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"cache_dir={folder}: cannot be written: {error.strerror}") from error


def key_of(settings: Mapping[str, object], files: Sequence[Path], folder: Path) -> str:
    """A name from the settings and the contents of the source files."""
    sources = [(str(path), _file_checksum(path, folder)) for path in files]
    text = json.dumps([_VERSION, settings, sources], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _file_checksum(path: Path, folder: Path) -> str:
    """The SHA-256 of a source file, remembered until its size or time of change differ."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    note, stamp = folder / f"{name}.source", _stamp(path)
    try:
        seen = json.loads(read_regular(note, most_bytes=TEXT_BYTES))
        if seen["stamp"] == stamp:
            return str(seen["sha256"])
    except (UserError, OSError, ValueError, KeyError, TypeError):
        pass  # no note yet, or one that is damaged: read the file
    try:
        checksum = _checksum(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    aside = note.with_suffix(f".{os.getpid()}")
    with _writing(folder):
        aside.write_text(json.dumps({"stamp": stamp, "sha256": checksum}))
        aside.replace(note)
    return checksum


def _opened(path: Path) -> Entry | None:
    """The entry in a folder; None if it is missing or damaged."""
    try:
        check_folder(path)
        manifest = json.loads(read_regular(path / _MANIFEST, most_bytes=TEXT_BYTES))
        files = manifest["files"]
        arrays = {name: _array(path / f"{name}.npy", files[name]) for name in _ARRAYS}
        symbols, features = tuple(manifest["symbols"]), tuple(manifest["features"])
        return Entry(Market(symbols, features, **arrays), manifest["facts"])
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return None


def _array(path: Path, known: Mapping[str, object]) -> NDArray[Any]:
    check_size(path, most_bytes=half_of_memory())
    # An unchanged stamp saves reading every byte again in each worker.
    if _stamp(path) != known["stamp"] and _checksum(path) != known["sha256"]:
        raise ValueError(f"{path} is damaged")
    return _mapped(path, tuple(_stamp(path)))


@lru_cache(maxsize=64)
def _mapped(path: Path, stamp: tuple[int, ...]) -> NDArray[Any]:
    """One mapping for all envs of a process; another ``stamp`` is another file."""
    return np.asarray(np.load(path, mmap_mode="r"))


def _written(path: Path, entry: Entry) -> Entry:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    files = {}
    for name in _ARRAYS:
        file = aside / f"{name}.npy"
        np.save(file, np.ascontiguousarray(getattr(entry.market, name)))
        files[name] = {"stamp": _stamp(file), "sha256": _checksum(file)}
    manifest = {
        "symbols": entry.market.symbols,
        "features": entry.market.features,
        "files": files,
        "facts": entry.facts,
    }
    (aside / _MANIFEST).write_text(json.dumps(manifest))
    if path.exists():  # damaged; processes that have it open keep their files
        shutil.rmtree(path)
    aside.rename(path)
    written = _opened(path)
    if written is None:
        raise DataError(f"cache_dir={path.parent}: the file system does not keep what is written")
    return written


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
