"""PPOTrainer: one iteration, what it tells, and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tiny_envs import CountingEnv

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config import PPOConfig
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.protocols import Callback, Metrics, Trainer
from ml_pipeline.training.collectors import SyncCollector
from ml_pipeline.training.ppo_trainer import PPOTrainer


def trainer_of(length: int = 3, **more: Any) -> PPOTrainer:
    env = SerialEnv([partial(CountingEnv, length)] * 2)
    config = PPOConfig(n_steps=6, n_epochs=2, n_minibatches=3, learning_rate=0.01)
    spaces = env.single_observation_space, env.single_action_space
    agent = PPOAgent(*spaces, MLP, config, device=torch.device("cpu"), seed=1)
    collector = SyncCollector(env, env_seed=1, noise_seed=2)
    return PPOTrainer(agent, collector, seed=1, **more)


class Listener(Callback):
    """Writes down what it hears; also a logger."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.logged: list[Metrics] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.heard.append("start")

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        self.heard.append(f"end {trainer.iteration}")
        metrics["eval/episode_return"] = 5.0
        if trainer.iteration == 2:
            trainer.request_stop("enough")

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        self.heard.append(f"log {env_steps}")
        self.logged.append(dict(metrics))

    def on_iteration_logged(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.heard.append(f"logged {trainer.iteration}")

    def on_train_end(self, trainer: Trainer) -> None:
        self.heard.append("stop")

    def close(self) -> None: ...


def test_an_iteration_tells_all_that_the_record_promises() -> None:
    metrics = trainer_of().train_episode_vectorized()

    assert metrics["n_envs"] == 2
    assert metrics["n_completed_episodes"] == 4
    assert metrics["rollout/episode_return"] == 60.0
    assert metrics["rollout/episode_length"] == 3.0
    assert metrics["rollout/episode_return_mean_100"] == 60.0
    assert metrics["env_steps"] == 12
    for name in (
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/approx_kl",
        "policy/clip_fraction",
        "value/explained_variance",
        "time/env_steps_per_second",
    ):
        assert isinstance(metrics[name], float), name


def test_a_rollout_without_a_finished_episode_tells_no_return() -> None:
    metrics = trainer_of(length=50).train_episode_vectorized()

    assert metrics["n_completed_episodes"] == 0
    assert "rollout/episode_return" not in metrics


def test_callbacks_and_loggers_hear_in_order_until_one_asks_to_stop() -> None:
    listener = Listener()
    trainer = trainer_of(callbacks={"listener": listener}, loggers=[listener])

    trainer.train(1_000)

    one = ["end 1", "log 12", "logged 1"]
    two = ["end 2", "log 24", "logged 2"]
    assert listener.heard == ["start", *one, *two, "stop"]
    assert listener.logged[0]["eval/episode_return"] == 5.0
    assert trainer.stop_reason == "enough"


def test_training_ends_with_the_first_rollout_that_reaches_the_goal() -> None:
    trainer = trainer_of()

    trainer.train(13)

    assert (trainer.iteration, trainer.env_steps) == (2, 24)


def test_the_learning_rate_falls_linearly_to_the_goal() -> None:
    listener = Listener()
    trainer = trainer_of(loggers=[listener])

    trainer.train(48)

    rates = [metrics["policy/learning_rate"] for metrics in listener.logged]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_the_mean_of_the_last_100_forgets_older_episodes() -> None:
    trainer = trainer_of()
    for _ in range(30):  # 4 episodes each
        metrics = trainer.train_episode_vectorized()

    assert metrics["rollout/total_episodes"] == 120
    assert metrics["rollout/episode_return_mean_100"] == 60.0
    assert len(trainer.state_dict()["recent_episodes"]) == 100


def test_an_interrupted_iteration_that_changed_the_weights_is_logged_once() -> None:
    class Impatient(Callback):
        def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
            raise KeyboardInterrupt

    listener = Listener()
    callbacks = {"impatient": Impatient(), "listener": listener}
    trainer = trainer_of(callbacks=callbacks, loggers=[listener])

    with pytest.raises(KeyboardInterrupt):
        trainer.train(1_000)

    assert listener.heard == ["start", "log 12", "logged 1"]


def test_a_rollout_that_was_cut_short_leaves_no_trace_in_the_state() -> None:
    trainer = trainer_of()
    trainer.train_episode_vectorized()
    before = trainer.state_dict()
    trainer.collector.env.close()

    with pytest.raises(Exception, match="closed"):
        trainer.train_episode_vectorized()

    after = trainer.state_dict()
    assert torch.equal(before["collector"]["generator"], after["collector"]["generator"])
    assert (before["iteration"], before["env_steps"]) == (after["iteration"], after["env_steps"])


def test_a_loaded_trainer_goes_on_with_the_same_draws() -> None:
    first, second = trainer_of(), trainer_of()
    first.train_episode_vectorized()
    second.load_state_dict(first.state_dict())
    # Twelve steps are four whole episodes: both envs stand at a reset.

    ours, theirs = first.train_episode_vectorized(), second.train_episode_vectorized()

    for name in ours:
        if not name.startswith("time/"):
            assert ours[name] == theirs[name], name
