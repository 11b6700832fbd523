"""SharedMinibatches: an order of all transitions in equal parts, and what this rank has of each.

All ranks draw the same order, so the minibatches are those of one process with all envs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
        self._n_items = n_rows * n_all_envs
        self._n_minibatches = n_minibatches
        self._sum_array = sum_array
        # The place of each transition of all ranks in this rank's rollout; -1: not its own. Looked
        # up for every epoch: the work grows with the number of ranks, and divisions take long.
        places = np.full((n_rows, n_all_envs), -1, np.int32)
        n_envs = own.stop - own.start
        places[:, own] = np.arange(n_rows * n_envs).reshape(n_rows, n_envs)
        self._own_places = places.ravel()

    def of(self, order: Tensor) -> tuple[Sequence[Tensor], list[float]]:
        """The transitions of this rank in each minibatch, or the envs of a recurrent policy.

        Also its share of each minibatch.
        """
        places = self._own_places[order.cpu().numpy()]
        own = np.flatnonzero(places >= 0)
        size = self._n_items // self._n_minibatches
        sizes = np.diff(np.searchsorted(own, np.arange(0, self._n_items + 1, size)))
        index = torch.from_numpy(places[own].astype(np.int64)).to(order.device)
        # An empty part takes part with any transition, whose weight is zero.
        nothing, parts = index.new_zeros(1), torch.split(index, sizes.tolist())
        filled = [part if len(part) else nothing for part in parts]
        return filled, (sizes / size).tolist()

    def normalised(
        self, advantage: Tensor, parts: Sequence[Tensor], shares: Sequence[float]
    ) -> Tensor:
        """Zero mean and unit variance over each minibatch of all ranks.

        The advantage of a minibatch of one transition is left as it is.
        """
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
        mean[count == 1], deviation[count == 1] = 0.0, 1.0
        scaled = (taken - mean[number]) / deviation[number]
        result = advantage.clone()
        result[..., index] = torch.from_numpy(scaled).to(advantage)
        return result

    def means(self, table: Tensor, shares: Sequence[float], n_means: int) -> Tensor:
        """Means over whole minibatches of the first ``n_means`` columns; the rest are equal."""
        numbers = table.double().cpu().numpy()
        weights = np.array(shares)[: len(numbers), None]
        means = np.where(weights > 0, numbers[:, :n_means] * weights, 0.0).ravel()
        self._sum_array(means)
        numbers[:, :n_means] = means.reshape(len(numbers), -1)
        return torch.from_numpy(numbers)
