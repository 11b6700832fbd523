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
from numpy.typing import NDArray

from ml_pipeline.agents.ppo import UPDATE_METRICS, PPOAgent, Rates, UpdateResult
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback, Episode, Logger, Metrics, StateDict
from ml_pipeline.seeding import (
    global_generators_state,
    set_global_generators_state,
    stream_seed,
)
from ml_pipeline.training.collector import Collector
from ml_pipeline.training.gpu.epochs import Epochs
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.returns import RewardScaler
from ml_pipeline.training.rollout_buffer import RolloutBuffer
from ml_pipeline.training.tensor.collector import TensorCollector

_SLOWEST, _FASTEST = 1e-6, 1e-2  # bounds of an adaptive learning rate


class TrainingError(UserError):
    """Training cannot go on."""


class PPOTrainer:
    """Trains ``agent`` on what ``collector`` brings; one rollout is [n_steps, n_envs]."""

    def __init__(
        self,
        agent: PPOAgent,
        collector: Collector | TensorCollector,
        *,
        seed: int,
        programs: Programs | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        loggers: Sequence[Logger] = (),
        shield: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        patience: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``programs`` captures what the agent does on a GPU; None: nothing.

        ``shield`` opens a block that a stop signal must not tear, ``patience`` one that it should
        rather wait for: see ``StopSignals``.
        """
        self.agent = agent
        self.collector = collector
        self.config = agent.config
        self.callbacks = dict(callbacks or {})
        self.loggers = list(loggers)
        self._programs = programs or Programs(agent.device)
        self._scaler = collector.new_scaler(self.config)
        self._make_buffer()
        self._adaptive_learning_rate = self.config.learning_rate
        self.iteration = 0
        self.env_steps = 0
        self.n_episodes = 0
        self.stop_reason: str | None = None
        self.snapshots_envs = False  # whether their episodes can go on in another process
        self._recent: deque[Episode] = deque(maxlen=100)
        self._generator = torch.Generator().manual_seed(stream_seed(seed, "minibatches"))
        self._shield = shield
        self._patience = patience
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
                with self._patience():
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
        if self.collector.is_interruptible:
            return self._train_episode(self._shield)
        with self._shield():
            return self._train_episode(contextlib.nullcontext)

    def _train_episode(self, shield: Callable[[], AbstractContextManager[None]]) -> Metrics:
        start = time.perf_counter()
        rates = self._rates()
        # What overflows is found and named: NumPy need not warn besides.
        with np.errstate(over="ignore", invalid="ignore"):
            stats = self.collector.collect(self.agent, self.buffer)
        with shield():
            with np.errstate(over="ignore", invalid="ignore"):
                means = self._improve(rates)
            episodes = stats.episodes
            n_episodes = sum(episode.n for episode in episodes)
            self.collector.commit(self.buffer.n_steps)
            self._recent.extend(episodes)
            self.n_episodes += n_episodes
            self.iteration += 1
            n_steps = self.buffer.n_steps * self.buffer.n_envs
            self.env_steps += n_steps
            seconds = time.perf_counter() - start
            self._unlogged = {
                "iteration": self.iteration,
                "env_steps": self.env_steps,
                "n_envs": self.buffer.n_envs,
                "n_completed_episodes": n_episodes,
                **_episode_means("", episodes),
                **_episode_means("_mean_100", _latest(self._recent, 100)),
                "rollout/total_episodes": self.n_episodes,
                **means,
                "policy/learning_rate": rates.learning_rate,
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
            metrics = {name: _number(name, value) for name, value in self._unlogged.items()}
            self._unlogged = None
            for logger in self.loggers:
                logger.log(metrics, env_steps=self.env_steps)
            for callback in self.callbacks.values():
                callback.on_iteration_logged(self, metrics)

    def _improve(self, rates: Rates) -> Metrics:
        """All epochs over the rollout; the metrics come to the host once, at the end."""
        config, buffer = self.config, self.buffer
        last = self.collector.last_inputs(self.agent)
        buffer.finish(last, gamma=config.gamma, lam=config.gae_lambda, scaler=self._scaler)
        results: list[UpdateResult] = []
        epoch = 0
        while epoch < config.n_epochs:
            first = len(results)
            if self._epochs is not None:
                results.append(self._epochs.run(rates, self._generator))
                epoch += self._epochs.n_epochs
            else:
                epoch += 1
                for batch in buffer.minibatches(config.n_minibatches, self._generator):
                    results.append(self.agent.update(batch, rates))
                    if not results[-1].finite:
                        told = _on_host(results[-1:])
                        self._check_finite(*told, epoch, len(results) - first, at_once=True)
            if self._looks_at_kl:
                told = _on_host(results[first:])
                kl = _means(*told)["policy/approx_kl"]
                if told[1].any():  # else no step was made, and there is nothing to steer by
                    rates = rates._replace(learning_rate=self._adapted(rates.learning_rate, kl))
                if config.max_kl is not None and kl > config.max_kl:
                    break
        self.agent.learn_moments(buffer.obs_tensors())
        # Here, and not before, a device is waited for: a step that was not finite changed nothing.
        metrics, finite = _on_host(results)
        quality, is_finite = buffer.facts().tolist()
        if self._epochs is not None:
            self._check_values(bool(is_finite))
            broken = int(finite.argmin())  # the first that was not finite, if one was not
            place = broken // config.n_minibatches + 1, broken % config.n_minibatches + 1
            self._check_finite(metrics, finite, *place, at_once=False)
        means = _means(metrics, finite)
        return {**means, "value/explained_variance": quality, "policy/n_epochs": float(epoch)}

    @property
    def _looks_at_kl(self) -> bool:
        """Whether something depends on the KL of each epoch."""
        config = self.config
        return config.max_kl is not None or config.learning_rate_schedule == "adaptive"

    def _check_values(self, is_finite: bool) -> None:
        if is_finite or self.config.on_nonfinite == "skip":
            return
        raise TrainingError(
            f"iteration {self.iteration + 1}: an env gave an observation or a reward that is not "
            "finite; the last checkpoint is kept. To find it, train a few envs with compile=off "
            "and look at what the env's advance returns"
        )

    def _check_finite(
        self,
        metrics: NDArray[Any],
        finite: NDArray[np.bool_],
        epoch: int,
        minibatch: int,
        *,
        at_once: bool,
    ) -> None:
        """Stop where a loss or gradient was not finite, in a step that changed nothing.

        ``at_once``: no other has followed it.
        """
        if self.config.on_nonfinite == "skip" or finite.all():
            return
        broken = metrics[np.flatnonzero(~finite)[0]]
        names = [
            name
            for name, value in zip(UPDATE_METRICS, broken.tolist(), strict=True)
            if not math.isfinite(value)
        ]
        gradients = self.agent.adam.broken_gradients() if at_once else []
        if gradients:
            more = ", ..." if len(gradients) > 3 else ""
            names.append(f"the gradients of {', '.join(gradients[:3])}{more}")
        left = "The weights were left as they were" if at_once else "That step changed nothing"
        raise TrainingError(
            f"iteration {self.iteration + 1}, epoch {epoch}, minibatch {minibatch}: "
            f"{' and '.join(names)} not finite. {left}, the last checkpoint is kept. A smaller "
            "agent.learning_rate often helps; so does looking for huge values in the env's "
            "observations and rewards (agent.normalize_obs, agent.scale_reward)"
        )

    def _rates(self) -> Rates:
        """What is annealed, at this point of the run."""
        config, progress = self.config, 0.0
        if self._total_steps is not None:
            progress = min(self.env_steps / self._total_steps, 1.0)
        learning_rate = self._adaptive_learning_rate
        if config.learning_rate_schedule != "adaptive":
            schedule = config.learning_rate_schedule
            learning_rate = annealed(config.learning_rate, schedule, progress)
        return Rates(
            learning_rate,
            annealed(config.clip_range, config.clip_range_schedule, progress),
            annealed(config.entropy_coef, config.entropy_coef_schedule, progress),
        )

    def _adapted(self, learning_rate: float, kl: float) -> float:
        """Faster while the policy moves less than ``target_kl``, slower where it moves more."""
        if self.config.learning_rate_schedule != "adaptive":
            return learning_rate
        if kl > 2.0 * self.config.target_kl:
            learning_rate = max(learning_rate / 1.5, min(_SLOWEST, self.config.learning_rate))
        elif kl < 0.5 * self.config.target_kl:
            learning_rate = min(learning_rate * 1.5, max(_FASTEST, self.config.learning_rate))
        self._adaptive_learning_rate = learning_rate
        return learning_rate

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return self.collector.envs

    def _make_buffer(self) -> None:
        """With it, what learns from it: on the CPU minibatch by minibatch, elsewhere by epochs."""
        self.buffer: Any = self.collector.new_buffer(self.config.n_steps, self.agent)
        self._epochs: Epochs | None = None
        if not isinstance(self.buffer, RolloutBuffer) or self.agent.device.type != "cpu":
            n_epochs = 1 if self._looks_at_kl else self.config.n_epochs
            self._epochs = Epochs(self.agent, self.buffer, self._programs, n_epochs=n_epochs)

    def resize(self, n_envs: int) -> int:
        """At most ``n_envs``: a rollout must still cut into equal minibatches; at least that."""
        n_steps, multiple = self.config.n_steps, self.config.n_minibatches
        if not self.agent.state_size:  # else minibatches are made of whole sequences
            multiple //= math.gcd(n_steps, multiple)
        n_envs = max(n_envs // multiple, 1) * multiple
        if n_envs != self.collector.n_envs:
            self.collector.resize(n_envs, self.agent)
            self._make_buffer()
            if isinstance(self._scaler, RewardScaler):  # envs as tensors cannot be resized
                self._scaler.resize(n_envs)
        return n_envs

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs go on where they stood when ``state`` was saved."""
        self.collector.resume_at(state["collector"]["position"], snapshots, self.agent)
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, to be shown."""
        return self.buffer.shown()  # type: ignore[no-any-return]

    def request_stop(self, reason: str) -> None:
        """End training after this iteration."""
        self.stop_reason = reason

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes, to go on in the midst of their episodes.

        None where they do not stand between two rollouts, or cannot be had; empty where
        ``state_dict`` has them.
        """
        if not self.collector.is_between_rollouts or not self.snapshots_envs:
            return None
        return self.collector.snapshots()

    def state_dict(self) -> StateDict:
        """Everything that goes on from here."""
        return {
            "agent": self.agent.state_dict(),
            "collector": self.collector.state_dict(),
            "generator": self._generator.get_state(),
            "learning_rate": self._adaptive_learning_rate,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "n_episodes": self.n_episodes,
            "recent_episodes": [list(episode) for episode in self._recent],
            "global_generators": global_generators_state(),
            "callbacks": {name: each.state_dict() for name, each in self.callbacks.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from a state; of the envs, only the numbers: see ``resume_episodes``."""
        set_global_generators_state(state["global_generators"])
        self.agent.load_state_dict(state["agent"])
        self.collector.load_state_dict(state["collector"])
        self._generator.set_state(state["generator"])
        self._adaptive_learning_rate = state["learning_rate"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
            self._scaler.begin_episodes()  # unless resume_episodes says otherwise
        self.iteration = state["iteration"]
        self.env_steps = state["env_steps"]
        self.n_episodes = state["n_episodes"]
        self._recent.extend(Episode(*episode) for episode in state["recent_episodes"])
        for name, callback_state in state["callbacks"].items():
            if name in self.callbacks:  # a resumed run may have dropped or added some
                self.callbacks[name].load_state_dict(callback_state)


def _number(name: str, value: Any) -> float:
    """A metric as a plain number: callbacks may add what NumPy or torch made."""
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"metric {name} is {value!r}, no number") from error


def annealed(value: float, schedule: str, progress: float) -> float:
    """``value`` at ``progress`` (0 to 1) through the run: as it is, or on its way to zero."""
    if schedule == "linear":
        return value * (1.0 - progress)
    if schedule == "cosine":
        return value * 0.5 * (1.0 + math.cos(math.pi * progress))
    return value


def _on_host(results: Sequence[UpdateResult]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Metrics, [n, 6], and flags, [n], of n gradient steps: one transfer from the device."""
    metrics = torch.cat([each.metrics.view(-1, len(UPDATE_METRICS)) for each in results])
    finite = torch.cat([each.finite.view(-1) for each in results])
    table = torch.cat([metrics, finite.unsqueeze(1)], dim=1).cpu().numpy()
    return table[:, :-1], table[:, -1] != 0


def _means(metrics: NDArray[Any], finite: NDArray[np.bool_]) -> Metrics:
    """Of the updates that were made."""
    n_skipped = int((~finite).sum())
    values = np.where(finite[:, None], metrics, 0.0).sum(axis=0) / max(len(finite) - n_skipped, 1)
    means = dict(zip(UPDATE_METRICS, values.tolist(), strict=True))
    return {**means, "loss/skipped_updates": float(n_skipped)} if n_skipped else means


def _latest(episodes: Sequence[Episode], n: int) -> list[Episode]:
    """The last ``n``; more, where the mean of several is all that is known of them."""
    latest: list[Episode] = []
    for episode in reversed(episodes):
        if n <= 0:
            break
        latest.append(episode)
        n -= episode.n
    return latest[::-1]


def _episode_means(suffix: str, episodes: Sequence[Episode]) -> Metrics:
    """Mean return and length; nothing where no episode has ended yet."""
    if not episodes:
        return {}
    returns, lengths, weights = zip(*episodes, strict=True)
    return {
        f"rollout/episode_return{suffix}": float(np.average(returns, weights=weights)),
        f"rollout/episode_length{suffix}": float(np.average(lengths, weights=weights)),
    }
