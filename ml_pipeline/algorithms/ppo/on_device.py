"""What PPO computes differently on a device: random numbers, epochs in one graph, and the time.

The host draws one key per rollout or epoch. From it the device computes the noise of the actions
and the orders of the minibatches, so that nothing large is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.ranks.world import World
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.graphs import Programs, send


class DeviceNoise:
    """The noise of a rollout, computed on the device from a key that the host draws."""

    def __init__(
        self, agent: Actor, n_steps: int, n_envs: int, world: World, programs: Programs
    ) -> None:
        distribution, own = agent.distribution, world.envs(n_envs)
        shape = distribution.noise_shape(n_steps, world.all_envs(n_envs))

        def noise(key: Tensor) -> Tensor:
            normal, uniform = partial(counter_random.randn, key), partial(counter_random.rand, key)
            return distribution.noise_from(normal, uniform, shape)[:, own]

        self._key = torch.zeros((), dtype=torch.int64, device=agent.device)
        self._noise = programs.compiled(noise, "the noise of the actions")

    def draw(self, generator: torch.Generator) -> None:
        send(counter_random.draw_keys(1, generator)[0], self._key)

    def rows(self) -> Tensor:
        return self._noise(self._key)


class DeviceEpochs:
    """Passes of an agent over a rollout, in one call; on a GPU captured as one graph."""

    def __init__(
        self,
        epoch: Callable[[Tensor, Rates], Tensor],
        orders: SentOrders | DeviceOrders,
        n_epochs: int,
        programs: Programs,
    ) -> None:
        """``epoch`` takes the order of the transitions and the rates."""
        self.n_epochs = n_epochs
        self._epoch = epoch
        self._orders = orders
        self._rates = torch.zeros(len(Rates._fields), device=orders.device)
        self._captured: Callable[[], Tensor] = programs.captured(self._run, "the update")

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """The rows of all epochs; stays on the device."""
        self._orders.draw(generator, self.n_epochs)
        send(torch.tensor(rates), self._rates)
        return self._captured().clone()  # the next replay writes to the same place

    def _run(self) -> Tensor:
        rates = Rates(*self._rates.unbind())
        # All before the first update: the kernels of a captured update then follow each other.
        orders = [self._orders[each] for each in range(self.n_epochs)]
        tables = [self._epoch(order, rates) for order in orders]
        return tables[0] if len(tables) == 1 else torch.cat(tables)


class SentOrders:
    """Orders that the host draws, for a rollout that was collected there."""

    def __init__(self, shuffled: Callable[[torch.Generator], Tensor], device: torch.device) -> None:
        self.device = device
        self._shuffled = shuffled
        self._orders: Tensor | None = None

    def draw(self, generator: torch.Generator, n_orders: int) -> None:
        """New orders, one per epoch."""
        orders = [self._shuffled(generator) for _ in range(n_orders)]
        stacked = torch.stack(orders)
        if self._orders is None:
            self._orders = torch.empty_like(stacked, device=self.device)
        send(stacked, self._orders)

    def __getitem__(self, epoch: int) -> Tensor:
        if self._orders is None:
            raise RuntimeError("there is no order yet; call draw first")
        return self._orders[epoch]


class DeviceOrders:
    """The same computed on the device, from one key per epoch that the host draws."""

    def __init__(self, n_items: int, device: torch.device, programs: Programs) -> None:
        self.device = device
        self.keys = torch.zeros(1, dtype=torch.int64, device=device)
        self._n_items = n_items
        self._permutation = programs.compiled(counter_random.permutation, "the shuffle")

    def draw(self, generator: torch.Generator, n_orders: int) -> None:
        keys = counter_random.draw_keys(n_orders, generator)
        if len(self.keys) != n_orders:
            self.keys = torch.empty_like(keys, device=self.device)
        send(keys, self.keys)

    def __getitem__(self, epoch: int) -> Tensor:
        order: Tensor = self._permutation(self._n_items, self.keys[epoch])
        return order


class GpuStopwatch:
    """Measures the work of a GPU between ``start`` and ``stop``, by events in its stream."""

    def __init__(self) -> None:
        self._begin = self._end = self._new_event()

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self._begin = self._new_event()
        self._begin.record()

    def stop(self) -> None:
        self._end = self._new_event()
        self._end.record()

    def seconds(self) -> float:
        """Waits for the end of the work."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0
