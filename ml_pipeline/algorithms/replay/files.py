"""Replay files: the transitions of an off-policy run on disk, each written once.

A checkpoint names the files that hold its transitions. Saving writes the rows since the last
checkpoint into new files. Each of several ranks writes its own files.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.rank_replay import own_rows
from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import FileStore


class LostFile(NamedTuple):
    """A file of transitions that cannot be read."""

    first: int  # its rows, counted from the start of the run
    last: int
    error: str


_FILE_BYTES = 2**28  # about the size of a file at most, since saving copies its content in memory


def write_replay(files: FileStore, buffer: ReplayBuffer) -> None:
    """Write the rows that are not in a file yet, and name the files in the buffer's state."""
    first, last = max(buffer.n_saved, buffer.oldest), buffer.n_written
    buffer.segments = [each for each in buffer.segments if each["last"] > buffer.oldest]
    n_rows = max(_FILE_BYTES // buffer.row_bytes, 1)
    for start in range(first, last, n_rows):
        _write(files, buffer, start, min(start + n_rows, last))


def _write(files: FileStore, buffer: ReplayBuffer, first: int, last: int) -> None:
    name = f"{first}-{last}-{secrets.token_hex(8)}.rows"
    files.write(name, rows_of(buffer, first, last))
    buffer.segments = [*buffer.segments, {"name": name, "first": first, "last": last}]
    buffer.n_saved = last


Segment = Mapping[str, Any]  # name, first, last


def find_lost(
    files: FileStore, buffer: ReplayBuffer, rank_segments: Sequence[Sequence[Segment]] | None = None
) -> list[LostFile]:
    """The files that ``read_replay`` could not read; the arguments are the same."""
    lost = []
    for segment in chain(*([buffer.segments] if rank_segments is None else rank_segments)):
        try:
            files.read(str(segment["name"]))
        except UserError as error:
            lost.append(LostFile(segment["first"], segment["last"], str(error)))
    return lost


def read_replay(
    files: FileStore,
    buffer: ReplayBuffer,
    rank_segments: Sequence[Sequence[Segment]] | None = None,
    rank: int = 0,
    lost: Sequence[LostFile] | None = None,
) -> None:
    """Read the files that the state of ``buffer`` names.

    ``rank_segments``: the files of another number of ranks; ``buffer`` takes the envs of ``rank``.
    ``lost``: leave out the rows of these files, those of all ranks. The rows before them move up,
    or are lost too if frames are stacked.
    """
    segments = buffer.segments if rank_segments is None else rank_segments[0]
    others = [] if rank_segments is None else rank_segments[1:]
    own = slice(rank * buffer.n_envs, (rank + 1) * buffer.n_envs)
    spans = [(each.first, each.last) for each in lost or ()]
    kept = [
        each
        for each in zip(segments, *others, strict=True)
        if (each[0]["first"], each[0]["last"]) not in spans
    ]
    shifts = _shifts(buffer, [segment for segment, *_ in kept])
    if buffer.stacks.n_frames > 1 and any(shifts):
        # The stacks after a gap need its frames, so the rows before it cannot move up.
        kept = [each for each, shift in zip(kept, shifts, strict=False) if shift == 0]
        shifts = [0] * (len(kept) + 1)
    is_cut_at_head = bool(kept) and shifts[-2] != 0
    if lost is None and (is_cut_at_head or not kept) and buffer.n_written > buffer.oldest:
        raise UserError(
            "the checkpoint was saved without its newest transitions; resume from latest"
        )
    current = buffer.current_row()
    # In order: a later file replaces rows of an earlier one.
    for (segment, *rest), shift, next_shift in zip(kept, shifts, shifts[1:], strict=False):
        span = first, last = segment["first"], segment["last"]
        if any((each["first"], each["last"]) != span for each in rest):
            raise UserError("the ranks of the checkpoint saved different rows; train it again")
        parts = [files.read(str(each["name"])) for each in (segment, *rest)]
        rows = parts[0] if rank_segments is None else own_rows(parts, last - first, own)
        load_rows(buffer, first + shift, last + shift, rows)
        if shift != next_shift:
            buffer.cut_before(last + shift - 1)
    if is_cut_at_head:
        buffer.restore_row(current)
    first = kept[0][0]["first"] + shifts[0] if kept else buffer.n_written
    if first > buffer.oldest:  # agent.buffer_size is larger than it was, or rows are lost
        buffer.forget_before(first)
    if any(shifts) or len(kept) < len(segments):
        buffer.segments, buffer.n_saved = [], 0  # the next checkpoint writes all rows


def _shifts(buffer: ReplayBuffer, segments: Sequence[Segment]) -> list[int]:
    """By how many rows each segment moves up to close the gaps after it; the last is 0.

    The row after a gap replaces the one before it, whose next observation is lost.
    """
    shifts, follows = [0], buffer.n_written
    for segment in reversed(segments):
        gap = follows - segment["last"]
        shifts.append(shifts[-1] + (gap + 1 if gap > 0 else 0))
        follows = segment["first"]
    return shifts[::-1]


def replay_names(state: StateDict) -> set[str]:
    """The files that a checkpoint needs, of all ranks."""
    parts = [state, *state.get("ranks", [])]
    return {segment["name"] for part in parts for segment in part["replay"]["segments"]}


def rows_of(buffer: ReplayBuffer, first: int, last: int) -> dict[str, Tensor]:
    """The rows from ``first`` to ``last``, counted from the start of the run, on the CPU."""
    spans = _spans(buffer, first, last)
    rows = {
        name: torch.cat([table[span] for span in spans]) for name, table in buffer.tables.items()
    }
    slot = rows.pop("final")
    has_final = torch.nonzero(slot >= 0).flatten()
    rows["final_at"] = has_final
    for name, finals in buffer.finals.tables.items():
        rows[f"final {name}"] = finals[slot[has_final]]
    return {name: values.cpu() for name, values in rows.items()}


def load_rows(buffer: ReplayBuffer, first: int, last: int, rows: Mapping[str, Tensor]) -> None:
    """Put rows back; those that are no longer in the ring are ignored."""
    _check(buffer, rows, last - first)
    skipped = max(buffer.oldest - first, 0) * buffer.n_envs
    read = skipped
    for span in _spans(buffer, max(first, buffer.oldest), last):
        part = slice(read, read + span.stop - span.start)
        for name, table in buffer.tables.items():
            if name != "final":
                table[span] = rows[name][part].to(buffer.device)
        buffer.finals.release(span)
        buffer.finals.slot_of[span] = -1
        read = part.stop
    for number, at in enumerate(rows["final_at"].tolist()):
        if at >= skipped:
            place = (first * buffer.n_envs + at) % buffer.size
            values = {name: rows[f"final {name}"][number] for name in buffer.finals.tables}
            buffer.finals.keep(place, values)


def _spans(buffer: ReplayBuffer, first: int, last: int) -> list[slice]:
    """The rows from ``first`` to ``last`` as slices: two if they pass the end of the ring."""
    start, size = buffer.place(first).start, buffer.size
    stop = start + max(last - first, 0) * buffer.n_envs
    return [slice(start, min(stop, size)), slice(0, max(stop - size, 0))]


def _check(buffer: ReplayBuffer, rows: Mapping[str, Tensor], n_rows: int) -> None:
    if len(rows["reward"]) != n_rows * buffer.n_envs:
        n_envs = len(rows["reward"]) // n_rows
        raise ValueError(f"n_envs={buffer.n_envs}: the replay files have {n_envs} envs")
    for name, table in buffer.tables.items():
        if name != "final" and (name not in rows or rows[name].shape[1:] != table.shape[1:]):
            key = f"agent.stacked_frames={buffer.stacks.n_frames}"
            raise ValueError(f"{key}: {name!r} has another shape in the replay files")
