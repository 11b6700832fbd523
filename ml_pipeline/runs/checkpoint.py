"""Checkpoints: the state of a run in one file, written atomically and loaded without running code.

A state contains only tensors, numbers, strings, and lists and dicts of these, because
``weights_only=True`` loads nothing else. The file has torch's format. Its last line is the SHA-256
of everything before it; ``torch.load`` ignores that line.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.foreign import read_regular
from ml_pipeline.records import StateDict
from ml_pipeline.runs.run_folder import (
    RunFolder,
    is_checkpoint_file,
    remove,
    sync_folder,
    write_atomically,
)
from ml_pipeline.training.out_of_memory import ran_out_of_memory

FORMAT = 2  # increased when older versions cannot read the file

LATEST, BEST = "latest", "best"
_NUMBERED = "step_"  # and the env steps: step_10240
_FINALIST = "best_"  # the same: best_10240

_PLAIN = (Tensor, int, float, bool, str, bytes, type(None))  # exactly these types, not subclasses

# Entries of every run; the agent and the trainer add their own.
_KINDS = {
    "config": (str,),
    "env_steps": (int,),
    "iteration": (int,),
    "env_snapshots": (str, type(None)),
}

_TRAILER = b"\nml_pipeline sha256 "
_TRAILER_SIZE = len(_TRAILER) + 64 + 1


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit the run."""


def checkpoint_path(run: RunFolder, name: str) -> Path:
    return run.checkpoints / f"{name}.pt"


def named_checkpoint(path: Path | str) -> str | None:
    """The checkpoint that ``path`` names: step_10240 of RUN/checkpoints/step_10240.pt, or None."""
    path = Path(path)
    return path.stem if is_checkpoint_file(path) else None


def numbered_name(env_steps: int) -> str:
    return f"{_NUMBERED}{env_steps}"


def numbered_steps(run: RunFolder) -> list[int]:
    """The env steps of all numbered checkpoints, in ascending order."""
    return _steps_of(run, _NUMBERED)


def finalist_name(env_steps: int) -> str:
    """One of the few checkpoints that may be the best at the end of a run."""
    return f"{_FINALIST}{env_steps}"


def finalist_steps(run: RunFolder) -> list[int]:
    """The env steps of all finalists, in ascending order."""
    return _steps_of(run, _FINALIST)


