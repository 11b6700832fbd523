"""Rows of a replay buffer as plain tensors, for the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.training.env_batch import FinalObservation


def rows_of(buffer: ReplayBuffer, first: int, last: int) -> dict[str, Tensor]:
    """The rows from ``first`` to ``last``, counted from the start of the run, on the CPU."""
    spans = _spans(buffer, first, last)
    slot = torch.cat([buffer.finals.slot_of[span] for span in spans])
    has_final = torch.nonzero(slot >= 0).flatten()
    rows: dict[str, Any] = {"final_at": has_final}
    for name, table, finals in _tables(buffer):
        rows[name] = torch.cat([table[span] for span in spans])
        if finals is not None:
            rows[f"final {name}"] = finals[slot[has_final]]
    return {name: values.cpu() for name, values in rows.items()}


def load_rows(buffer: ReplayBuffer, first: int, last: int, rows: Mapping[str, Tensor]) -> None:
    """Put rows back; those that are no longer in the ring are ignored."""
    _check(buffer, rows, last - first)
    skipped = max(buffer.oldest - first, 0) * buffer.n_envs
    read = skipped
    for span in _spans(buffer, max(first, buffer.oldest), last):
        part = slice(read, read + span.stop - span.start)
        for name, table, _ in _tables(buffer):
            table[span] = rows[name][part].to(buffer.device)
        buffer.finals.release(span)
        buffer.finals.slot_of[span] = -1
        read = part.stop
    finals = {name for name, _, kept in _tables(buffer) if kept is not None}
    for number, at in enumerate(rows["final_at"].tolist()):
        if at < skipped:
            continue
        one = {name: rows[f"final {name}"][number].numpy() for name in finals}
        mask = one.pop("mask", None)
        leaves = {name.removeprefix("obs "): value for name, value in one.items()}
        place = (first * buffer.n_envs + at) % len(buffer.done)
        buffer.finals.keep(place, FinalObservation(place % buffer.n_envs, leaves, mask))


def row_bytes(buffer: ReplayBuffer) -> int:
    """What a row holds, without final observations and priorities."""
    return sum(table.nbytes for _, table, _ in _tables(buffer)) // buffer.n_rows


def n_bytes(buffer: ReplayBuffer) -> int:
    """Memory of the buffer."""
    finals = sum(kept.nbytes for _, _, kept in _tables(buffer) if kept is not None)
    tree = 0 if buffer.tree is None else buffer.tree.n_bytes
    return buffer.n_rows * row_bytes(buffer) + buffer.finals.slot_of.nbytes + finals + tree


def _spans(buffer: ReplayBuffer, first: int, last: int) -> list[slice]:
    """The rows from ``first`` to ``last`` as slices: two if they pass the end of the ring."""
    start, size = buffer.place(first).start, len(buffer.done)
    stop = start + max(last - first, 0) * buffer.n_envs
    return [slice(start, min(stop, size)), slice(0, max(stop - size, 0))]


def _check(buffer: ReplayBuffer, rows: Mapping[str, Tensor], n_rows: int) -> None:
    if len(rows["reward"]) != n_rows * buffer.n_envs:
        n_envs = len(rows["reward"]) // n_rows
        raise ValueError(f"n_envs={buffer.n_envs}: the replay files have {n_envs} envs")
    for name, table, _ in _tables(buffer):
        if name not in rows or rows[name].shape[1:] != table.shape[1:]:
            key = f"agent.stacked_frames={buffer.stacks.n_frames}"
            raise ValueError(f"{key}: {name!r} has another shape in the replay files")


def _tables(buffer: ReplayBuffer) -> list[tuple[str, Tensor, Tensor | None]]:
    """Every table by name, and the table of its final values if it has one."""
    tables: list[tuple[str, Tensor, Tensor | None]] = [
        (f"obs {name}", leaf, buffer.finals.leaves[name]) for name, leaf in buffer.obs.items()
    ]
    if buffer.mask is not None:
        tables.append(("mask", buffer.mask, buffer.finals.mask))
    for name in ("action", "reward", "terminated", "done"):
        tables.append((name, getattr(buffer, name), None))
    return tables
