"""Minibatches: an order of all transitions in equal parts, and what this rank has of each.

All ranks draw the same order, so the minibatches are those of one process with all envs. One rank
has all of each, and every method of ``WholeMinibatches`` returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Minibatches(NamedTuple):
    """The transitions, or the envs of a recurrent policy, of this rank in each minibatch."""

    parts: Sequence[Tensor] | Tensor  # [n_minibatches, B], or one tensor per minibatch
    shares: Sequence[float] | None = None  # of this rank in each minibatch; None: all of it


class WholeMinibatches:
    """Those of a single rank."""

    def __init__(self, n_rows: int, n_envs: int, n_minibatches: int) -> None:
        self.n_items = n_rows * n_envs
        self._n_minibatches = n_minibatches

    def of(self, order: Tensor) -> Minibatches:
        return Minibatches(order.view(self._n_minibatches, -1))

    def normalised(self, advantage: Tensor, minibatches: Minibatches) -> Tensor:
        return advantage

    def means(self, table: Tensor, minibatches: Minibatches, n_means: int) -> Tensor:
        return table


class SharedMinibatches:
    """Those of several ranks; ``own`` are the columns of this one among ``n_all_envs``."""

    def __init__(
        self,
        n_rows: int,
        n_all_envs: int,
        own: slice,
        n_minibatches: int,
        sum_array: Callable[[NDArray[np.float64]], None],
    ) -> None:
        """``sum_array`` adds up an array over the ranks, in place."""
        self.n_items = n_rows * n_all_envs
        self._n_minibatches = n_minibatches
        self._sum_array = sum_array
        # The place of each transition of all ranks in this rank's rollout; -1: not its own. Looked
        # up for every epoch: the work grows with the number of ranks, and divisions take long.
        places = np.full((n_rows, n_all_envs), -1, np.int32)
        n_envs = own.stop - own.start
        places[:, own] = np.arange(n_rows * n_envs).reshape(n_rows, n_envs)
        self._own_places = places.ravel()

    def of(self, order: Tensor) -> Minibatches:
        places = self._own_places[order.cpu().numpy()]
        own = np.flatnonzero(places >= 0)
        size = self.n_items // self._n_minibatches
        sizes = np.diff(np.searchsorted(own, np.arange(0, self.n_items + 1, size)))
        index = torch.from_numpy(places[own].astype(np.int64)).to(order.device)
        # An empty part takes part with any transition, whose weight is zero.
        nothing, parts = index.new_zeros(1), torch.split(index, sizes.tolist())
        filled = [part if len(part) else nothing for part in parts]
        return Minibatches(filled, (sizes / size).tolist())

    def normalised(self, advantage: Tensor, minibatches: Minibatches) -> Tensor:
        """Zero mean and unit variance over each minibatch of all ranks."""
        parts, shares = minibatches.parts, minibatches.shares or ()
        held = [part for part, share in zip(parts, shares, strict=True) if share]
        filled = np.flatnonzero(shares)
        sizes = [len(each) for each in held]
        index = torch.cat(held) if held else torch.zeros(0, dtype=torch.int64)
        taken = advantage[..., index].double().cpu().numpy()
        columns = taken.reshape(-1, len(index))  # steps of a sequence, else one row
        number = np.repeat(filled, sizes)  # of the minibatch
        sums = partial(np.bincount, number, minlength=self._n_minibatches)
        table = np.concatenate(
            [sums(columns.sum(0)), sums(np.square(columns).sum(0)), sums() * len(columns)]
        )
        self._sum_array(table)
        total, square, count = table.reshape(3, -1)
        mean = total / count
        deviation = np.sqrt(np.maximum(square / count - np.square(mean), 0.0)) + 1e-8
        scaled = (taken - mean[number]) / deviation[number]
        result = advantage.clone()
        result[..., index] = torch.from_numpy(scaled).to(advantage)
        return result

    def means(self, table: Tensor, minibatches: Minibatches, n_means: int) -> Tensor:
        """Means over whole minibatches of the first ``n_means`` columns; the rest are equal."""
        numbers = table.double().cpu().numpy()
        weights = np.array(minibatches.shares)[: len(numbers), None]
        means = np.where(weights > 0, numbers[:, :n_means] * weights, 0.0).ravel()
        self._sum_array(means)
        numbers[:, :n_means] = means.reshape(len(numbers), -1)
        return torch.from_numpy(numbers)
