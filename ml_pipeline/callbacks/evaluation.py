"""PeriodicEvaluation: how good the policy is without exploration, on seeds of its own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from ml_pipeline.config import next_multiple, whole_steps
from ml_pipeline.envs.factory import EnvFactory, close_env
from ml_pipeline.protocols import Callback, Metrics, Trainer
from ml_pipeline.runs.evaluate import evaluate
from ml_pipeline.seeding import stream_seed


class PeriodicEvaluation(Callback):
    """Every ``eval_every_steps`` env steps, and at the end, plays ``n_episodes`` greedy episodes.

    The episodes are the same ones each time, so that two evaluations differ by the policy alone.
    """

    def __init__(
        self,
        make_env: EnvFactory,
        seed: int,
        eval_every_steps: float = 10_000,
        n_episodes: int = 10,
    ) -> None:
        self.eval_every_steps = whole_steps("eval_every_steps", eval_every_steps)
        self.n_episodes = whole_steps("n_episodes", n_episodes)
        self._make_env = make_env
        self._seed = stream_seed(seed, "evaluation")
        self._next = self.eval_every_steps
        self._env: gym.Env[Any, Any] | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        self._next = next_multiple(self.eval_every_steps, trainer.env_steps)

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if trainer.env_steps < self._next and not trainer.is_last_iteration():
            return
        self._next = next_multiple(self.eval_every_steps, trainer.env_steps)
        if self._env is None:
            self._env = self._make_env()
        result = evaluate(
            trainer.agent,
            self._env,
            n_episodes=self.n_episodes,
            seed=self._seed,
            deterministic=True,
        )
        metrics["eval/episode_return"] = result.mean
        metrics["eval/episode_return_std"] = result.std
        metrics["eval/episode_length"] = result.mean_length
        metrics["eval/n_cut_episodes"] = result.n_cut

    def on_train_end(self, trainer: Trainer) -> None:
        if self._env is not None:
            close_env(self._env)
            self._env = None
