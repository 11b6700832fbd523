"""Epochs: passes over a finished rollout; on a GPU captured as one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.contracts import Learner, Rollout
from ml_pipeline.algorithms.ppo.records import Rates, UpdateResult
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


class Epochs:
    """Each ``run`` makes ``n_epochs`` passes of ``agent`` over all minibatches of ``buffer``."""

    def __init__(
        self,
        agent: Learner,
        buffer: Rollout,
        programs: Programs,
        *,
        n_epochs: int,
        n_minibatches: int,
        on_host: bool,
    ) -> None:
        """``on_host``: buffer and agent share host memory, so the rates stay Python floats."""
        self.n_epochs = n_epochs
        self._n_minibatches = n_minibatches
        self._agent = agent
        self._buffer = buffer
        self._rates: Tensor | None = None
        if not on_host:
            self._rates = torch.zeros(len(Rates._fields), device=agent.device)
        self._captured: Any = programs.captured(self._run_on_device, "the update")

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """One row per gradient step, with the fields of ``UpdateResult``; stays on the device."""
        self._buffer.shuffle(generator, self.n_epochs)
        if self._rates is None:
            return self._run(rates)
        send(torch.tensor(rates), self._rates)
        table: Tensor = self._captured()
        return table.clone()  # the next replay writes its results to the same place

    def _run_on_device(self) -> Tensor:
        if self._rates is None:
            raise RuntimeError("these epochs run on the host")
        return self._run(Rates(*self._rates.unbind()))

    def _run(self, rates: Rates) -> Tensor:
        rollout = self._buffer.finished()
        orders = [
            self._buffer.order(epoch).view(self._n_minibatches, -1)
            for epoch in range(self.n_epochs)
        ]
        tables = [self._agent.epoch(rollout, order, rates) for order in orders]
        return tables[0] if len(tables) == 1 else torch.cat(tables)


def update_means(table: NDArray[Any]) -> Metrics:
    """Means over the gradient steps that were not skipped; ``table`` is that of ``Epochs.run``."""
    values, finite = table[:, :-1], table[:, -1] != 0
    n_skipped = int((~finite).sum())
    means = np.where(finite[:, None], values, 0.0).sum(axis=0) / max(len(finite) - n_skipped, 1)
    fields = zip(UpdateResult._fields[:-1], means.tolist(), strict=True)
    metrics = {_METRIC_NAMES[field]: mean for field, mean in fields}
    return {**metrics, "loss/skipped_updates": float(n_skipped)} if n_skipped else metrics
