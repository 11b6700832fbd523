"""What this rank has of a batch that all ranks draw: the transitions of its own envs.

One rank has the whole batch, and every method of ``WholeBatches`` returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Index = Any  # [B] integers: an array, or a tensor on a device


class BatchPart(NamedTuple):
    """The rows of a batch that one of several ranks has."""

    rows: Index  # [n], at least one; an array if the agent takes arrays
    size: int  # of the whole batch
    share: float  # of this rank in the batch; 0: it has no row, and its result does not count


class WholeBatches:
    """Those of a single rank."""

    can_be_compiled = True

    def part(self, index: Index) -> tuple[None, Index]:
        """None, since nothing is split, and the indices of this rank's transitions."""
        return None, index

    def errors(self, error: Any, part: BatchPart | None) -> Any:
        """The TD errors of the whole batch."""
        return error


class SharedBatches:
    """Those of several ranks, with ``n_envs`` each."""

    can_be_compiled = False  # the size of a part depends on what is drawn

    def __init__(
        self, rank: int, n_envs: int, n_all_envs: int, sum_tensor: Callable[[Tensor], Tensor]
    ) -> None:
        """``sum_tensor`` adds up a tensor over the ranks."""
        self._rank = rank
        self._n_envs = n_envs
        self._n_all_envs = n_all_envs
        self._sum_tensor = sum_tensor

    def part(self, index: Index) -> tuple[BatchPart, Index]:
        """This rank's part of a batch, and the indices of its transitions in its own tables."""
        n_own, n_all = self._n_envs, self._n_all_envs
        row, env = index // n_all, index % n_all
        is_own = env // n_own == self._rank
        is_array = isinstance(index, np.ndarray)
        rows: Index = np.flatnonzero(is_own) if is_array else torch.nonzero(is_own).flatten()
        share = len(rows) / len(index)
        if not len(rows):  # takes part with a transition of the same row, whose weight is zero
            rows = np.zeros(1, np.int64) if is_array else rows.new_zeros(1)
        return BatchPart(rows, len(index), share), (row * n_own + env % n_own)[rows]

    def errors(self, error: Any, part: BatchPart | None) -> Any:
        if part is None:
            return error
        own = torch.as_tensor(error)
        whole = torch.zeros(part.size, device=own.device)
        if part.share:
            whole[torch.as_tensor(part.rows)] = own
        return self._sum_tensor(whole)
