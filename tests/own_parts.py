"""Parts a user might write: a network and a callback, named by dotted path in tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ml_pipeline.protocols import Callback, Metrics, Trainer
from ml_pipeline.signals import Interrupted


class Wide(nn.Module):
    def __init__(self, observation_space: gym.Space[Any], width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], width)
        self.out_features = width

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).relu()


class StopAt(Callback):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.iteration >= self.iteration:
            trainer.request_stop(f"iteration {trainer.iteration}")


class KillAt(Callback):
    """Ends the process without a word, as a power cut does; never in a resumed run."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.iteration == self.iteration and "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


class KillAWorkerAt(Callback):
    """In the third iteration of a run that begins; the next rollout finds out."""

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.iteration == 3:
            os.kill(trainer.envs[0].worker_pids[0], signal.SIGKILL)  # type: ignore[attr-defined]


class OddState(Callback):
    """Keeps what NumPy made, which a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": [np.float64(1.0)]}


class Dice(Callback):
    """Draws from the generators that nobody here owns."""

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        metrics["dice/python"] = random.random()
        metrics["dice/numpy"] = float(np.random.random())
        metrics["dice/torch"] = float(torch.rand(()))


class CountChildren(Callback):
    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        with Path("children").open("a") as file:
            file.write(f"{len(multiprocessing.active_children())}\n")


class InterruptAtStart(Callback):
    def on_train_start(self, trainer: Trainer) -> None:
        raise Interrupted(2)


class FileLogger:
    """Writes down what it is told, and of which sweep."""

    def __init__(self, run_config: Mapping[str, Any], sweep: str | None) -> None:
        self.facts = {"seed": run_config["seed"], "sweep": sweep}

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        with Path("heard").open("a") as file:
            file.write(json.dumps({**self.facts, "env_steps": env_steps}) + "\n")

    def close(self) -> None: ...


class Anything:
    """Neither a callback nor a logger."""


class WrongSize(Wide):
    """Says that it has more outputs than it has."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__(observation_space, width=8)
        self.out_features = 9


class Lazy(Wide):
    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__(observation_space, width=8)
        self.layer = nn.LazyLinear(8)


class Failing(nn.Module):
    def __init__(self) -> None:
        raise RuntimeError("out of luck")


class OneAtATime(Wide):
    """Mixes the observations of a batch."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__(observation_space, width=np.int64(8))

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs.view(1, -1))


class LateMask(gym.Env[Any, Any]):
    """Gives a mask with steps alone."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {"action_mask": np.ones(2)}


class NoInfo(LateMask):
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, None


class OldApi(gym.Env[Any, Any]):
    """Four values from step, as Gym had it before 0.26."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, {}


class CountingCalls(nn.Module):
    """Gives another answer each time it is asked; a graph would repeat the first for ever."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], 4)
        self.out_features = 4
        self.n_calls = 0

    def forward(self, obs: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(obs) + self.n_calls


class Deciding(CountingCalls):
    """Looks at the numbers to choose its way, which no graph can."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs) if float(obs.sum()) > 0 else -self.layer(obs)


class ByLength(CountingCalls):
    """Speaks of the batch as len(obs), which the faster way to export takes for a constant."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs.reshape(len(obs), -1))
