"""Checkpoints: a run's state in one file, written whole or not at all, read without running code.

Only tensors, numbers, strings, and lists and dicts of these may stand in a state: this is what
``weights_only=True`` loads. The file is torch's own format and ends in a line with the SHA-256 of
all before it, which other readers pass over.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.errors import UserError
from ml_pipeline.protocols import StateDict
from ml_pipeline.runs.run_folder import RunFolder, write_atomically
from ml_pipeline.training.out_of_memory import ran_out_of_memory

FORMAT = 2  # raised when an older reader could not make sense of the file

LATEST, BEST = "latest", "best"

_PLAIN = (Tensor, int, float, bool, str, bytes, type(None))  # the types themselves, no subclass

_TRAILER = b"\nml_pipeline sha256 "
_TRAILER_SIZE = len(_TRAILER) + 64 + 1


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or not of this run."""


def checkpoint_path(run: RunFolder, name: str) -> Path:
    return run.checkpoints / f"{name}.pt"


def check_plain(value: Any, what: str) -> None:
    """Refuse what could be saved, but not be loaded again without running code."""
    if isinstance(value, (dict, list, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            check_plain(part, f"{what}[{name!r}]")
    elif type(value) not in _PLAIN:
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise CheckpointError(
            f"{what} is a {kind}, which a checkpoint cannot hold: make it a number, a string, a "
            "tensor, or a list or dict of these"
        )


def save_checkpoint(run: RunFolder, name: str, state: StateDict) -> None:
    """Replace checkpoint ``name`` of a run; the old one stays until the new one is on the disk."""
    path = checkpoint_path(run, name)
    content = io.BytesIO()
    config = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
    check_plain(state, "state")
    torch.save({"format": FORMAT, "config": config, **state}, content)
    data = content.getvalue()
    trailer = _TRAILER + hashlib.sha256(data).hexdigest().encode() + b"\n"
    try:
        write_atomically(path, lambda file: file.write(data + trailer))
    except OSError as error:
        raise CheckpointError(f"could not save {path}: {error}; the one before is kept") from error


def load_checkpoint(run: RunFolder, name: str) -> StateDict:
    """The state saved under ``name``, on the CPU."""
    path = checkpoint_path(run, name)
    if not path.is_file():
        raise CheckpointError(f"{run.path} has no checkpoint {path.name}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    data, trailer = content[:-_TRAILER_SIZE], content[-_TRAILER_SIZE:]
    if not trailer.startswith(_TRAILER):
        raise CheckpointError(
            f"{path} is no checkpoint of format {FORMAT}: it is cut off, or of an older version"
        )
    if trailer[len(_TRAILER) :].strip() != hashlib.sha256(data).hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its checksum does not fit what it holds")
    try:
        state: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        # torch's own words advise to load it with code allowed: never that.
        raise CheckpointError(f"{path} cannot be read: it holds more than plain data") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of format {FORMAT}")
    return state


def best_or_latest(run: RunFolder) -> str:
    """The name to evaluate by default: the best by evaluation, where there is one."""
    return BEST if checkpoint_path(run, BEST).is_file() else LATEST


@contextmanager
def misfit_explained(run_folder: RunFolder) -> Iterator[None]:
    """Tell a state that does not fit the objects it is loaded into from a failure of ours."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise CheckpointError(
            f"the checkpoint in {run_folder.path} does not fit its env, agent and network: {reason}"
        ) from error
