"""RankLearning: gradient steps of several ranks, each with its own part of every batch.

All ranks draw the same batch of the transitions of all. A rank computes the gradient of those that
its own envs made; ``FlatAdam`` averages the gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.contracts import BatchPart
from ml_pipeline.algorithms.replay.learning import ReplayLearning
from ml_pipeline.errors import UserError
from ml_pipeline.mirrors import Mirrored, why_not
from ml_pipeline.ranks.world import World
from ml_pipeline.records import Metrics
from ml_pipeline.training.graphs import Programs

MIRRORED: Mirrored = {
    "ml_pipeline.algorithms.replay.learning.ReplayLearning._update": "d275ef438c41",
}


def new_learning(
    world: World, agent: Any, replay: ReplayBuffer, programs: Programs, **settings: Any
) -> ReplayLearning:
    """The gradient steps of one rank, or of several."""
    if world.size == 1:
        return ReplayLearning(agent, replay, programs, **settings)
    return RankLearning(world, agent, replay, programs, **settings)


class RankLearning(ReplayLearning):
    """``replay`` holds the transitions of this rank, and draws from those of all."""

    def __init__(
        self,
        world: World,
        agent: ReplayAgent[Any, Any, Any],
        replay: ReplayBuffer,
        programs: Programs,
        **settings: Any,
    ) -> None:
        super().__init__(agent, replay, programs, **settings)
        if reason := why_not(MIRRORED):
            raise UserError(f"{reason}: several ranks do not use it; train with one process")
        self._world = world
        self._rank_agent = agent
        agent.join(world)

    def _update(self, is_turn: bool, uniform: Any) -> Any:
        replay, rates = self._replay, self._rates
        index, weight = replay.draw(uniform, beta=getattr(rates, "beta", 1.0))
        part, own = self._part(index)
        self._rank_agent.take_part(part)
        batch = replay.batch(own, weight[part.rows])
        result = self._rank_agent.gradient_step(batch, rates, is_turn)
        if replay.tree is not None:
            replay.prioritise(index, self._errors(result.error, part))
        # The sum over ranks is the mean over the batch.
        means = {name: part.share * getattr(result, name) for name in self._names}
        return result._replace(**means)

    def _part(self, index: Any) -> tuple[BatchPart, Any]:
        """This rank's part of a batch, and the indices of its transitions in its own tables."""
        n_own, n_all = self._replay.n_envs, self._replay.n_all_envs
        row, env = index // n_all, index % n_all
        is_own = env // n_own == self._world.rank
        is_array = isinstance(index, np.ndarray)
        rows: Any = np.flatnonzero(is_own) if is_array else torch.nonzero(is_own).flatten()
        share = len(rows) / len(index)
        if not len(rows):  # takes part with a transition of the same row, whose weight is zero
            rows = np.zeros(1, np.int64) if is_array else rows.new_zeros(1)
        return BatchPart(rows, len(index), share), (row * n_own + env % n_own)[rows]

    def _errors(self, error: Any, part: BatchPart) -> torch.Tensor:
        """The TD errors of the whole batch."""
        whole = torch.zeros(part.size, device=self._replay.device)
        if part.share:
            whole[torch.as_tensor(part.rows)] = torch.as_tensor(error)
        return self._world.sum(whole)

    def means(self) -> Metrics:
        """Means over whole batches; raises if the ranks have learnt different things."""
        learnt = torch.cat([each.flatten() for each in self._rank_agent.learnt()])
        self._world.check_equal(learnt, "the weights")
        if self._on_host:
            sums = torch.tensor(self._sums[:-1], dtype=torch.float64)
            self._sums[:-1] = self._world.sum(sums).tolist()
        else:
            self._device_sums[:-1] = self._world.sum(self._device_sums[:-1].clone())
        return super().means()
