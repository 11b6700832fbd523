"""Snapshots of a run's envs on the disk: what an exact resume needs beside the checkpoint.

A snapshot is a pickle, and so could hold any code. It is kept in a file of its own that only a
resume reads, and only if it bears the seal of this user: a keyed hash, whose key lies in the
user's config folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ml_pipeline.errors import UserError
from ml_pipeline.runs.run_folder import RunFolder, remove, write_atomically

_MAGIC = b"ml_pipeline envs 2\n"
_SEAL_SIZE = _KEY_SIZE = 32


class SnapshotError(UserError):
    """The envs of a run cannot go on where they stood."""


class UntrustedSnapshotError(SnapshotError):
    """They could, but somebody else may have written what they would run."""


def snapshot_path(run: RunFolder, token: str) -> Path:
    return run.checkpoints / f"{token}.envs"


def save_snapshots(run: RunFolder, snapshots: Sequence[bytes]) -> str:
    """Write the snapshots of all envs; gives the token by which a checkpoint refers to them.

    The file of the checkpoint before stays until ``sweep_snapshots``.
    """
    token = secrets.token_hex(8)
    lengths = [len(each) for each in snapshots]
    body = struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths) + b"".join(snapshots)
    content = _MAGIC + _seal(token, body, _key()) + body
    write_atomically(snapshot_path(run, token), lambda file: file.write(content))
    return token


def load_snapshots(run: RunFolder, token: str, *, trust: bool) -> list[bytes]:
    """What was saved; ``trust`` takes it even if it was another user who did so."""
    path = snapshot_path(run, token)
    if not token.isalnum() or not path.is_file():
        raise SnapshotError(f"{path.name} is missing")
    content = path.read_bytes()
    start = len(_MAGIC) + _SEAL_SIZE
    seal, body = content[len(_MAGIC) : start], content[start:]
    if not content.startswith(_MAGIC):
        raise SnapshotError(f"{path.name} is damaged")
    if not trust and not hmac.compare_digest(seal, _seal(token, body, _key())):
        raise UntrustedSnapshotError(
            f"the envs in {path} were not saved by this user, or have changed since, and could run "
            "any code. If you trust who wrote them: trust=true; to begin new episodes, delete them"
        )
    try:
        (count,) = struct.unpack_from("<I", body)
        lengths = struct.unpack_from(f"<{count}Q", body, 4)
    except struct.error as error:
        raise SnapshotError(f"{path.name} is damaged") from error
    place = 4 + 8 * count
    snapshots = []
    for length in lengths:
        snapshots.append(body[place : place + length])
        place += length
    if place != len(body):
        raise SnapshotError(f"{path.name} is damaged")
    return snapshots


def sweep_snapshots(run: RunFolder, *, keep: str | None) -> None:
    """Remove the snapshots that no checkpoint refers to any more."""
    for path in run.checkpoints.glob("*.envs"):
        if path.stem != keep:
            remove(path)


def _seal(token: str, body: bytes, key: bytes) -> bytes:
    return hmac.new(key, token.encode() + body, hashlib.sha256).digest()


def _key() -> bytes:
    """This user's key; made at the first call, readable by nobody else."""
    path = _config_folder() / "snapshot.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size != _KEY_SIZE:
            path.unlink()  # cut off, or emptied; what it has sealed is not trusted any more
        if not path.exists():
            # Written aside and linked, so that of two processes one wins and none reads half.
            aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(secrets.token_bytes(_KEY_SIZE))
            with suppress(FileExistsError):
                os.link(aside, path)
            aside.unlink()
        return path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise SnapshotError(f"there is no key to seal it with: {error}") from error


def _config_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home()) / "ml_pipeline"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ml_pipeline"
