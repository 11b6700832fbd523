"""Signatures: recognise the files that this user wrote, so that they need no ``--trust``.

A signature is an HMAC with a key in the user's config folder, which only this user can read. It
is the last line of a file and covers every byte before it. ``purpose`` keeps a signature of one
kind of file from being valid for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from ml_pipeline.errors import UserError

SIGNATURE_SIZE = 65  # 64 hex digits and a newline

_KEY_SIZE = 32


class UntrustedError(UserError):
    """A file asks for something that can run code, and this user did not write it."""


class NoKeyError(UserError):
    """This user has no key and cannot store one."""


def signature(purpose: str, content: bytes) -> bytes:
    """The line to append to ``content``; empty if this user cannot store a key."""
    try:
        return _signature(purpose, content)
    except NoKeyError:
        return b""


def is_signed(purpose: str, content: bytes) -> bool:
    """Whether ``content`` ends with its signature by this user."""
    body, line = content[:-SIGNATURE_SIZE], content[-SIGNATURE_SIZE:]
    try:
        return hmac.compare_digest(line, _signature(purpose, body))
    except NoKeyError:
        return False


def _signature(purpose: str, content: bytes) -> bytes:
    # The messages of env snapshots start with a letter or digit, so no message is of both kinds.
    message = f"\0{purpose}\0".encode() + content
    return hmac.new(user_key(), message, hashlib.sha256).hexdigest().encode() + b"\n"


def user_key() -> bytes:
    """This user's key, created at the first call; only this user can read it."""
    try:
        path = _config_folder() / "snapshot.key"  # the name is older than the other uses
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size != _KEY_SIZE:
            path.unlink()  # truncated; files signed with it are no longer trusted
        if not path.exists():
            # Linking is atomic: if two processes create a key, both read the same complete key.
            temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_SIZE))
            with suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
        return path.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise NoKeyError(str(error)) from error


def _config_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home()) / "ml_pipeline"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ml_pipeline"
