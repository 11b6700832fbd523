"""DeviceRows: writes rows of a replay buffer on a device, without a wait.

The number of rows written is a tensor on the device, so that a graph can be captured for the write
and for everything that samples from the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ml_pipeline.training.env_batch import ArrayOrTensor
from ml_pipeline.training.graphs import Programs


class DeviceRows:
    """Rows of ``n_envs`` transitions in a ring of ``n_rows``, of which ``n_drawn`` are drawn."""

    def __init__(
        self,
        row_tables: Mapping[str, Tensor],
        next_tables: Mapping[str, Tensor],
        programs: Programs,
        *,
        n_envs: int,
        n_all_envs: int,
        n_drawn: int,
    ) -> None:
        """``row_tables`` hold the current row; ``next_tables`` what the envs observe after it.

        ``counts`` are those of ``n_all_envs``, the envs of all ranks.
        """
        self._row_tables = row_tables
        self._next_tables = next_tables
        self._n_envs = n_envs
        self._n_all_envs = n_all_envs
        self._n_drawn = n_drawn
        table = row_tables["reward"]
        self._n_rows, device = len(table) // n_envs, table.device
        self._written, self._first = torch.zeros(2, dtype=torch.int64, device=device)
        # Transitions that can be drawn, index of the first of them, number of the newest row.
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._offsets = torch.arange(n_envs, device=device)
        self._offsets_of_all = torch.arange(n_all_envs, device=device)
        self._staged: dict[str, Tensor] = {}
        self._send_staged = programs.captured(self._insert_staged, "a write to the replay buffer")

    def count(self, n_written: int, first: int) -> None:
        """Continue after ``n_written`` rows, of which those before ``first`` are lost."""
        self._written.fill_(n_written)
        self._first.fill_(first)
        self._update_counts()

    def place(self, before: int = 0) -> Tensor:
        """Indices of the row with the current observations, or of one ``before`` it."""
        row: Tensor = (self._written - before) % self._n_rows
        return row * self._n_envs + self._offsets

    def places_of_all(self, before: int) -> Tensor:
        """Indices of an earlier row among the envs of all ranks, for their priorities."""
        row: Tensor = (self._written - before) % self._n_rows
        return row * self._n_all_envs + self._offsets_of_all

    def write(self, values: Mapping[str, ArrayOrTensor]) -> None:
        """Insert arrays of the host.

        The caller must wait for the device before the next call, as it does to read its actions.
        """
        for name, value in values.items():
            if name not in self._staged:
                table = self._row_tables.get(name, self._next_tables.get(name))
                if table is None:
                    raise KeyError(name)
                staged = torch.zeros((self._n_envs, *table.shape[1:]), dtype=table.dtype)
                is_cuda = table.device.type == "cuda"
                self._staged[name] = staged.pin_memory() if is_cuda else staged
            self._staged[name].numpy()[...] = value
        self._send_staged()

    def _insert_staged(self) -> None:
        device = self.counts.device
        self.insert({k: each.to(device, non_blocking=True) for k, each in self._staged.items()})

    def insert(self, values: Mapping[str, Tensor]) -> None:
        """Complete the current row, and store the observations that follow it."""
        here = self.place()
        for name, table in self._row_tables.items():
            table.index_copy_(0, here, values[name])
        self._written += 1
        following = self.place()
        for name, table in self._next_tables.items():
            table.index_copy_(0, following, values[name])
        self._update_counts()

    def _update_counts(self) -> None:
        written = self._written
        n_drawn = (written - self._first).clamp(max=self._n_drawn)
        first = (written - n_drawn) % self._n_rows
        newest = (written - 1) % self._n_rows
        n_envs = self._n_all_envs
        self.counts.copy_(torch.stack([n_drawn * n_envs, first * n_envs, newest]))
