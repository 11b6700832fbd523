"""Audit of a replay buffer: counts its transitions and looks for those it must not draw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.windows import by_table

_CHUNK = 4_096  # transitions at a time


class ReplayAudit(NamedTuple):
    """Counts over all transitions that can be drawn; the last four must be 0."""

    n_transitions: int
    n_terminated: int
    n_truncated: int
    n_finals: int  # final observations of truncated episodes
    n_outside: int  # priorities above 0 of rows that must not be drawn
    n_over_head: int  # windows of n steps with a row that is not written yet
    n_over_end: int  # windows of n steps that continue after the end of an episode
    n_resets: int  # transitions that would bootstrap from the first observation of an episode

    @property
    def fault(self) -> str:
        """What is wrong, or an empty string."""
        faults = {
            "rows outside the buffer have a priority": self.n_outside,
            "windows cross the write head": self.n_over_head,
            "windows cross the end of an episode": self.n_over_end,
            "transitions have a reset observation as the next one": self.n_resets,
        }
        return ", ".join(f"{count:,} {what}" for what, count in faults.items() if count)


def audit(buffer: ReplayBuffer) -> ReplayAudit:
    """Look at every transition of a buffer whose rows are loaded."""
    n_envs, size = buffer.n_envs, buffer.size
    first = min(buffer.first_drawn, buffer.n_written) * n_envs
    numbers = torch.arange(first, buffer.n_written * n_envs, device=buffer.device)
    # How many episodes of its env ended before each transition.
    done = buffer.tables["done"][numbers % size].view(-1, n_envs)
    ends_before = (done.cumsum(0) - done.long()).flatten()
    newest = (buffer.n_written - 1) % buffer.n_rows
    n_over_head = n_over_end = n_resets = 0
    for start in range(0, len(numbers), _CHUNK):
        number = numbers[start : start + _CHUNK]
        index = number % size
        last, steps = buffer.windows.ends(index, newest)
        last_number = number + (steps - 1) * n_envs
        over_head = (last_number >= buffer.n_written * n_envs) | (last != last_number % size)
        known = torch.where(over_head, number, last_number)
        n_over_head += int(over_head.sum())
        n_over_end += int((ends_before[known - first] > ends_before[number - first]).sum())
        n_resets += _count_resets(buffer, index, last)
    n_outside = 0
    if buffer.tree is not None:
        outside = torch.ones_like(buffer.tables["done"])
        outside[numbers % size] = False
        n_outside = int((buffer.tree.priorities[outside] > 0).sum())
    terminated = buffer.tables["terminated"][numbers % size]
    return ReplayAudit(
        len(numbers),
        int(terminated.sum()),
        int((done.flatten() & ~terminated).sum()),
        int((buffer.finals.slot_of[numbers % size] >= 0).sum()),
        n_outside,
        n_over_head,
        n_over_end,
        n_resets,
    )


def _count_resets(buffer: ReplayBuffer, index: Tensor, last: Tensor) -> int:
    """Windows that are truncated at ``last``, and whose next observation is not the final one."""
    is_cut = buffer.tables["done"][last] & ~buffer.tables["terminated"][last]
    index, slot = index[is_cut], buffer.finals.slot_of[last[is_cut]]
    lacks_final = slot < 0
    if not len(index) or not len(buffer.finals):
        return int(lacks_final.sum())
    given = buffer.batch(index, torch.ones_like(index, dtype=torch.float32)).next_inputs.obs
    seen = by_table({"": given} if isinstance(given, Tensor) else given, None)
    is_reset = lacks_final
    for name, leaf in seen.items():
        differs = leaf != buffer.finals.tables[name][slot.clamp(min=0)]
        is_reset = is_reset | differs.flatten(1).any(dim=1)
    return int(is_reset.sum())