def _steps_of(run: RunFolder, prefix: str) -> list[int]:
    stems = [path.stem.removeprefix(prefix) for path in run.checkpoints.glob(f"{prefix}*.pt")]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def link_checkpoint(run: RunFolder, name: str, target: str) -> None:
    """Replace checkpoint ``target`` by ``name``, without a second copy where the disk allows it."""
    path = checkpoint_path(run, target)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            os.link(checkpoint_path(run, name), temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(checkpoint_path(run, name), temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"could not save {path}: {error}; the previous checkpoint is kept"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)  # os.replace keeps it if both are the same file


def drop_numbered(run: RunFolder, *, keep: int, last: int) -> None:
    """Remove all but the last ``keep`` numbered checkpoints up to env step ``last``.

    Later ones belong to iterations that a resume from an earlier checkpoint has replaced.
    """
    steps = numbered_steps(run)
    kept = [each for each in steps if each <= last][-keep:]
    for each in steps:
        if each not in kept:
            remove(checkpoint_path(run, numbered_name(each)))


def check_plain(value: object, what: str) -> None:
    """Raise an error for a value that ``weights_only=True`` would refuse to load."""
    if isinstance(value, (dict, list, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            check_plain(part, f"{what}[{name!r}]")
    elif type(value) not in _PLAIN:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise CheckpointError(
            f"{what}: a checkpoint cannot contain a {kind}; use numbers, strings, tensors, and "
            "lists or dicts of these"
        )


def save_checkpoint(run: RunFolder, name: str, state: StateDict) -> None:
    """Replace checkpoint ``name``; the previous one stays until the new one is on disk."""
    path = checkpoint_path(run, name)
    content = io.BytesIO()
    config = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
    check_plain(state, "state")
    torch.save({"format": FORMAT, "config": config, **state}, content)
    write_sealed(path, content.getvalue())


def write_sealed(path: Path, data: bytes) -> None:
    """Replace a file by ``data`` and its checksum."""
    trailer = _TRAILER + hashlib.sha256(data).hexdigest().encode() + b"\n"
    try:
        write_atomically(path, lambda file: file.write(data + trailer))
    except OSError as error:
        raise CheckpointError(
            f"could not save {path}: {error}; the previous checkpoint is kept"
        ) from error


def load_checkpoint(run: RunFolder, name: str) -> StateDict:
    """The state saved as ``name``, on the CPU."""
    path = checkpoint_path(run, name)
    if not path.is_file():
        names = sorted(each.stem for each in run.checkpoints.glob("*.pt"))
        has = f"; it has {', '.join(names)}" if names else "; it has none, so train it again"
        raise CheckpointError(f"{run.path} has no checkpoint {name}{has}")
    try:
        state = read_sealed(path)
    except CheckpointError as error:
        others = sorted(each.name for each in run.checkpoints.glob("*.pt") if each != path)
        if not others:
            raise
        raise CheckpointError(f"{error}; the same folder has {', '.join(others)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}")
    for key, kinds in _KINDS.items():
        if key in state and type(state[key]) not in kinds:
            raise CheckpointError(f"{path} is damaged: {key} is a {type(state[key]).__name__}")
    if state.get("env_steps", 0) < 0:
        raise CheckpointError(f"{path} is damaged: env_steps is negative")
    return state


def read_sealed(path: Path) -> Any:
    """The plain data that ``write_sealed`` wrote, if the checksum matches."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    data, trailer = content[:-_TRAILER_SIZE], content[-_TRAILER_SIZE:]
    if not trailer.startswith(_TRAILER):
        raise CheckpointError(
            f"{path} is not a checkpoint of format {FORMAT}: it is truncated or too old"
        )
    if trailer[len(_TRAILER) :].strip() != hashlib.sha256(data).hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    try:
        state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types
        # torch's message is not shown: it suggests weights_only=False, which runs code.
        raise CheckpointError(f"{path} cannot be read: it contains more than plain data") from error
    return state


def best_or_latest(run: RunFolder) -> str:
    """The checkpoint to evaluate by default: the best by evaluation, if it exists."""
    return BEST if checkpoint_path(run, BEST).is_file() else LATEST


def check_fits(own: Any, saved: Any, what: str) -> None:
    """Raise ``ValueError`` if a saved state has values of other types than ``own`` has now.

    None fits everything: a part may be switched on or off. Missing keys are left to the loader.
    """
    if own is None or saved is None:
        return
    if isinstance(own, dict):
        fits = isinstance(saved, dict)
        parts = [(own[key], saved[key], repr(key)) for key in own if fits and key in saved]
    elif isinstance(own, (list, tuple)):
        fits = isinstance(saved, (list, tuple))
        pairs = zip(own, saved, strict=False) if fits else ()
        parts = [(one, other, str(index)) for index, (one, other) in enumerate(pairs)]
    else:
        fits, parts = type(saved) in ((int, float) if type(own) is float else (type(own),)), []
    if isinstance(own, Tensor) and fits and own.dtype != saved.dtype:
        raise ValueError(f"{what} must be {own.dtype}, got {saved.dtype}")
    if not fits:
        kinds = type(own).__name__, type(saved).__name__
        raise ValueError(f"{what} must be a {kinds[0]}, got a {kinds[1]}")
    for one, other, name in parts:
        check_fits(one, other, f"{what}[{name}]")


@contextmanager
def misfit_explained(
    run_folder: RunFolder, passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise ``CheckpointError`` if a state does not fit the objects that load it."""
    try:
        yield
    except Exception as error:  # a state of another run or a damaged one fails in many ways
        if isinstance(error, (UserError, *passes)) or ran_out_of_memory(error):
            raise
        reason = first_line(error, n_lines=2)
        if not isinstance(error, (RuntimeError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(
            f"the checkpoint in {run_folder.path} does not fit its env, agent and network: {reason}"
        ) from error
