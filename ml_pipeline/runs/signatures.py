"""Signatures: recognise the files that this user wrote, so that they need no ``--trust``.

A signature is an HMAC with a key in the user's config folder, which only this user can read. It
is the last line of a file and covers every byte before it. ``purpose`` keeps a signature of one
kind of file from being valid for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from ml_pipeline.errors import UserError
from ml_pipeline.foreign import absolute_folder

SIGNATURE_SIZE = 65  # 64 hex digits and a newline

_KEY_SIZE = 32
_SEAL = re.compile(rb"# (?:sha256 ([0-9a-f]{64}), )?signature [^\n]*\n")


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


def sealed(purpose: str, text: str) -> str:
    """A YAML text with a comment at its end: its SHA-256, which anybody can check, and a signature.

    Without a key there is no signature.
    """
    checksum = hashlib.sha256(text.encode()).hexdigest()
    text += f"# sha256 {checksum}, signature of the user who wrote this: "
    return text + (signature(purpose, text.encode()).decode() or "none\n")


def unsealed(content: bytes) -> bytes:
    """The text that ``sealed`` was given; all of ``content`` without a seal."""
    start = _seal_start(content)
    return content[:start] if _SEAL.fullmatch(content, start) else content


def report_change(path: Path, content: bytes) -> None:
    """Print a line, once per file, if its SHA-256 does not match; older files have none."""
    start = _seal_start(content)
    seal = _SEAL.fullmatch(content, start)
    if seal and seal[1] and seal[1] != hashlib.sha256(content[:start]).hexdigest().encode():
        warn_once(f"{path}: changed since it was written; if you did not edit it, it is damaged")


def _seal_start(content: bytes) -> int:
    return content.rfind(b"\n# ") + 1


def _signature(purpose: str, content: bytes) -> bytes:
    # The messages of env snapshots start with a letter or digit, so no message is of both kinds.
    message = f"\0{purpose}\0".encode() + content
    return hmac.new(user_key(), message, hashlib.sha256).hexdigest().encode() + b"\n"


def user_key() -> bytes:
    """This user's key, created at the first call; only this user can read it."""
    try:
        path = _config_folder() / "snapshot.key"  # the name is older than the other uses
        path.parent.mkdir(parents=True, exist_ok=True)
        key = _read_key(path)
        if key is not None:
            if len(key) == _KEY_SIZE:
                return key
            path.unlink()  # truncated; files signed with it are no longer trusted
        # Linking is atomic: if two processes create a key, both read the same complete key.
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_SIZE))
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
        return _read_key(path) or b""
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise NoKeyError(str(error)) from error


def _read_key(path: Path) -> bytes | None:
    """The content of the key file, None if it is missing; refuses a key that others may know."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return None
    reason = ""
    if not stat.S_ISREG(facts.st_mode):
        reason = "it is a link or a special file; put the key itself there"
    elif sys.platform != "win32" and facts.st_uid != os.getuid():
        reason = "it belongs to another user; remove it"
    elif sys.platform != "win32" and facts.st_mode & 0o077:
        reason = f"others can read or change it; if they did not, type: chmod 600 {path}"
    if reason:
        warn_once(f"the key {path} is not used: {reason}")
        raise NoKeyError(f"{path}: {reason}")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_KEY_SIZE + 1)


@cache
def warn_once(line: str) -> None:
    """Once: a command may read the same file several times."""
    print(line, file=sys.stderr)


def _config_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home()) / "ml_pipeline"
    return absolute_folder("XDG_CONFIG_HOME", ".config") / "ml_pipeline"
