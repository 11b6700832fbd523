"""FinalObservations: the last observations of truncated episodes, in slots that are used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.training.env_batch import FinalObservation

_FIRST_SLOTS = 64  # or a 256th of the transitions; their number doubles when all are in use


class FinalObservations:
    """Tables [n_slots, ...] of the observations and masks, on the device of the replay buffer."""

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        mask: Tensor | None,
        n_transitions: int,
        *,
        has_all_slots: bool,
    ) -> None:
        """``leaves`` and ``mask`` are empty tables with the shapes and dtypes of the values.

        ``has_all_slots``: each transition has its own slot, for envs on the device.
        """
        self.leaves = dict(leaves)
        self.mask = mask
        self._has_all_slots = has_all_slots
        self._slots = np.full(n_transitions, -1)
        host = torch.from_numpy(self._slots)  # on the CPU the same memory
        self.slot_of = host.to(next(iter(leaves.values())).device)  # of a transition; -1: none
        self._free: list[int] = []
        if has_all_slots:
            self._grow(n_transitions)

    def __len__(self) -> int:
        """Slots in use or free."""
        return len(next(iter(self.leaves.values())))

    def replace(self, place: slice, finals: Sequence[FinalObservation]) -> NDArray[np.int64]:
        """The finals of a new row; returns its part of ``slot_of``, which the caller writes."""
        self.release(place)
        for final in finals:
            self._slots[place.start + final.env] = self._stored(final, self._free_slot())
        return self._slots[place]

    def keep(self, at: int, final: FinalObservation) -> None:
        """Store the final observation of the transition ``at``."""
        slot = self._stored(final, at if self._has_all_slots else self._free_slot())
        self._slots[at] = slot
        self.slot_of[at] = slot

    def release(self, place: Any) -> None:
        """Free the slots of transitions that are overwritten."""
        held = self._slots[place]
        if (used := held[held >= 0]).size:
            self._free += used.tolist()
            self._slots[place] = -1

    def _stored(self, final: FinalObservation, slot: int) -> int:
        for name, leaf in final.leaves.items():
            table = self.leaves[name]
            table[slot] = torch.as_tensor(leaf).to(table.device)
        if self.mask is not None and final.mask is not None:
            self.mask[slot] = torch.from_numpy(final.mask).to(self.mask.device)
        return slot

    def _free_slot(self) -> int:
        if not self._free:
            before = len(self)
            self._grow(max(2 * before, _FIRST_SLOTS, len(self._slots) // 256))
            self._free = list(range(len(self) - 1, before - 1, -1))
        return self._free.pop()

    def _grow(self, size: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            new[: len(old)] = old
            return new

        self.leaves = {name: grown(leaf) for name, leaf in self.leaves.items()}
        if self.mask is not None:
            self.mask = grown(self.mask)
