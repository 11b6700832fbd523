"""RankEpochs: passes over the rollouts of all ranks, each rank with its own part of a minibatch.

All ranks draw the same order of all transitions, so the minibatches are those of one process with
all envs. A rank computes the gradient of its own transitions; ``FlatAdam`` averages the gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.distributed import World
from ml_pipeline.protocols import Minibatch, Rates, UpdateResult
from ml_pipeline.training.contracts import Rollout, RolloutQuality
from ml_pipeline.training.gpu.epochs import Epochs
from ml_pipeline.training.gpu.programs import Programs

_N_LOCAL = UpdateResult._fields.index("grad_norm")  # the fields before it are means over a part


def new_epochs(
    world: World, agent: Any, buffer: Rollout, programs: Programs, **sizes: Any
) -> Epochs | RankEpochs:
    """The epochs of one rank, or of several."""
    if world.size == 1:
        return Epochs(agent, buffer, programs, **sizes)
    return RankEpochs(
        world, agent, buffer, n_epochs=sizes["n_epochs"], n_minibatches=sizes["n_minibatches"]
    )


class RankEpochs:
    """Like ``Epochs``; ``agent`` has a ``FlatAdam`` that averages the gradients of all ranks."""

    def __init__(
        self, world: World, agent: Any, buffer: Rollout, *, n_epochs: int, n_minibatches: int
    ) -> None:
        self.n_epochs = n_epochs
        self._n_minibatches = n_minibatches
        self._world = world
        self._agent = agent
        self._buffer = buffer
        self._stops = agent.config.on_nonfinite == "stop"

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """One row per gradient step, with the fields of ``UpdateResult``, equal on all ranks."""
        tables = [self._epoch(rates, generator) for _ in range(self.n_epochs)]
        self._world.check_equal(self._agent.adam.values, "the weights")
        return torch.cat(tables)

    def _epoch(self, rates: Rates, generator: torch.Generator) -> Tensor:
        rollout = self._buffer.finished()
        parts, size = self._parts(generator, is_recurrent=rollout.inputs.memory is not None)
        if self._agent.config.normalize_advantage:
            rollout = self._normalised(rollout, parts)
        rows, shares = [], []
        for part in parts:
            shares.append(len(part) / size)
            # An empty part takes part with any transition, whose weight is zero.
            index = part if len(part) else part.new_zeros(1)
            self._agent.adam.share = shares[-1]
            rows.append(self._agent.epoch(rollout, index.unsqueeze(0), rates).double())
            if self._stops and not rows[-1][0, -1]:
                break
        return self._over_ranks(torch.cat(rows), torch.tensor(shares))

    def _parts(self, generator: torch.Generator, *, is_recurrent: bool) -> tuple[list[Tensor], int]:
        """This rank's transitions (or envs) of each minibatch, and the size of a minibatch."""
        n_own = self._buffer.n_envs
        n_envs, n_rows = n_own * self._world.size, 1 if is_recurrent else self._buffer.n_steps
        order = self._buffer.new_order(n_rows * n_envs, generator).view(self._n_minibatches, -1)
        row, env = order // n_envs, order % n_envs
        is_own = env // n_own == self._world.rank
        local = row * n_own + env % n_own
        device = self._agent.device
        parts = [each[own].to(device) for each, own in zip(local, is_own, strict=True)]
        return parts, order.shape[1]

    def _normalised(self, rollout: Minibatch, parts: list[Tensor]) -> Minibatch:
        """Advantages with zero mean and unit variance over each minibatch of all ranks."""
        taken = [rollout.advantage[..., part].double() for part in parts]
        sums = [torch.stack([each.sum(), each.square().sum()]) for each in taken]
        counts = torch.tensor([float(each.numel()) for each in taken], dtype=torch.float64)
        table = torch.cat([torch.stack(sums), counts.to(sums[0].device).unsqueeze(1)], dim=1)
        total, square, count = self._world.sum(table).unbind(1)
        mean = total / count
        deviation = (square / count - mean.square()).clamp(min=0.0).sqrt() + 1e-8
        advantage = rollout.advantage.clone()
        for number, part in enumerate(parts):
            scaled = (taken[number] - mean[number]) / deviation[number]
            advantage[..., part] = scaled.to(advantage.dtype)
        return rollout._replace(advantage=advantage)

    def _over_ranks(self, table: Tensor, shares: Tensor) -> Tensor:
        """Means over whole minibatches; norm and finiteness of the gradient are equal already."""
        weights = shares[: len(table)].to(table).unsqueeze(1)
        means = torch.where(weights > 0, table[:, :_N_LOCAL] * weights, 0.0)
        return torch.cat([self._world.sum(means), table[:, _N_LOCAL:]], dim=1)


def join_ranks(agent: Any, world: World) -> None:
    """Start from the weights of rank 0 and average gradients with the other ranks.

    ``RankEpochs`` normalises advantages over all ranks, so the loss must not do it again.
    """
    if world.size == 1:
        return
    agent.load_state_dict(world.agreed(agent.state_dict()))
    agent.adam.world = world
    for backend in filter(None, (agent.plain, agent.fast)):
        backend.config = dataclasses.replace(agent.config, normalize_advantage=False)


def quality_of_all(world: World, buffer: Rollout) -> RolloutQuality:
    """``buffer.quality`` of the rollouts of all ranks together."""
    quality = buffer.quality()
    if world.size == 1:
        return quality
    rollout = buffer.finished()
    value, target = rollout.value.double(), rollout.value_target.double()
    unexplained, variance = (_variance(world, each) for each in (target - value, target))
    explained = 1.0 - unexplained / variance if variance > 0 else 0.0
    return RolloutQuality(explained, is_finite=world.max([not quality.is_finite]) == [0])


def _variance(world: World, values: Tensor) -> float:
    return float(world.moments(values.mean(), values.var(correction=0), values.numel())[1])
