"""RankEpochs: passes over the rollouts of all ranks, each rank with its own part of a minibatch.

All ranks draw the same order of all transitions, so the minibatches are those of one process with
all envs. A rank computes the gradient of its own transitions; ``FlatAdam`` averages the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.contracts import Rollout, RolloutQuality
from ml_pipeline.algorithms.ppo.epochs import Epochs
from ml_pipeline.algorithms.ppo.records import Minibatch, Rates, UpdateResult
from ml_pipeline.errors import UserError
from ml_pipeline.mirrors import Mirrored, why_not
from ml_pipeline.ranks.world import World
from ml_pipeline.training.graphs import Programs

# What ``RankEpochs`` repeats for the minibatches of all ranks: an epoch, and ``_normalised``.
EPOCH: Mirrored = {
    "ml_pipeline.algorithms.ppo.agent.PPOAgent.epoch": "058ae082294b",
    "ml_pipeline.algorithms.ppo.epochs.Epochs._run": "c5c21733d8fe",
}
MIRRORED: Mirrored = {
    "ml_pipeline.algorithms.ppo.loss.normalised": "e27a2382f039",
}

_N_LOCAL = UpdateResult._fields.index("grad_norm")  # the fields before it are means over a part


class Parts(NamedTuple):
    """This rank's transitions, or envs of a recurrent policy, of all minibatches of an epoch."""

    places: Tensor  # [n], minibatch after minibatch
    sizes: list[int]  # of each minibatch
    shares: list[float]  # this rank's part of each minibatch


def new_epochs(
    world: World, agent: PPOAgent, buffer: Rollout, programs: Programs, **sizes: Any
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
        self, world: World, agent: PPOAgent, buffer: Rollout, *, n_epochs: int, n_minibatches: int
    ) -> None:
        self.n_epochs = n_epochs
        self._n_minibatches = n_minibatches
        self._world = world
        self._agent = agent
        self._buffer = buffer
        self._stops = agent.config.on_nonfinite == "stop"
        self._own_places: NDArray[np.int32] | None = None

    def run(self, rates: Rates, generator: torch.Generator) -> Tensor:
        """One row per gradient step, with the fields of ``UpdateResult``, equal on all ranks."""
        tables = [self._epoch(rates, generator) for _ in range(self.n_epochs)]
        self._world.check_equal(self._agent.adam.values, "the weights")
        return torch.cat(tables)

    def _epoch(self, rates: Rates, generator: torch.Generator) -> Tensor:
        rollout = self._buffer.finished()
        parts = self._parts(generator, is_recurrent=rollout.inputs.memory is not None)
        in_loss = self._agent.plain.config.normalize_advantage
        if self._agent.config.normalize_advantage and not in_loss:
            rollout = self._normalised(rollout, parts)
        rows = []
        for batch, share in zip(_batches(rollout, parts), parts.shares, strict=True):
            self._agent.adam.share = share
            rows.append(self._agent.update(batch, rates))
            if self._stops and not rows[-1].finite:
                break
        return self._over_ranks(_table(rows), parts.shares)

    def _parts(self, generator: torch.Generator, *, is_recurrent: bool) -> Parts:
        n_rows = 1 if is_recurrent else self._buffer.n_steps
        if self._own_places is None:
            self._own_places = _own_places(n_rows, self._buffer.n_envs, self._world)
        n_all = len(self._own_places)
        order = self._buffer.new_order(n_all, generator).cpu().numpy()
        places = self._own_places[order]
        own = np.flatnonzero(places >= 0)
        size = n_all // self._n_minibatches
        sizes = np.diff(np.searchsorted(own, np.arange(0, n_all + 1, size)))
        index = torch.from_numpy(places[own].astype(np.int64)).to(self._agent.device)
        return Parts(index, sizes.tolist(), (sizes / size).tolist())

    def _normalised(self, rollout: Minibatch, parts: Parts) -> Minibatch:
        """Advantages with zero mean and unit variance over each minibatch of all ranks."""
        advantage = rollout.advantage.clone()
        taken = advantage[..., parts.places].double().cpu().numpy()
        columns = taken.reshape(-1, len(parts.places))  # steps of a sequence, else one row
        number = np.repeat(np.arange(len(parts.sizes)), parts.sizes)  # of the minibatch
        sums = partial(np.bincount, number, minlength=len(parts.sizes))
        table = np.concatenate(
            [sums(columns.sum(0)), sums(np.square(columns).sum(0)), sums() * len(columns)]
        )
        self._world.sum_array(table)
        total, square, count = table.reshape(3, -1)
        mean = total / count
        deviation = np.sqrt(np.maximum(square / count - np.square(mean), 0.0)) + 1e-8
        scaled = (taken - mean[number]) / deviation[number]
        advantage[..., parts.places] = torch.from_numpy(scaled).to(advantage)
        return rollout._replace(advantage=advantage)

    def _over_ranks(self, table: NDArray[np.float64], shares: list[float]) -> Tensor:
        """Means over whole minibatches; norm and finiteness of the gradient are equal already."""
        weights = np.array(shares[: len(table)])[:, None]
        means = np.where(weights > 0, table[:, :_N_LOCAL] * weights, 0.0).ravel()
        self._world.sum_array(means)
        table[:, :_N_LOCAL] = means.reshape(len(table), -1)
        return torch.from_numpy(table)


def _own_places(n_rows: int, n_envs: int, world: World) -> NDArray[np.int32]:
    """The place of each transition of all ranks in this rank's rollout; -1: not its own.

    Looked up for every epoch: the work grows with the number of ranks, and divisions take long.
    """
    places = np.full((n_rows, world.size * n_envs), -1, np.int32)
    places[:, world.envs(n_envs)] = np.arange(n_rows * n_envs).reshape(n_rows, n_envs)
    return places.ravel()


def _table(rows: list[UpdateResult]) -> NDArray[np.float64]:
    """One row per gradient step."""
    if not isinstance(rows[0].policy_loss, Tensor):
        return np.array(rows, np.float64)
    return torch.stack([torch.stack(row) for row in rows]).double().cpu().numpy()


def _batches(rollout: Minibatch, parts: Parts) -> Iterator[Minibatch]:
    """This rank's part of each minibatch."""
    # An empty part takes part with any transition, whose weight is zero.
    nothing = parts.places.new_zeros(1)
    if rollout.inputs.memory is not None:
        for index in torch.split(parts.places, parts.sizes):
            yield rollout.take(index if len(index) else nothing)
        return
    shuffled = rollout.take(parts.places)  # one gather; the minibatches are slices without a copy
    for end, size in zip(accumulate(parts.sizes), parts.sizes, strict=True):
        part = slice(end - size, end)
        yield shuffled.mapped(lambda field: field[part], None) if size else rollout.take(nothing)  # noqa: B023


def join_ranks(agent: PPOAgent, world: World) -> str:
    """Start from the weights of rank 0 and average gradients with the other ranks.

    ``RankEpochs`` normalises advantages over all ranks, so the loss must not do it again. If
    ``normalised`` was edited, each rank calls it for its own part instead. Returns a remark, or
    an empty text.
    """
    if world.size == 1:
        return ""
    agent.load_state_dict(world.agreed(agent.state_dict()))
    agent.adam.world = world
    if reason := why_not(EPOCH, agent):
        raise UserError(f"{reason}: several ranks do not use it; train with one process")
    if reason := why_not(MIRRORED):
        return f"each rank normalises the advantages of its own part: {reason}"
    for backend in filter(None, (agent.plain, agent.fast)):
        backend.config = dataclasses.replace(agent.config, normalize_advantage=False)
    return ""


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
