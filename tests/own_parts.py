"""Parts a user might write: a network and a callback, named by dotted path in tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from ml_pipeline.protocols import Callback, Metrics, Trainer


class Wide(nn.Module):
    def __init__(self, observation_space: gym.Space[Any], width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], width)  # type: ignore[index]
        self.out_features = width

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).relu()


class StopAt(Callback):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.iteration >= self.iteration:
            trainer.request_stop(f"iteration {trainer.iteration}")
