"""FinalObservations: the last observations of truncated episodes, in slots that are used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.masks import Mask

_FIRST_SLOTS = 64  # their number doubles when all are in use


class FinalObservation(NamedTuple):
    """The last observation of a truncated episode."""

    env: int
    leaves: dict[str, NDArray[Any]]
    mask: Mask | None


class FinalObservations:
    """Tables [n_slots, ...] of the observations and masks, on the device of the replay buffer."""

    def __init__(self, leaves: Mapping[str, Tensor], mask: Tensor | None) -> None:
        """Empty tables [0, ...] with the shapes and dtypes of the values."""
        self.leaves = dict(leaves)
        self.mask = mask
        self._free: list[int] = []

    def __len__(self) -> int:
        """Slots in use or free."""
        return len(next(iter(self.leaves.values())))

    def keep(self, final: FinalObservation) -> int:
        """Store an observation; returns its slot."""
        if not self._free:
            before = len(self)
            self._grow(max(2 * before, _FIRST_SLOTS))
            self._free = list(range(len(self) - 1, before - 1, -1))
        slot = self._free.pop()
        for name, leaf in final.leaves.items():
            table = self.leaves[name]
            table[slot] = torch.as_tensor(leaf).to(table.device)
        if self.mask is not None and final.mask is not None:
            self.mask[slot] = torch.from_numpy(final.mask).to(self.mask.device)
        return slot

    def release(self, slots: Iterable[int]) -> None:
        self._free += slots

    def _grow(self, size: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            new[: len(old)] = old
            return new

        self.leaves = {name: grown(leaf) for name, leaf in self.leaves.items()}
        if self.mask is not None:
            self.mask = grown(self.mask)
