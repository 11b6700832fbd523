"""Epochs: passes over a finished rollout on a device, captured as one graph if that is wanted."""

from __future__ import annotations

import torch

from ml_pipeline.agents.ppo import PPOAgent, Rates, UpdateResult
from ml_pipeline.training.gpu.programs import Programs, send
from ml_pipeline.training.rollout_buffer import RolloutBuffer
from ml_pipeline.training.tensor.buffer import TensorBuffer


class Epochs:
    """Gradient steps of ``agent`` on all minibatches of ``buffer``, ``n_epochs`` times per run."""

    def __init__(
        self,
        agent: PPOAgent,
        buffer: RolloutBuffer | TensorBuffer,
        programs: Programs,
        *,
        n_epochs: int,
    ) -> None:
        self.n_epochs = n_epochs
        self._agent = agent
        self._buffer = buffer
        self._rates = torch.zeros(len(Rates._fields), device=agent.device)
        self._epochs = programs.captured(self._run, "the update")

    def run(self, rates: Rates, generator: torch.Generator) -> UpdateResult:
        """All that the gradient steps tell, a row for each; it stays on the device."""
        send(torch.tensor(rates), self._rates)
        self._buffer.shuffle(generator, self.n_epochs)
        metrics, finite = self._epochs()
        # The next run leaves its results in the same place.
        return UpdateResult(metrics.clone(), finite.clone())

    def _run(self) -> UpdateResult:
        rollout = self._buffer.learned
        results = [
            self._agent.epoch(rollout, self._buffer.order(epoch), self._rates)
            for epoch in range(self.n_epochs)
        ]
        return UpdateResult(*(torch.cat(each) for each in zip(*results, strict=True)))
