"""Replay files: the transitions of an off-policy run on disk, each written once.

A checkpoint names the files that hold its transitions. Saving writes one new file with the rows
since the last checkpoint. Files are removed once all their rows have left the replay buffer.
"""

from __future__ import annotations

import io
import secrets
from typing import Any

import torch

from ml_pipeline.protocols import KeepsReplay
from ml_pipeline.runs.checkpoint import CheckpointError, check_plain, read_sealed, write_sealed
from ml_pipeline.runs.run_folder import RunFolder, remove
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.replay_rows import load_rows, rows_of


def save_replay(run: RunFolder, loop: Loop) -> None:
    """Write the rows that are not in a file yet; call this before the checkpoint is saved."""
    buffer = _buffer_of(loop)
    if buffer is None:
        return
    first, last = max(buffer.n_saved, buffer.oldest), buffer.n_written
    buffer.segments = [each for each in buffer.segments if each["last"] > buffer.oldest]
    if first >= last:
        return
    rows = rows_of(buffer, first, last)
    check_plain(rows, "replay")
    content = io.BytesIO()
    torch.save(rows, content)
    run.replay.mkdir(exist_ok=True)
    name = f"{first}-{last}-{secrets.token_hex(4)}.rows"
    write_sealed(run.replay / name, content.getvalue())
    buffer.segments = [*buffer.segments, {"name": name, "first": first, "last": last}]
    buffer.n_saved = last


def load_replay(run: RunFolder, loop: Loop) -> None:
    """Read the transitions of the checkpoint that ``loop`` has just loaded."""
    buffer = _buffer_of(loop)
    if buffer is None:
        return
    for segment in buffer.segments:  # in order: a later file replaces rows of an earlier one
        path = run.replay / str(segment["name"])
        if path.parent != run.replay or not path.is_file():
            raise CheckpointError(f"{path} is missing; it holds transitions of the checkpoint")
        load_rows(buffer, segment["first"], segment["last"], read_sealed(path))


def sweep_replay(run: RunFolder, loop: Loop) -> None:
    """Remove the files that the saved checkpoint does not name."""
    buffer = _buffer_of(loop)
    if buffer is None or not run.replay.is_dir():
        return
    kept = {segment["name"] for segment in buffer.segments}
    for path in run.replay.glob("*.rows"):
        if path.name not in kept:
            remove(path)


def _buffer_of(loop: Loop) -> Any:
    return loop.trainer.replay if isinstance(loop.trainer, KeepsReplay) else None
