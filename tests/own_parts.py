"""Networks, callbacks, envs and loggers as a user might write them; tests name them by path."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from tiny_envs import CountingEnv
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.algorithm import PPO
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.records import Metrics
from ml_pipeline.training.contracts import Callback, Trainer

ONE_PROCESS = PPO._replace(trains_on_ranks=False)  # an algorithm that ignores ``RunContext.world``


class Wide(nn.Module):
    def __init__(self, observation_space: gym.Space[Any], width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_space.shape[0], width)
        self.out_features = width

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).relu()


class StopAt(Callback):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_end(self, loop: Trainer, metrics: Metrics) -> None:
        if loop.iteration >= self.iteration:
            loop.request_stop(f"iteration {loop.iteration}")


class Talk(Callback):
    """Writes to the log and to standard output."""

    def on_train_start(self, loop: Trainer) -> None:
        logging.getLogger("mine").info("logged by a library")
        print("printed by a callback")


class AwaitTwoTrials(Callback):
    """Trains only once two trials of the study in this folder have begun."""

    def on_train_start(self, loop: Trainer) -> None:
        deadline = time.monotonic() + 60
        while len(list(Path("studies").glob("*/trials/*.lock"))) < 2:
            assert time.monotonic() < deadline, "no other trial after 60 seconds"
            time.sleep(0.1)


class EndAt(Callback):
    """Ends a run after an iteration in the way that the variable ENDING names, if it is set."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_end(self, loop: Trainer, metrics: Metrics) -> None:
        if loop.iteration == self.iteration and os.environ.get("ENDING") == "stop":
            loop.request_stop("the test asked for it")

    def on_iteration_logged(self, loop: Trainer, metrics: Mapping[str, float]) -> None:
        if loop.iteration != self.iteration:
            return
        match os.environ.get("ENDING"):
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "error":
                raise RuntimeError(f"error at iteration {self.iteration}")
            case "signal":
                os.kill(os.getpid(), signal.SIGTERM)


class SignalAt(gym.Wrapper[Any, Any, Any, Any]):
    """Sends SIGTERM to its own process in a step, and hangs, if the variable ENDING says so."""

    def __init__(self, env: gym.Env[Any, Any], step: int, hang_seconds: float = 0.0) -> None:
        super().__init__(env)
        self.steps_left = step
        self.hang_seconds = hang_seconds

    def step(self, action: Any) -> Any:
        self.steps_left -= 1
        is_run = signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # and not a trial of the env
        if is_run and self.steps_left == 0 and os.environ.get("ENDING") == "signal in a rollout":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(self.hang_seconds)
        return self.env.step(action)


class KillAWorkerAt(Callback):
    """Kills a worker after the third iteration; the next rollout fails."""

    def on_iteration_logged(self, loop: Trainer, metrics: Mapping[str, float]) -> None:
        if loop.iteration == 3:
            (env,) = loop.envs
            assert isinstance(env, ParallelEnv)
            os.kill(env.worker_pids[0], signal.SIGKILL)


class OddState(Callback):
    """Has a NumPy number in its state, which a checkpoint cannot contain."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": [np.float64(1.0)]}


class Dice(Callback):
    """Draws from the global generators."""

    def on_iteration_end(self, loop: Trainer, metrics: Metrics) -> None:
        metrics["dice/python"] = random.random()
        metrics["dice/numpy"] = float(np.random.random())
        metrics["dice/torch"] = float(torch.rand(()))


class CountChildren(Callback):
    def on_iteration_end(self, loop: Trainer, metrics: Metrics) -> None:
        with Path("children").open("a") as file:
            file.write(f"{len(multiprocessing.active_children())}\n")


class FileLogger:
    """Writes the steps that it logs, the seed and the sweep to a file."""

    def __init__(self, run_config: Mapping[str, Any], sweep: str | None) -> None:
        self.facts = {"seed": run_config["seed"], "sweep": sweep}

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        with Path("heard").open("a") as file:
            file.write(json.dumps({**self.facts, "env_steps": env_steps}) + "\n")

    def close(self) -> None: ...


class Anything:
    """Neither a callback nor a logger."""


class WrongSize(Wide):
    """Has fewer outputs than ``out_features`` says."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__(observation_space)
        self.out_features = 9


class Flat(Wide):
    """Loses the dimension of the batch."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).mean(0)


class Pair(Wide):
    def forward(self, obs: Tensor) -> Any:
        return self.layer(obs), None


class Detached(Wide):
    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).detach()


class InPlace(Wide):
    """Overwrites what its gradient needs."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).tanh().mul_(2)


class Lazy(Wide):
    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__(observation_space)
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


class Logarithm(Wide):
    """The logarithm of a negative number is NaN."""

    def forward(self, obs: Tensor) -> Tensor:
        limit = self.layer(obs).masked_fill(obs[:, :1] < 9.0, -math.inf)
        return torch.log(limit.tanh() - 1.0)


class LateInfinity(Wide):
    """Divides by zero once it has seen 300 batches."""

    n_calls = 0

    def forward(self, obs: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(obs) / float(self.n_calls < 30)


class CountingCalls(Wide):
    """Returns a different result at each call; a graph would repeat the first one."""

    n_calls = 0

    def forward(self, obs: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(obs) + self.n_calls


class Deciding(Wide):
    """Branches on the data, which a graph cannot do."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs) if float(obs.sum()) > 0 else -self.layer(obs)


class ByLength(Wide):
    """Uses len(obs), which the faster export method treats as a constant."""

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs.reshape(len(obs), -1))


class Spaceless(gym.Env[Any, Any]):
    """Sets no spaces."""

    def __init__(self) -> None:
        self.size = 3


class Lost(gym.Wrapper[Any, Any, Any, Any]):
    """Does not call the constructor of its base class."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.inner = env


class LateMask(CountingEnv):
    """Returns a mask from ``step``, but not from ``reset``."""

    def step(self, action: Any) -> Any:
        *others, _ = super().step(action)
        return *others, {"action_mask": np.ones(2)}


class NoInfo(CountingEnv):
    def step(self, action: Any) -> Any:
        *others, _ = super().step(action)
        return *others, None


class OldApi(CountingEnv):
    """``step`` returns four values, as in Gym before 0.26."""

    def step(self, action: Any) -> Any:
        obs, reward, done, _, info = super().step(action)
        return obs, reward, done, info


class Unpicklable(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (i for i in ())


class Frameless(CountingEnv):
    """Claims to render, but returns no frame."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> None:
        return None


class Wanderer(CountingEnv):
    """Changes the current folder at each reset."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        os.chdir(self.folder)
        return super().reset(seed=seed, options=options)
