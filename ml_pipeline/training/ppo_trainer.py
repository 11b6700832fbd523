"""PPOTrainer: keeps time. Collect, improve, tell; epochs and minibatches are counted here."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback, Episode, Logger, Metrics, State
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.collectors import SyncCollector
from ml_pipeline.training.returns import explained_variance
from ml_pipeline.training.rollout_buffer import RolloutBuffer


class TrainingError(UserError):
    """Training cannot go on."""


class PPOTrainer:
    """Trains ``agent`` on what ``collector`` brings; one rollout is [n_steps, n_envs]."""

    def __init__(
        self,
        agent: PPOAgent,
        collector: SyncCollector,
        *,
        seed: int,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Sequence[Logger] = (),
        shield: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``shield`` opens a block that a stop signal must not tear: see ``StopSignals``."""
        self.agent = agent
        self.collector = collector
        self.config = agent.config
        self.callbacks = dict(callbacks or {})
        self.loggers = list(loggers)
        self.buffer = self._new_buffer()
        self.iteration = 0
        self.env_steps = 0
        self.n_episodes = 0
        self.stop_reason: str | None = None
        self._recent: deque[Episode] = deque(maxlen=100)
        self._generator = torch.Generator().manual_seed(stream_seed(seed, "minibatches"))
        self._shield = shield
        self._total_steps: int | None = None
        self._unlogged: Metrics | None = None  # of an iteration that is counted, but not told

    def train(self, total_steps: int) -> None:
        """Iterate until ``env_steps`` reaches ``total_steps`` or a callback asks to stop."""
        self._total_steps = total_steps
        callbacks = list(self.callbacks.values())
        for callback in callbacks:
            callback.on_train_start(self)
        try:
            while not self.is_last_iteration():
                metrics = self.train_episode_vectorized()
                for callback in callbacks:
                    callback.on_iteration_end(self, metrics)
                self._tell()
        except KeyboardInterrupt:
            # The weights have changed: a record without this iteration would not be theirs.
            self._tell()
            raise
        for callback in callbacks:
            callback.on_train_end(self)

    def is_last_iteration(self) -> bool:
        """Whether training ends with the iteration that was counted last."""
        enough = self._total_steps is not None and self.env_steps >= self._total_steps
        return enough or self.stop_reason is not None

    def train_episode_vectorized(self) -> Metrics:
        """One iteration: collect a [T, n_envs] rollout, improve on it, return the metrics."""
        start = time.perf_counter()
        learning_rate = self._learning_rate()
        stats = self.collector.collect(self.agent, self.buffer)
        with self._shield():
            self.agent.set_learning_rate(learning_rate)
            means = self._improve()
            _check_finite(means, self.iteration + 1)
            self._recent.extend(stats.episodes)
            self.n_episodes += len(stats.episodes)
            self.iteration += 1
            n_steps = self.buffer.n_steps * self.buffer.n_envs
            self.env_steps += n_steps
            seconds = time.perf_counter() - start
            self._unlogged = {
                "iteration": self.iteration,
                "env_steps": self.env_steps,
                "n_envs": self.buffer.n_envs,
                "n_completed_episodes": len(stats.episodes),
                **_episode_means("rollout/", "", stats.episodes),
                **_episode_means("rollout/", "_mean_100", list(self._recent)),
                "rollout/total_episodes": self.n_episodes,
                **means,
                "policy/learning_rate": learning_rate,
                "time/env_steps_per_second": n_steps / seconds,
                "time/collect_seconds": stats.seconds,
                "time/iteration_seconds": seconds,
            }
        return self._unlogged

    def _tell(self) -> None:
        """Log the last iteration, once, and let the callbacks save what belongs to it."""
        with self._shield():
            if self._unlogged is None:
                return
            metrics, self._unlogged = self._unlogged, None
            for logger in self.loggers:
                logger.log(metrics, env_steps=self.env_steps)
            for callback in self.callbacks.values():
                callback.on_iteration_logged(self, metrics)

    def _improve(self) -> Metrics:
        """All epochs over the rollout; the metrics come to the host once, at the end."""
        config, buffer = self.config, self.buffer
        last_value = self.collector.last_value(self.agent)
        buffer.finish(last_value, gamma=config.gamma, lam=config.gae_lambda)
        quality = explained_variance(buffer.value, buffer.value_target)
        updates: list[dict[str, Tensor]] = []
        for _ in range(config.n_epochs):
            for batch in buffer.minibatches(config.n_minibatches, self._generator):
                updates.append(self.agent.update(batch))
        names = list(updates[0])
        table = torch.stack([torch.stack([update[name] for name in names]) for update in updates])
        means = torch.cat([table.mean(dim=0), quality.unsqueeze(0)]).tolist()
        return dict(zip([*names, "value/explained_variance"], means, strict=True))

    def _learning_rate(self) -> float:
        if not self.config.anneal_learning_rate or self._total_steps is None:
            return self.config.learning_rate
        left = 1.0 - self.env_steps / self._total_steps
        return self.config.learning_rate * max(left, 0.0)

    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        return self.collector.env

    def _new_buffer(self) -> RolloutBuffer:
        return RolloutBuffer(
            self.config.n_steps,
            self.collector.n_envs,
            obs_shape=self.collector.env.single_observation_space.shape or (),
            device=self.agent.device,
        )

    def resize(self, n_envs: int) -> int:
        """At most ``n_envs``: a rollout must still cut into equal minibatches; at least that."""
        n_steps, n_minibatches = self.config.n_steps, self.config.n_minibatches
        multiple = n_minibatches // math.gcd(n_steps, n_minibatches)
        n_envs = max(n_envs // multiple, 1) * multiple
        if n_envs != self.collector.n_envs:
            self.collector.resize(n_envs)
            self.buffer = self._new_buffer()
        return n_envs

    def request_stop(self, reason: str) -> None:
        """End training after this iteration."""
        self.stop_reason = reason

    def state_dict(self) -> State:
        """Everything that goes on from here."""
        return {
            "agent": self.agent.state_dict(),
            "collector": self.collector.state_dict(),
            "generator": self._generator.get_state(),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "n_episodes": self.n_episodes,
            "recent_episodes": [list(episode) for episode in self._recent],
            "callbacks": {name: each.state_dict() for name, each in self.callbacks.items()},
        }

    def load_state_dict(self, state: State) -> None:
        self.agent.load_state_dict(state["agent"])
        self.collector.load_state_dict(state["collector"])
        self._generator.set_state(state["generator"])
        self.iteration = state["iteration"]
        self.env_steps = state["env_steps"]
        self.n_episodes = state["n_episodes"]
        self._recent.extend(Episode(*episode) for episode in state["recent_episodes"])
        for name, callback_state in state["callbacks"].items():
            if name in self.callbacks:  # a resumed run may have dropped or added some
                self.callbacks[name].load_state_dict(callback_state)


def _check_finite(means: Metrics, iteration: int) -> None:
    """Stop before weights that are no numbers reach a checkpoint."""
    broken = [name for name, value in means.items() if not math.isfinite(value)]
    if broken:
        raise TrainingError(
            f"iteration {iteration} broke down: {', '.join(broken)} not finite, and not "
            "saved. A smaller agent.learning_rate often helps; so does "
            "looking for nan or huge values in the env's observations and rewards"
        )


def _episode_means(prefix: str, suffix: str, episodes: Sequence[Episode]) -> Metrics:
    """Mean return and length; nothing where no episode has ended yet."""
    if not episodes:
        return {}
    returns, lengths = zip(*episodes, strict=True)
    return {
        f"{prefix}episode_return{suffix}": float(np.mean(returns)),
        f"{prefix}episode_length{suffix}": float(np.mean(lengths)),
    }
