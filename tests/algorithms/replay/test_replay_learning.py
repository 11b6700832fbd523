"""ReplayLearning: the order and number of updates when several are one graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from test_replay_buffer import fill, made
from torch import Tensor

from ml_pipeline.algorithms.replay.learning import ReplayLearning
from ml_pipeline.training.graphs import Programs

CPU = torch.device("cpu")


class Result(NamedTuple):
    loss: Tensor
    finite: Tensor


class Counting:
    """Notes the turn of every gradient step; every seventh update is a turn."""

    metric_names = {"loss": "loss/value"}  # noqa: RUF012
    takes_arrays = False
    update_generator = None

    def __init__(self) -> None:
        self.n_begun = 0
        self.turns: list[bool] = []

    def learnt(self) -> list[torch.Tensor]:
        return []

    def begin_update(self) -> bool:
        self.n_begun += 1
        return self.n_begun % 7 == 0

    def gradient_step(self, batch: Any, rates: Any, is_turn: bool) -> Result:
        self.turns.append(is_turn)
        return Result(torch.tensor(float(len(self.turns))), torch.tensor(True))


class Rates(NamedTuple):
    learning_rate: float


@pytest.mark.parametrize("parts", [[1] * 30, [30], [8, 16, 0, 6], [5, 25]], ids=str)
def test_updates_on_a_device_keep_their_order_however_many_are_due(parts: list[int]) -> None:
    agent, buffer = Counting(), made(10)
    fill(buffer, 5)
    learning = ReplayLearning(agent, buffer, Programs(CPU), batch_size=4, seed=1)  # type: ignore[arg-type]
    learning._on_host = False  # a CPU takes the path of a device, without graphs
    learning.begin(Rates(0.1), 30)

    for n_updates in parts:
        learning.run(n_updates)

    assert agent.turns == [n % 7 == 0 for n in range(1, 31)]
    assert learning.n_updates == 30
    assert learning.means() == {"loss/value": pytest.approx(15.5)}
