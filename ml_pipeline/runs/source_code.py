"""The code of a run: the commit of a git repository and its uncommitted changes.

Only files that git tracks are read: other files may hold passwords.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import IO, NamedTuple, cast

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_SECONDS = 10.0  # for one git command
_MOST_BYTES = 1_000_000  # of changes
_OTHER_REPOSITORY = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE")  # set inside of git hooks


class Code(NamedTuple):
    """A commit, with + at its end if there are changes, and the changes as a diff."""

    commit: str
    changes: str


def package_code() -> Code | None:
    """The code of this package; None for an installed wheel or without git."""
    if not (PACKAGE_ROOT / "pyproject.toml").is_file():
        return None  # installed from a wheel: any repository around it is another project
    return _code(PACKAGE_ROOT)


def user_code(folder: Path) -> Code | None:
    """The code of the repository around ``folder``; None if that is this package, or none."""
    root = _git(folder, "rev-parse", "--show-toplevel")
    if root is None:
        return None
    path = Path(os.fsdecode(root.rstrip(b"\r\n")))
    return None if path.resolve() == PACKAGE_ROOT else _code(path)


def _code(root: Path) -> Code | None:
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    name = commit.decode().strip()
    diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    if diff is None:
        return Code(f"{name}+", f"# unknown: git diff failed, or took over {_SECONDS:.0f} s\n")
    if not diff.strip():
        return Code(name, "")
    changes = diff[:_MOST_BYTES].decode(errors="replace").rstrip() + "\n"
    if len(diff) > _MOST_BYTES:
        changes += f"# cut after {_MOST_BYTES:,} bytes\n"
    return Code(f"{name}+", changes)


def _git(folder: Path, *command: str) -> bytes | None:
    """The output of a git command, a little over ``_MOST_BYTES`` at most; None if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in _OTHER_REPOSITORY}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *command],
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    deadline = threading.Timer(_SECONDS, process.kill)
    deadline.start()
    with process:
        try:
            output = cast("IO[bytes]", process.stdout).read(_MOST_BYTES + 1)
            if len(output) <= _MOST_BYTES and process.wait() != 0:
                return None
        finally:
            process.kill()  # no effect on one that has ended
            deadline.cancel()
    return output
