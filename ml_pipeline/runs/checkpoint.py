"""Checkpoints: a run's state in one file, written whole or not at all, read without running code.

Only tensors, numbers, strings, and lists and dicts of these may stand in a state: this is what
``weights_only=True`` loads.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ml_pipeline.errors import UserError
from ml_pipeline.protocols import State
from ml_pipeline.runs.run_folder import RunFolder, write_atomically

FORMAT = 1  # raised when an older reader could not make sense of the file

LATEST, BEST = "latest", "best"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or not of this run."""


def checkpoint_path(run: RunFolder, name: str) -> Path:
    return run.checkpoints / f"{name}.pt"


def save_checkpoint(run: RunFolder, name: str, state: State) -> None:
    """Replace checkpoint ``name`` of a run; the old one stays until the new one is on the disk."""
    path = checkpoint_path(run, name)
    try:
        write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"could not save {path}: {reason}; the one before is kept") from error


def load_checkpoint(run: RunFolder, name: str) -> State:
    """The state saved under ``name``, on the CPU."""
    path = checkpoint_path(run, name)
    if not path.is_file():
        raise CheckpointError(f"{run.path} has no checkpoint {path.name}")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        # torch's own words advise to load it with code allowed: never that.
        raise CheckpointError(f"{path} cannot be read: damaged, or more than plain data") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of format {FORMAT}")
    return state


def best_or_latest(run: RunFolder) -> str:
    """The name to evaluate by default: the best by evaluation, where there is one."""
    return BEST if checkpoint_path(run, BEST).is_file() else LATEST
