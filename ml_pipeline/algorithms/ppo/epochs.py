"""Epochs: passes over a finished rollout; on a GPU captured as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.records import Rates, UpdateResult
from ml_pipeline.algorithms.ppo.rollout import RolloutBuffer
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import Metrics
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
        self._rates: Tensor | None = None
        if not on_host:
            self._rates = torch.zeros(len(Rates._fields), device=agent.device)
        self._captured: Callable[[], Tensor] = programs.captured(self._on_device, "the update")

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """One row per gradient step, with the fields of ``UpdateResult``; stays on the device."""
        self._buffer.shuffle(generator, self.n_epochs, self._minibatches.n_items)
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
        orders = [self._minibatches.of(self._buffer.order(each)) for each in range(self.n_epochs)]
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
