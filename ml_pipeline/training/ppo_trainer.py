"""PPOTrainer: one iteration of PPO. It collects a rollout, then runs epochs of gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.protocols import Metrics, Rates, StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.checks import check_rollout, check_updates
from ml_pipeline.training.contracts import Rollout, RolloutCollector
from ml_pipeline.training.episode_window import EpisodeWindow
from ml_pipeline.training.gpu.epochs import Epochs, update_means
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.schedules import Schedules


class PPOTrainer:
    """Trains ``agent`` on rollouts of ``collector``, each [n_steps, n_envs]."""

    def __init__(
        self,
        agent: PPOAgent,
        collector: RolloutCollector,
        *,
        seed: int,
        programs: Programs | None = None,
    ) -> None:
        """``programs`` compiles and captures the work on a GPU; None: it runs eagerly."""
        self.agent = agent
        self.collector = collector
        self.config = config = agent.config
        reason = config.why_not(collector.n_envs, recurrent=bool(agent.memory_size))
        if reason is not None:
            raise ValueError(reason)
        self.progress = 0.0  # through the run, for the schedules
        self.schedules = Schedules(config)
        self.episodes = EpisodeWindow()
        self._programs = programs or Programs(agent.device)
        if remark := agent.check_fast():
            self._programs.tell(remark)
        self._scaler = None
        if config.scale_reward:
            self._scaler = collector.new_scaler(gamma=config.gamma, clip=config.clip_reward)
        self._on_host = collector.on_host and agent.device.type == "cpu"
        self._make_buffer()
        self._generator = torch.Generator().manual_seed(stream_seed(seed, "minibatches"))

    def _make_buffer(self) -> None:
        self.buffer: Rollout = self.collector.new_buffer(self.config.n_steps, self.agent)
        # One epoch at a time if the KL or a check affects the next epoch.
        one_by_one = self.schedules.uses_kl or self._on_host
        n_epochs = 1 if one_by_one else self.config.n_epochs
        self._epochs = Epochs(
            self.agent,
            self.buffer,
            self._programs,
            n_epochs=n_epochs,
            n_minibatches=self.config.n_minibatches,
            on_host=self._on_host,
        )

    @property
    def envs(self) -> list[VectorEnv[Any, Any, Any]]:
        return self.collector.envs

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.collector.n_envs)

    def train_episode_vectorized(self, hold: Callable[[], None] = lambda: None) -> Metrics:
        """One iteration: collect a [T, n_envs] rollout, improve on it, return the metrics.

        An interrupt before ``hold`` discards the rollout; a later one waits for the end.
        """
        rates = self.schedules.rates(self.progress)
        if not self.collector.is_interruptible:
            hold()
        # Silence NumPy; non-finite values raise our own errors.
        with np.errstate(over="ignore", invalid="ignore"):
            stats = self.collector.collect(self.agent, self.buffer)
            hold()
            means = self._improve(rates)
        self.collector.commit(self.buffer.n_steps)
        return {
            "n_envs": self.buffer.n_envs,
            **self.episodes.add(stats.episodes),
            **means,
            "policy/learning_rate": rates.learning_rate,
            "time/collect_seconds": stats.seconds,
        }

    def _improve(self, rates: Rates) -> Metrics:
        """Run all epochs; wait for a GPU only at the end, unless each epoch needs the KL."""
        config, buffer = self.config, self.buffer
        last = self.collector.last_inputs(self.agent)
        buffer.finish(last, gamma=config.gamma, lam=config.gae_lambda, scaler=self._scaler)
        tables: list[Tensor] = []
        n_epochs = 0
        while n_epochs < config.n_epochs:
            tables.append(self._epochs.run(rates, self._generator))
            n_epochs += self._epochs.n_epochs
            if self._on_host:
                self._check_updates(tables[-1].numpy(), first_epoch=n_epochs, at_once=True)
            if self.schedules.uses_kl:
                table = tables[-1].cpu().numpy()
                kl = update_means(table)["policy/approx_kl"]
                if table[:, -1].any():  # otherwise no step was taken
                    rates = self.schedules.adapted(rates, kl)
                if self.schedules.is_kl_too_large(kl):
                    break
        self.agent.learn_moments(buffer.observations())
        table, quality = torch.cat(tables).cpu().numpy(), buffer.quality()
        if config.on_nonfinite == "stop":
            check_rollout(quality.is_finite)
        self._check_updates(table, first_epoch=1, at_once=False)
        return {
            **update_means(table),
            "value/explained_variance": quality.explained_variance,
            "policy/n_epochs": float(n_epochs),
        }

    def _check_updates(self, table: NDArray[Any], *, first_epoch: int, at_once: bool) -> None:
        if self.config.on_nonfinite == "stop" and not table[:, -1].all():
            broken = self.agent.adam.broken_gradients() if at_once else None
            n_minibatches = self.config.n_minibatches
            check_updates(
                table, first_epoch=first_epoch, n_minibatches=n_minibatches, broken=broken
            )

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

    def state_dict(self) -> StateDict:
        return {
            "agent": self.agent.state_dict(),
            "collector": self.collector.state_dict(),
            "generator": self._generator.get_state(),
            "learning_rate": self.schedules.adaptive_learning_rate,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            **self.episodes.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Everything except the current episodes: see ``resume_episodes``."""
        self.agent.load_state_dict(state["agent"])
        self.collector.load_state_dict(state["collector"])
        self._generator.set_state(state["generator"])
        self.schedules.adaptive_learning_rate = state["learning_rate"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])
            self._scaler.begin_episodes()
        self.episodes.load_state_dict(state)
