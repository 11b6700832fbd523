"""PPOTrainer: one iteration of PPO. It collects a rollout, then runs epochs of gradient steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.hooks import RolloutHook, find_estimator
from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.algorithms.ppo.on_device import DeviceEpochs, DeviceOrders, SentOrders
from ml_pipeline.algorithms.ppo.reports import (
    N_MEANS,
    mask_error,
    rollout_error,
    update_error,
    update_means,
)
from ml_pipeline.envs.episode_stats import EpisodeWindow
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.signals import Hold, never_held
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.schedules import find_schedule

_SLOWEST, _FASTEST = 1e-6, 1e-2  # bounds of an adaptive learning rate
_LONG_UPDATE = 100  # epochs; more of them run one by one also on a GPU


class PPOTrainer:
    """Trains ``agent`` on rollouts of ``collector``, each [n_steps, n_envs]."""

    def __init__(
        self,
        agent: PPOAgent,
        collector: Collector,
        context: RunContext,
    ) -> None:
        self.agent = agent
        self.collector = collector
        self.world = context.world
        self.config = config = agent.config
        reason = config.why_not(collector.n_envs, recurrent=bool(agent.memory_size))
        if reason is not None:
            raise ValueError(reason)
        if collector.has_reset_rows and config.n_steps == 1:
            raise TrainingError(
                "agent.n_steps=1: in this vector env a rollout of one step may hold no transition; "
                "use at least 2"
            )
        self.progress = 0.0  # through the run, for the schedules
        self.schedules = Schedules(config)
        self._estimator = find_estimator(config)
        self._hook = RolloutHook.of(agent, context)
        self.episodes = EpisodeWindow()
        self._programs = context.programs
        for remark in filter(None, (agent.check_fast(), agent.distribution.remark())):
            self._programs.tell(remark)
        if not collector.on_host:
            agent.compile(self._programs)
        self._scaler = None
        if config.scale_reward:
            self._scaler = collector.new_scaler(gamma=config.gamma, clip=config.clip_reward)
        self._on_host = collector.on_host and agent.device.type == "cpu"
        self._make_buffer()
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "minibatches"))

    def _make_buffer(self) -> None:
        config, device = self.config, self.agent.device
        self.buffer = buffer = self.collector.new_buffer(config.n_steps, self.agent)
        n_rows = buffer.n_items // buffer.n_envs
        self._n_items = self.world.all_envs(buffer.n_items)  # that an epoch shuffles
        # None for one rank, which has all of each minibatch.
        self._minibatches = self.world.minibatches(n_rows, buffer.n_envs, config.n_minibatches)
        # One epoch at a time if the KL, a check or a stop signal affects the next epoch.
        is_long = config.n_epochs > _LONG_UPDATE or config.recompute_advantages
        self._is_stoppable = self._on_host or self.schedules.uses_kl or is_long
        self._device_epochs: DeviceEpochs | None = None
        if not self._on_host:
            orders: SentOrders | DeviceOrders = SentOrders(self._shuffled, device)
            if not self.collector.on_host:
                orders = DeviceOrders(self._n_items, device, self._programs)
            n_at_once = 1 if self._is_stoppable else config.n_epochs
            self._device_epochs = DeviceEpochs(self._epoch, orders, n_at_once, self._programs)

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return self.collector.envs

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.world.all_envs(self.collector.n_envs))

    def train_episode_vectorized(self, hold: Hold = never_held) -> Metrics:
        """One iteration: collect a [T, n_envs] rollout, improve on it, return the metrics.

        An interrupt before ``hold`` discards the iteration; a later one waits for the end.
        """
        rates = self.schedules.rates(self.progress)
        # Silence NumPy; non-finite values raise our own errors.
        with np.errstate(over="ignore", invalid="ignore"):
            self.collector.collect(self.agent, self.buffer)
            if not self._is_stoppable:
                hold()  # the update is one launch on a GPU, which ends soon
            with undone_if_stopped(self._learnt, self._load_learnt, enabled=self._is_stoppable):
                told = {} if self._hook is None else self._hook(self.buffer.rollout())
                means = self._improve(rates)
                hold()
        self.collector.commit(self.buffer.n_steps)
        return {
            "n_envs": self.world.all_envs(self.buffer.n_envs),
            **self.episodes.add(self.world.joined(self.collector.episodes)),
            **told,
            **means,
            "policy/learning_rate": rates.learning_rate,
            "time/collect_seconds": self.collector.seconds,
        }

    def _improve(self, rates: Rates) -> Metrics:
        """Run all epochs; wait for a GPU only at the end, unless each epoch needs the KL."""
        agent, config, buffer = self.agent, self.config, self.buffer
        stops = config.on_nonfinite == "stop"
        estimate: Any = {
            "gamma": config.gamma,
            "lam": config.gae_lambda,
            "estimator": self._estimator,
        }
        buffer.finish(scaler=self._scaler, **estimate)
        tables: list[Tensor] = []  # one row per gradient step, see ``as_row``
        n_epochs = 0
        while n_epochs < config.n_epochs:
            if config.recompute_advantages and n_epochs > 0:
                buffer.recompute(**estimate)
            if self._device_epochs is None:
                order = self._shuffled(self._generator)
                tables.append(self._epoch(order, rates))
                n_epochs += 1
            else:
                tables.append(self._device_epochs.run(rates, self._generator))
                n_epochs += self._device_epochs.n_epochs
            self.world.check_equal(lambda: [agent.adam.values], "the weights")
            if self._on_host and stops and not tables[-1][:, -1].all():
                raise update_error(torch.cat(tables).numpy(), config, agent.adam)
            if self.schedules.uses_kl:
                table = tables[-1].cpu().numpy()
                kl = update_means(table, agent.extra_metrics)["policy/approx_kl"]
                if table[:, -1].any():  # otherwise no step was taken
                    rates = self.schedules.adapted(rates, kl)
                if self.schedules.is_kl_too_large(kl):
                    break
        agent.learn_moments(buffer.observations())
        table, quality = torch.cat(tables).cpu().numpy(), buffer.quality()
        if stops and not quality.is_finite:
            raise rollout_error()
        if not quality.has_choices:
            raise mask_error()
        if stops and not table[:, -1].all():
            raise update_error(table, config, None)
        return {
            **update_means(table, agent.extra_metrics),
            "value/explained_variance": quality.explained_variance,
            "policy/n_epochs": float(n_epochs),
        }

    def _shuffled(self, generator: torch.Generator) -> Tensor:
        """The order of an epoch."""
        return self.buffer.transitions_in(torch.randperm(self._n_items, generator=generator))

    def _epoch(self, order: Tensor, rates: Rates) -> Tensor:
        """One pass over the rollout, in minibatches; one row per gradient step."""
        rollout, minibatches = self.buffer.finished(), self._minibatches
        if minibatches is None:
            return self.agent.epoch(rollout, order.view(self.config.n_minibatches, -1), rates)
        # Each rank computes the gradient of its own transitions, FlatAdam averages the gradients.
        parts, shares = minibatches.of(order)
        if self.agent.normalises_over_ranks:
            advantage = minibatches.normalised(rollout.advantage, parts, shares)
            rollout = rollout._replace(advantage=advantage)
        table = self.agent.epoch(rollout, parts, rates, shares)
        return minibatches.means(table, shares, len(self.agent.extra_metrics) + N_MEANS)

    def resize(self, n_envs: int) -> int:
        """Train in about ``n_envs`` envs; returns the actual number, which fits the minibatches."""
        n_envs = self.config.fitting_n_envs(n_envs, recurrent=bool(self.agent.memory_size))
        if n_envs != self.collector.n_envs:
            self.collector.resize(n_envs, self.agent)
            self._make_buffer()
            if self._scaler is not None:
                self._scaler.resize(n_envs)
        return n_envs

    def last_rollout(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, for histograms."""
        return self.buffer.arrays()

    def env_snapshots(self) -> list[bytes] | None:
        """All envs as bytes; empty if ``state_dict`` holds them, None during a rollout."""
        return self.collector.snapshots() if self.collector.is_between_rollouts else None

    def resume_episodes(self, state: StateDict, snapshots: Sequence[bytes]) -> None:
        """Let the envs continue where they were when ``state`` was saved."""
        self.collector.resume_at(state["collector"]["position"], snapshots, self.agent)
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _learnt(self) -> StateDict:
        """The state that an update changes."""
        return {
            "agent": self.agent.learnt(),
            "generator": self._generator.get_state(),
            "learning_rate": self.schedules.adaptive_learning_rate,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            **({} if self._hook is None else {"on_rollout": self._hook.state_dict()}),
        }

    def _load_learnt(self, state: StateDict) -> None:
        self.agent.load_learnt(state["agent"])
        self._generator.set_state(state["generator"])
        self.schedules.adaptive_learning_rate = state["learning_rate"]
        if self._hook is not None and "on_rollout" in state:
            self._hook.load_state_dict(state["on_rollout"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

    def state_dict(self) -> StateDict:
        return {
            **self._learnt(),
            "agent": self.agent.state_dict(),
            "collector": self.collector.state_dict(),
            **self.episodes.state_dict(),
        }

    def own_state(self) -> StateDict:
        """The envs of a rank, and the returns of their current episodes, are its own."""
        state = self.state_dict()
        return {name: state[name] for name in ("collector", "scaler")}

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes: see ``resume_episodes``."""
        self._load_learnt(state)
        self.agent.load_state_dict(state["agent"])
        self.collector.load_state_dict(state["collector"])
        if self._scaler is not None:
            self._scaler.begin_episodes()
        self.episodes.load_state_dict(state)


class Schedules:
    """``adaptive_learning_rate`` is its only state."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._is_adaptive = config.learning_rate_schedule == "adaptive"
        self.uses_kl = config.max_kl is not None or self._is_adaptive
        self.adaptive_learning_rate = config.learning_rate
        self._factors = {
            name: find_schedule(getattr(config, f"{name}_schedule"), key=f"agent.{name}_schedule")
            for name in Rates._fields
            if not (name == "learning_rate" and self._is_adaptive)
        }

    def rates(self, progress: float) -> Rates:
        """The settings at ``progress`` (0 to 1) through the run."""
        rates = Rates(self.adaptive_learning_rate, 0.0, 0.0)
        return rates._replace(
            **{
                name: getattr(self._config, name) * factor(progress)
                for name, factor in self._factors.items()
            }
        )

    def adapted(self, rates: Rates, kl: float) -> Rates:
        """A higher learning rate while the KL is below ``target_kl``, a lower one above it."""
        config, learning_rate = self._config, rates.learning_rate
        if not self._is_adaptive:
            return rates
        if kl > 2.0 * config.target_kl:
            learning_rate = max(learning_rate / 1.5, min(_SLOWEST, config.learning_rate))
        elif kl < 0.5 * config.target_kl:
            learning_rate = min(learning_rate * 1.5, max(_FASTEST, config.learning_rate))
        self.adaptive_learning_rate = learning_rate
        return rates._replace(learning_rate=learning_rate)

    def is_kl_too_large(self, kl: float) -> bool:
        return self._config.max_kl is not None and kl > self._config.max_kl


@contextmanager
def undone_if_stopped(
    state_dict: Callable[[], StateDict],
    load_state_dict: Callable[[StateDict], None],
    *,
    enabled: bool,
) -> Iterator[None]:
    """If a stop signal or an error interrupts the block, restore the state from before it."""
    if not enabled:
        yield
        return
    before = _copied(state_dict())
    try:
        yield
    except BaseException:
        load_state_dict(before)
        raise


def _copied(state: Any) -> Any:
    """Like ``copy.deepcopy``, which takes several times as long; this runs in every iteration."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(part) for name, part in state.items()}
    return state if isinstance(state, (int, float, str)) else copy.deepcopy(state)
