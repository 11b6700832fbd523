"""ReplayLearning: gradient steps on transitions from a replay buffer.

All ranks draw the same batch of the transitions of all. Each computes the gradient of those that
its own envs made, and ``FlatAdam`` averages the gradients.

On a device, sampling, the gradient step and new priorities are captured as one graph, eight times
in a row if as many updates are due. The metrics of an iteration are added up there and read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import RatesT, ReplayAgent
from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import set_generator_state
from ml_pipeline.signals import Hold, never_held
from ml_pipeline.training.checks import NonFiniteError
from ml_pipeline.training.env_batch import ArrayOrTensor
from ml_pipeline.training.graphs import Programs, send

_NOT_FINITE = (
    "a loss or a gradient is not finite, and that step changed nothing. Try a smaller "
    "agent.learning_rate, and look for huge observations or rewards (agent.normalize_obs)"
)

_IN_A_GRAPH = 8  # updates: a launch leaves a short gap, so several at once are faster


class ReplayLearning:
    """Improves ``agent`` with batches of ``replay``."""

    def __init__(
        self,
        agent: ReplayAgent[OffPolicyConfig, Any, Any],
        replay: ReplayBuffer,
        programs: Programs,
        *,
        batch_size: int,
        seed: int,
        world: World = ALONE,
    ) -> None:
        self._agent = agent
        self._world = world
        self._batches = world.batches(replay.n_envs)
        if world.is_awaited:
            agent.join(world)
        self._replay = replay
        self._programs = programs
        self._batch_size = batch_size
        self.n_updates = 0
        self._generator = torch.Generator(replay.device).manual_seed(seed)
        self._names = agent.metric_names
        self._on_host = replay.device.type == "cpu"
        self._rates: Any = None
        self._rate_place: Tensor | None = None  # of the rates on a device
        self._uniform: ArrayOrTensor = None  # [n_updates, B], of an iteration on the host
        self._n_results = 0
        self._sums = [0.0] * (len(self._names) + 1)  # the last one: steps that were finite
        self._device_sums = torch.zeros(len(self._sums), device=replay.device)
        self._add_to = programs.compiled(_add_to, "the metrics of an update")
        self._captured: dict[tuple[bool, int, int], Callable[[], None]] = {}

    def begin(self, rates: RatesT, n_updates: int) -> RatesT:
        """Prepare for up to ``n_updates``; returns the rates as the agent must read them."""
        self._n_results, self._sums = 0, [0.0] * len(self._sums)
        if self._on_host:
            self._rates = rates
            uniform = torch.rand(n_updates, self._batch_size, generator=self._generator)
            self._uniform = uniform.numpy() if self._agent.takes_arrays else uniform
            return rates
        self._device_sums.zero_()
        if self._rate_place is None:
            self._rate_place = torch.zeros(len(rates), device=self._replay.device)
            self._rates = type(rates)(*self._rate_place.unbind())
        send(torch.tensor(rates), self._rate_place)
        place: RatesT = self._rates
        return place

    def run(self, n_updates: int, hold: Hold = never_held) -> None:
        """Make updates; a stop signal may end them between two, on a device between two blocks."""
        size = 1 if self._on_host else _IN_A_GRAPH
        for done in range(0, n_updates, size):
            with hold():
                self._run_block(min(n_updates - done, size))

    def _run_block(self, n_updates: int) -> None:
        if self._on_host:
            is_turn = self._agent.begin_update()
            report = self._update(is_turn, self._uniform[self._n_results])
            for place, value in enumerate(report):
                self._sums[place] += float(value)
        else:
            self._launch([self._agent.begin_update() for _ in range(n_updates)])
        self._n_results += n_updates
        self.n_updates += n_updates

    def _launch(self, turns: list[bool]) -> None:
        """One graph if the block is full and all ``turns`` are equal: other blocks are too many."""
        if len(turns) == _IN_A_GRAPH and len(set(turns)) == 1:
            self._program(turns[0], _IN_A_GRAPH)()
        else:
            for is_turn in turns:
                self._program(is_turn, 1)()

    def _program(self, is_turn: bool, n_updates: int) -> Callable[[], None]:
        key = is_turn, n_updates, self._replay.n_tables_moved
        if key not in self._captured:
            self._captured = {each: p for each, p in self._captured.items() if each[2] == key[2]}

            def updates() -> None:
                shape, device = (self._batch_size,), self._replay.device
                for _ in range(n_updates):
                    uniform = torch.rand(shape, generator=self._generator, device=device)
                    self._add_to(self._device_sums, self._update(is_turn, uniform))

            generators = self._generator, self._agent.update_generator
            self._captured[key] = self._programs.captured(updates, "the update", generators)
        return self._captured[key]

    def _update(self, is_turn: bool, uniform: ArrayOrTensor) -> list[Any]:
        """One gradient step; returns its metrics, and whether all was finite."""
        replay, rates = self._replay, self._rates
        batch, index, part = replay.sample(uniform, beta=getattr(rates, "beta", 1.0))
        if part is not None:
            self._agent.take_part(part)
        result = self._agent.gradient_step(batch, rates, is_turn)
        if replay.is_prioritised:
            replay.prioritise(index, self._batches.errors(result.error, part))
        report = [getattr(result, name) for name in self._names]
        if part is not None:  # the sum over ranks is the mean over the batch
            report = [part.share * each for each in report]
        return [*report, result.finite]

    def means(self) -> Metrics:
        """The mean of each metric since ``begin``; waits for the device.

        Raises if the ranks have learnt different things.
        """
        self._world.check_equal(self._agent.learnt, "the weights")
        n = self._n_results
        total = self._device_sums
        if self._on_host:
            total = torch.tensor(self._sums, dtype=torch.float64)
        *sums, _ = self._world.sum(total.clone()).tolist()
        n_finite = float(total[-1])  # equal on all ranks
        if not n:
            return {}
        if n_finite != n:
            raise NonFiniteError(_NOT_FINITE)
        return {self._names[name]: each / n for name, each in zip(self._names, sums, strict=True)}

    def state_dict(self) -> StateDict:
        return {"n_updates": self.n_updates, "draw_generator": self._generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        self.n_updates = int(state["n_updates"])
        set_generator_state(self._generator, state["draw_generator"])


def _add_to(sums: Tensor, report: list[Tensor]) -> None:
    sums += torch.stack([each.float() for each in report])
