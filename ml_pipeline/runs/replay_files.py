"""Replay files: the transitions of an off-policy run on disk, each written once.

A checkpoint names the files that hold its transitions. Saving writes the rows since the last
checkpoint into new files. A file is removed once no checkpoint names it: that is after all its
rows have left the replay buffer. Each of several ranks writes its own files.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ml_pipeline.protocols import KeepsReplay, StateDict
from ml_pipeline.runs.checkpoint import (
    CheckpointError,
    check_plain,
    load_checkpoint,
    numbered_name,
    numbered_steps,
    read_sealed,
    write_sealed,
)
from ml_pipeline.runs.run_folder import RunFolder, remove
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.rank_replay import own_rows
from ml_pipeline.training.replay_buffer import ReplayBuffer
from ml_pipeline.training.replay_rows import load_rows, row_bytes, rows_of

_FILE_BYTES = 2**28  # about the size of a file at most, since saving copies its content in memory


def save_replay(run: RunFolder, loop: Loop) -> None:
    """Write the rows that are not in a file yet; call this before the checkpoint is saved."""
    buffer = _buffer_of(loop)
    if buffer is not None:
        write_replay(run, buffer)


def write_replay(run: RunFolder, buffer: ReplayBuffer) -> None:
    """Write the rows that are not in a file yet, and name the files in the buffer's state."""
    first, last = max(buffer.n_saved, buffer.oldest), buffer.n_written
    buffer.segments = [each for each in buffer.segments if each["last"] > buffer.oldest]
    run.replay.mkdir(exist_ok=True)
    n_rows = max(_FILE_BYTES // row_bytes(buffer), 1)
    for start in range(first, last, n_rows):
        _write(run, buffer, start, min(start + n_rows, last))


def _write(run: RunFolder, buffer: ReplayBuffer, first: int, last: int) -> None:
    rows = rows_of(buffer, first, last)
    check_plain(rows, "replay")
    content = io.BytesIO()
    torch.save(rows, content)
    name = f"{first}-{last}-{secrets.token_hex(8)}.rows"
    write_sealed(run.replay / name, content.getvalue())
    buffer.segments = [*buffer.segments, {"name": name, "first": first, "last": last}]
    buffer.n_saved = last


def load_replay(run: RunFolder, loop: Loop, state: StateDict, rank: int = 0) -> None:
    """Read the transitions of the checkpoint that ``loop`` has just loaded."""
    buffer = _buffer_of(loop)
    if buffer is not None:
        read_replay(run, buffer, state.get("rank_segments"), rank)


def read_replay(
    run: RunFolder,
    buffer: ReplayBuffer,
    rank_segments: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    rank: int = 0,
) -> None:
    """Read the files that the state of ``buffer`` names.

    ``rank_segments``: the files of another number of ranks; ``buffer`` takes the envs of ``rank``.
    """
    segments = buffer.segments if rank_segments is None else rank_segments[0]
    others = [] if rank_segments is None else rank_segments[1:]
    own = slice(rank * buffer.n_envs, (rank + 1) * buffer.n_envs)
    # In order: a later file replaces rows of an earlier one.
    for segment, *rest in zip(segments, *others, strict=True):
        span = first, last = segment["first"], segment["last"]
        if any((each["first"], each["last"]) != span for each in rest):
            raise CheckpointError(f"{run.path}: its ranks saved different rows; train it again")
        parts = [_read(run, str(each["name"])) for each in (segment, *rest)]
        rows = parts[0] if rank_segments is None else own_rows(parts, last - first, own)
        load_rows(buffer, first, last, rows)
    _check_complete(run, buffer, segments)


def _read(run: RunFolder, name: str) -> Any:
    path = run.replay / name
    if path.parent != run.replay or not path.is_file():
        raise CheckpointError(f"{path} is missing; it holds transitions of the checkpoint")
    return read_sealed(path)


def _check_complete(
    run: RunFolder, buffer: ReplayBuffer, segments: Sequence[Mapping[str, Any]]
) -> None:
    first = buffer.n_written
    for segment in reversed(segments):
        if segment["last"] >= first:
            first = min(first, segment["first"])
    if first == buffer.n_written > buffer.oldest:
        raise CheckpointError(
            f"{run.path}: the checkpoint was saved without its newest transitions; "
            "resume from latest"
        )
    if first > buffer.oldest:  # agent.buffer_size is larger than it was
        buffer.forget_before(first)


def sweep_replay(run: RunFolder, state: StateDict) -> None:
    """Remove the files that no checkpoint names; ``state`` is that of the latest."""
    if "replay" not in state or not run.replay.is_dir():
        return
    kept = replay_names(state)
    unused = [path for path in run.replay.glob("*.rows") if path.name not in kept]
    for env_steps in numbered_steps(run) if unused else ():
        try:
            state = load_checkpoint(run, numbered_name(env_steps))
        except CheckpointError:  # nothing can be resumed from it
            continue
        kept |= replay_names(state)
    for path in unused:
        if path.name not in kept:
            remove(path)


def replay_names(state: StateDict) -> set[str]:
    """The files that a checkpoint needs, of all ranks."""
    parts = [state, *state.get("ranks", [])]
    return {segment["name"] for part in parts for segment in part["replay"]["segments"]}


def _buffer_of(loop: Loop) -> ReplayBuffer | None:
    return loop.trainer.replay if isinstance(loop.trainer, KeepsReplay) else None
