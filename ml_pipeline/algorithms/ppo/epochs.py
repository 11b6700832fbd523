"""Epochs: passes over a finished rollout, in shuffled minibatches; on a GPU captured as one graph.

Seed and epoch decide the order, on every device. Each gradient step leaves one row of a table, from
which metrics and errors are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import Rates, UpdateResult
from ml_pipeline.algorithms.ppo.rollout import RolloutBuffer
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import Metrics
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.graphs import Programs, send

_METRIC_NAMES = {
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy": "policy/entropy",
    "approx_kl": "policy/approx_kl",
    "clip_fraction": "policy/clip_fraction",
    "grad_norm": "loss/grad_norm",
}
_N_MEANS = UpdateResult._fields.index("grad_norm")  # the fields before it: means over a minibatch


class Epochs:
    """Each ``run`` makes ``n_epochs`` passes of ``agent`` over all minibatches of ``buffer``.

    Several ranks share each minibatch: each computes the gradient of its own transitions, and
    ``FlatAdam`` averages the gradients.
    """

    def __init__(
        self,
        agent: PPOAgent,
        buffer: RolloutBuffer,
        programs: Programs,
        *,
        n_epochs: int,
        n_minibatches: int,
        on_host: bool,
        world: World = ALONE,
    ) -> None:
        """``on_host``: buffer and agent share host memory, so the rates stay Python floats."""
        self.n_epochs = n_epochs
        self._agent = agent
        self._buffer = buffer
        self._world = world
        n_rows = buffer.n_items // buffer.n_envs
        self._minibatches = world.minibatches(n_rows, buffer.n_envs, n_minibatches)
        self._orders = orders_of(buffer, programs)
        self._rates: Tensor | None = None
        if not on_host:
            self._rates = torch.zeros(len(Rates._fields), device=agent.device)
        self._captured: Callable[[], Tensor] = programs.captured(self._on_device, "the update")

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """One row per gradient step, with the fields of ``UpdateResult``; stays on the device."""
        self._orders.draw(generator, self.n_epochs, self._minibatches.n_items)
        if self._rates is None:
            table = self._run(rates)
        else:
            send(torch.tensor(rates), self._rates)
            table = self._captured().clone()  # the next replay writes to the same place
        self._world.check_equal(lambda: [self._agent.adam.values], "the weights")
        return table

    def _on_device(self) -> Tensor:
        if self._rates is None:
            raise RuntimeError("these epochs run on the host")
        return self._run(Rates(*self._rates.unbind()))

    def _run(self, rates: Rates) -> Tensor:
        agent, rollout, tables = self._agent, self._buffer.finished(), []
        # All before the first update: the kernels of a captured update then follow each other.
        orders = [self._minibatches.of(self._orders[each]) for each in range(self.n_epochs)]
        for order in orders:
            shared = rollout
            if agent.normalises_over_ranks:
                advantage = self._minibatches.normalised(rollout.advantage, order)
                shared = rollout._replace(advantage=advantage)
            # An ``epoch`` of one's own need not know of ranks.
            shares = () if order.shares is None else (order.shares,)
            table = agent.epoch(shared, order.parts, rates, *shares)
            tables.append(self._minibatches.means(table, order, _N_MEANS))
        return tables[0] if len(tables) == 1 else torch.cat(tables)


def update_means(table: NDArray[Any]) -> Metrics:
    """Means over the gradient steps that were not skipped; ``table`` is that of ``Epochs.run``."""
    values, finite = table[:, :-1], table[:, -1] != 0
    n_skipped = int((~finite).sum())
    means = np.where(finite[:, None], values, 0.0).sum(axis=0) / max(len(finite) - n_skipped, 1)
    fields = zip(UpdateResult._fields[:-1], means.tolist(), strict=True)
    metrics = {_METRIC_NAMES[field]: mean for field, mean in fields}
    return {**metrics, "loss/skipped_updates": float(n_skipped)} if n_skipped else metrics


def check_rollout(is_finite: bool) -> None:
    """For tensor envs, whose values are checked once per rollout."""
    if not is_finite:
        raise TrainingError(
            "an env returned an observation or a reward that is not finite. To find it, train a "
            "few envs with compile=off and print what the env's advance returns"
        )


def check_updates(
    table: NDArray[Any],
    *,
    n_minibatches: int,
    loss: Mapping[str, Any],
    first_epoch: int = 1,
    find_broken: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Raise if a gradient step was not finite; ``table`` is that of ``Epochs.run``.

    ``loss`` is the entry agent.loss; a user's own loss is the first suspect.
    ``find_broken`` names parameters with non-finite gradients; None if later steps replaced them.
    """
    finite = table[:, -1] != 0
    if finite.all():
        return
    broken = None if find_broken is None else find_broken()
    row = int(finite.argmin())
    fields = zip(UpdateResult._fields[:-1], table[row, :-1].tolist(), strict=True)
    names = [name for name, value in fields if not math.isfinite(value)]
    if broken:
        names.append(f"the gradients of {', '.join(broken[:3])}{', ...' * (len(broken) > 3)}")
    left = "That step changed nothing" if broken is None else "The weights did not change"
    epoch, minibatch = first_epoch + row // n_minibatches, row % n_minibatches + 1
    target = str(loss["_target_"])
    is_ours = target.startswith("ml_pipeline.")
    suspect = "" if is_ours else f"Look at agent.loss._target_={target} first. "
    raise TrainingError(
        f"epoch {epoch}, minibatch {minibatch}: {' and '.join(names)} not finite. {left}. "
        f"{suspect}Try a smaller agent.learning_rate, and look for huge observations or "
        "rewards (agent.normalize_obs, agent.scale_reward)"
    )


def orders_of(buffer: RolloutBuffer, programs: Programs) -> HostOrders | DeviceOrders:
    """The orders of epochs, drawn where the rollout was collected."""
    device = buffer.agent.device
    return HostOrders(device) if buffer.on_host else DeviceOrders(device, programs)


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
            raise RuntimeError("there is no order yet; call draw first")
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
