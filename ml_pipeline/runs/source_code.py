"""The code of a run: the commit of a git repository and its uncommitted changes.

Only files that git tracks are read, and none whose name says that it holds passwords. The folder
may be unpacked from someone else's archive, so git runs no program that its config names.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple, cast

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_SECONDS = 10.0  # for one git command
_MOST_BYTES = 1_000_000  # of changes
_SECRETS = (  # files that git tracks by mistake
    *(".env", ".env.*", "*.env", ".netrc", ".npmrc", ".pypirc", ".git-credentials"),
    *("id_rsa*", "id_ed25519*", "*.pem", "*.key", "*.p12", "*.pfx"),
    *("secret.*", "secrets.*", "credentials*"),
)
_NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=" + os.devnull)
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
    files = [f":(exclude,glob,icase)**/{each}" for each in _SECRETS]
    diff = _diff(root, "--", ":/", *files)
    secrets = [f":(glob,icase)**/{each}" for each in _SECRETS]
    left_out = _diff(root, "--name-only", "--", *secrets)
    if diff is None or left_out is None:
        return Code(f"{name}+", f"# unknown: git diff failed, or took over {_SECONDS:.0f} s\n")
    changes = diff[:_MOST_BYTES].decode(errors="replace").rstrip()
    if len(diff) > _MOST_BYTES:
        changes += f"\n# cut after {_MOST_BYTES:,} bytes"
    for path in left_out.decode(errors="replace").splitlines():
        changes += f"\n# left out, it may hold passwords: {path}"
    changes = changes.strip()
    return Code(f"{name}+", f"{changes}\n") if changes else Code(name, "")


def _diff(root: Path, *arguments: str) -> bytes | None:
    # git would ask a changed submodule for its own changes, with the config of the submodule.
    options = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    return _git(root, "diff", *options, "HEAD", *arguments, environment=_without_filters(root))


def _without_filters(root: Path) -> dict[str, str]:
    """Variables that switch off the filters of the repository's own config: git would run them."""
    listed = _git(root, "config", "--show-scope", "--null", "--get-regexp", r"^filter\.") or b""
    fields = listed.split(b"\0")
    names = set()
    for scope, entry in zip(fields[::2], fields[1::2], strict=False):
        if scope in (b"local", b"worktree"):
            names.add(os.fsdecode(entry.partition(b"\n")[0].rpartition(b".")[0]))
    off = [(f"{name}.{key}", "") for name in names for key in ("clean", "process")]
    off += [(f"{name}.required", "false") for name in names]
    variables = {"GIT_CONFIG_COUNT": str(len(off))}
    for index, (key, value) in enumerate(off):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value
    return variables


def _git(
    folder: Path, *command: str, environment: Mapping[str, str] = MappingProxyType({})
) -> bytes | None:
    """The output of a git command, a little over ``_MOST_BYTES`` at most; None if it fails."""
    inherited = {k: v for k, v in os.environ.items() if k not in _OTHER_REPOSITORY}
    # A clone without all of its objects would start the transport that its config names.
    fixed = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *_NO_PROGRAMS, *command],
            env={**inherited, **fixed, **environment},
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
