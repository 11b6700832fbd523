"""The order in which epochs visit a rollout; seed and epoch decide it, on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.training.graphs import Programs, send


class HostOrders:
    """Shuffled on the host, for rollouts that are collected there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._orders: Sequence[Tensor] | Tensor | None = None

    def draw(self, generator: torch.Generator, n_orders: int, n_items: int) -> None:
        """New orders of 0 .. n_items - 1, one per epoch."""
        orders = [torch.randperm(n_items, generator=generator) for _ in range(n_orders)]
        if self._device.type == "cpu":
            self._orders = orders
            return
        stacked = torch.stack(orders)
        if not isinstance(self._orders, Tensor) or len(self._orders) != n_orders:
            self._orders = torch.empty_like(stacked, device=self._device)
        send(stacked, self._orders)

    def __getitem__(self, epoch: int) -> Tensor:
        if self._orders is None:
            raise RuntimeError("the rollout is not shuffled; call shuffle first")
        return self._orders[epoch]


class DeviceOrders:
    """Computed on the device, from one key per epoch that the host draws."""

    def __init__(self, device: torch.device, programs: Programs) -> None:
        self.keys = torch.zeros(1, dtype=torch.int64, device=device)
        self._n_items = 0
        self._permutation = programs.compiled(counter_random.permutation, "the shuffle")

    def draw(self, generator: torch.Generator, n_orders: int, n_items: int) -> None:
        """New orders of 0 .. n_items - 1, one per epoch."""
        self._n_items = n_items
        keys = counter_random.draw_keys(n_orders, generator)
        if len(self.keys) != n_orders:
            self.keys = torch.empty_like(keys, device=self.keys.device)
        send(keys, self.keys)

    def __getitem__(self, epoch: int) -> Tensor:
        order: Tensor = self._permutation(self._n_items, self.keys[epoch])
        return order
