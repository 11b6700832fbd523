"""Snapshots of a run's envs on disk: an exact resume needs them in addition to the checkpoint.

A snapshot is a pickle, so loading it can run any code. Only a resume reads its file, and only if
this user signed it: an HMAC with a key from the user's config folder.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from pathlib import Path

from ml_pipeline.errors import UserError
from ml_pipeline.foreign import read_regular
from ml_pipeline.runs.run_folder import RunFolder, remove, write_atomically
from ml_pipeline.runs.signatures import NoKeyError, UntrustedError, user_key

_MAGIC = b"ml_pipeline envs 3\n"
_OLD_MAGIC = b"ml_pipeline envs 2\n"  # the token does not name the content
_SEAL_SIZE = 32
_NAME_SIZE = 32  # hex digits of the SHA-256 of the content, which the checkpoint stores


class SnapshotError(UserError):
    """The envs of a run cannot continue their episodes."""


def snapshot_path(run: RunFolder, token: str) -> Path:
    return run.checkpoints / f"{token}.envs"


def save_snapshots(
    run: RunFolder, snapshots: Sequence[bytes], *, numbered: int | None = None
) -> str:
    """Write the snapshots of all envs; returns the token that the checkpoint stores.

    The file of the previous checkpoint stays until ``sweep_snapshots``. ``numbered`` is the number
    of a checkpoint that keeps this file as long as it exists.
    """
    lengths = [len(each) for each in snapshots]
    body = struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths) + b"".join(snapshots)
    digest = hashlib.sha256(body)
    name = digest.hexdigest()[:_NAME_SIZE]
    token = name if numbered is None else f"{numbered}x{name}"
    content = _MAGIC + _seal(_MAGIC + token.encode() + digest.digest()) + body
    write_atomically(snapshot_path(run, token), lambda file: file.write(content))
    return token


def load_snapshots(run: RunFolder, token: str, *, trust: bool) -> list[bytes]:
    """The saved snapshots; ``trust`` accepts those of another user."""
    path = snapshot_path(run, token)
    if not token.isalnum() or not path.is_file():
        raise SnapshotError(f"{path.name} is missing")
    content = read_regular(path)
    start = len(_MAGIC) + _SEAL_SIZE
    seal, body = content[len(_MAGIC) : start], content[start:]
    is_old = content.startswith(_OLD_MAGIC)
    if not (is_old or content.startswith(_MAGIC)):
        raise SnapshotError(f"{path.name} is damaged")
    digest = hashlib.sha256(body)
    signed = token.encode() + body if is_old else _MAGIC + token.encode() + digest.digest()
    if not trust and not hmac.compare_digest(seal, _seal(signed)):
        raise UntrustedError(
            f"{path} was not saved by this user, or has changed since, and loading it can run any "
            "code; use trust=true if you trust its author, or delete it to start new episodes"
        )
    if not (is_old or token.endswith(digest.hexdigest()[:_NAME_SIZE])):
        raise SnapshotError(f"{path.name} is damaged: its name does not match its content")
    try:
        (count,) = struct.unpack_from("<I", body)
        lengths = struct.unpack_from(f"<{count}Q", body, 4)
    except struct.error as error:
        raise SnapshotError(f"{path.name} is damaged") from error
    offset = 4 + 8 * count
    snapshots = []
    for length in lengths:
        snapshots.append(body[offset : offset + length])
        offset += length
    if offset != len(body):
        raise SnapshotError(f"{path.name} is damaged")
    return snapshots


def sweep_snapshots(run: RunFolder, *, keep: str | None, numbered: Sequence[int] = ()) -> None:
    """Remove the snapshots that no checkpoint needs; ``numbered`` are the numbers in use."""
    prefixes = [f"{number}x" for number in numbered]
    for path in run.checkpoints.glob("*.envs"):
        if path.stem != keep and not path.stem.startswith(tuple(prefixes)):
            remove(path)


def _seal(message: bytes) -> bytes:
    try:
        return hmac.new(user_key(), message, hashlib.sha256).digest()
    except NoKeyError as error:
        raise SnapshotError(f"no key to seal them with: {error}") from error
