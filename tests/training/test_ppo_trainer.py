"""PPOTrainer: one iteration, what it tells, and who hears of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_envs import BreakingEnv, CountingEnv
from tiny_torch_envs import Places
from torch import Tensor

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent, Rates
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.protocols import Callback, Episode, Metrics, Trainer
from ml_pipeline.training.collector import Collector
from ml_pipeline.training.gpu.programs import Programs
from ml_pipeline.training.ppo_trainer import PPOTrainer, TrainingError, _episode_means, _latest
from ml_pipeline.training.tensor.collector import TensorCollector


def trainer_of(
    length: int = 3, options: Mapping[str, Any] | None = None, make_env: Any = None, **more: Any
) -> PPOTrainer:
    env = SerialEnv([make_env or partial(CountingEnv, length)] * 2)
    settings = {"n_steps": 6, "n_epochs": 2, "n_minibatches": 3, "learning_rate": 0.01}
    config = PPOConfig(**{**settings, **(options or {})})
    spaces = env.single_observation_space, env.single_action_space
    agent = PPOAgent(*spaces, MLP, config, device=torch.device("cpu"), seed=1)
    skips = config.on_nonfinite == "skip"
    collector = Collector([env], env_seed=1, noise_seed=2, allow_nonfinite=skips)
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


class Adds(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        metrics["mine"] = self.value


@pytest.mark.parametrize("value", [np.float32(1.0), np.array(1), torch.tensor(1.0), True])
def test_a_metric_of_any_kind_is_logged_as_a_plain_number(value: Any) -> None:
    listener = Listener()
    trainer = trainer_of(callbacks={"mine": Adds(value)}, loggers=[listener])

    trainer.train(1)

    assert (listener.logged[0]["mine"], type(listener.logged[0]["mine"])) == (1.0, float)


def test_a_metric_that_is_no_number_is_named() -> None:
    trainer = trainer_of(callbacks={"mine": Adds("many")})

    with pytest.raises(TrainingError, match="metric mine is 'many', no number"):
        trainer.train(1)


def test_training_ends_with_the_first_rollout_that_reaches_the_goal() -> None:
    trainer = trainer_of()

    trainer.train(13)

    assert (trainer.iteration, trainer.env_steps) == (2, 24)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_what_is_annealed_follows_its_schedule_to_the_goal(
    schedule: str, shares: list[float]
) -> None:
    names = ("learning_rate", "clip_range", "entropy_coef")
    options = {"entropy_coef": 0.1, **{f"{name}_schedule": schedule for name in names}}
    trainer = trainer_of(options=options)
    seen: list[Rates] = []
    update = trainer.agent.update
    trainer.agent.update = lambda batch, rates: (seen.append(rates), update(batch, rates))[1]  # type: ignore[method-assign,func-returns-value]

    trainer.train(48)

    first = seen[:: 2 * 3]  # of each iteration's 2 epochs of 3 minibatches
    for name, full in zip(names, (0.01, 0.2, 0.1), strict=True):
        values = [getattr(rates, name) for rates in first]
        assert values == pytest.approx([full * share for share in shares], rel=1e-5), name


def test_an_epoch_that_moves_too_far_is_the_last_of_its_iteration() -> None:
    options = {"n_epochs": 10, "learning_rate": 0.05}

    free = trainer_of(options=options).train_episode_vectorized()
    held = trainer_of(options={**options, "max_kl": 1e-6}).train_episode_vectorized()

    assert free["policy/n_epochs"] == 10
    assert 1 <= held["policy/n_epochs"] < 10


def test_an_adaptive_learning_rate_follows_the_kl_and_is_part_of_the_state() -> None:
    options = {"learning_rate_schedule": "adaptive", "learning_rate": 1e-3}

    slow = trainer_of(options={**options, "target_kl": 1e-12})
    fast = trainer_of(options={**options, "target_kl": 10.0})
    for trainer in (slow, fast):
        trainer.train(24)  # two iterations of two epochs

    assert slow.state_dict()["learning_rate"] == pytest.approx(1e-3 / 1.5**4)
    assert fast.state_dict()["learning_rate"] == pytest.approx(1e-3 * 1.5**4)
    other = trainer_of(options=options)
    other.load_state_dict(fast.state_dict())
    metrics = other.train_episode_vectorized()
    assert metrics["policy/learning_rate"] == pytest.approx(1e-3 * 1.5**4)


def test_scaled_rewards_change_what_is_learned_and_not_what_is_told() -> None:
    plain, scaled = trainer_of(), trainer_of(options={"scale_reward": True})

    told = [each.train_episode_vectorized() for each in (plain, scaled)]

    assert told[0]["rollout/episode_return"] == told[1]["rollout/episode_return"] == 60.0
    assert told[1]["loss/value"] < 0.1 * told[0]["loss/value"]


def test_observations_are_normalised_by_the_rollouts_before() -> None:
    trainer = trainer_of(options={"normalize_obs": True})
    moments = trainer.agent.model.preprocess.moments_of("")

    assert moments is not None
    assert moments.count.item() == 0
    trainer.train_episode_vectorized()

    assert moments.count.item() == 12
    assert moments.mean.tolist() == [1.0, 1.0]  # 0, 1, 2 again and again


def broken_critic(trainer: PPOTrainer) -> Tensor:
    """Let the values overflow; what was sampled before is sound."""
    weight = trainer.agent.model.value_head.weight
    weight.data.fill_(1e30)
    return weight


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loss_that_is_not_finite_stops_the_run_before_a_weight_changes(by_hand: bool) -> None:
    trainer = trainer_of()
    if not by_hand:
        trainer.agent._by_hand = None
    broken_critic(trainer)
    before = trainer.agent.adam.values.clone()

    with pytest.raises(TrainingError) as caught:
        trainer.train_episode_vectorized()

    words = str(caught.value)
    assert words.startswith("iteration 1, epoch 1, minibatch 1: loss/value")
    assert "the gradients of critic.layers.0.weight" in words
    assert torch.equal(trainer.agent.adam.values, before)
    assert trainer.iteration == 0


def test_minibatches_can_be_skipped_instead_and_are_counted() -> None:
    trainer = trainer_of(
        options={"on_nonfinite": "skip", "n_minibatches": 1, "normalize_obs": True},
        make_env=partial(BreakingEnv, "obs"),
    )

    metrics = [trainer.train_episode_vectorized() for _ in range(2)]

    assert metrics[0]["loss/skipped_updates"] == 2  # the nan came in this rollout
    assert "loss/skipped_updates" not in metrics[1]
    assert torch.isfinite(trainer.agent.adam.values).all()
    assert all(math.isfinite(value) for value in metrics[1].values())


def test_the_mean_of_the_last_100_forgets_older_episodes() -> None:
    trainer = trainer_of()
    for _ in range(30):  # 4 episodes each
        metrics = trainer.train_episode_vectorized()

    assert metrics["rollout/total_episodes"] == 120
    assert metrics["rollout/episode_return_mean_100"] == 60.0
    assert len(trainer.state_dict()["recent_episodes"]) == 100


def test_the_means_count_each_episode_once_however_many_are_told_together() -> None:
    episodes = [Episode(10.0, 4.0, 3), Episode(30.0, 8.0, 1)]

    means = _episode_means("_mean_100", episodes)

    assert means == {
        "rollout/episode_return_mean_100": (3 * 10.0 + 30.0) / 4,
        "rollout/episode_length_mean_100": (3 * 4.0 + 8.0) / 4,
    }
    assert _episode_means("", []) == {}


@pytest.mark.parametrize(
    ("counts", "n_latest"),
    [
        ([], 0),
        ([1] * 150, 100),
        ([60, 60, 60], 2),  # 60 are too few, 120 are enough
        ([60, 40, 60], 2),
        ([500, 1, 99], 2),
        ([500, 1, 98], 3),
        ([7, 500], 1),
        ([3, 4], 2),
    ],
)
def test_the_last_100_are_the_newest_rollouts_that_hold_so_many(
    counts: list[int], n_latest: int
) -> None:
    episodes = [Episode(float(place), 1.0, n) for place, n in enumerate(counts)]

    assert _latest(episodes, 100) == episodes[len(episodes) - n_latest :]


def test_a_trainer_of_tensor_envs_counts_every_episode_and_tells_their_means() -> None:
    env = Places(2)
    config = PPOConfig(n_steps=12, n_epochs=1, n_minibatches=2)
    spaces = env.single_observation_space, env.single_action_space
    agent = PPOAgent(*spaces, MLP, config, device=torch.device("cpu"), seed=1)
    programs = Programs(agent.device)
    collector = TensorCollector(env, env_seed=1, noise_seed=2, programs=programs)
    trainer = PPOTrainer(agent, collector, seed=1)

    metrics = [trainer.train_episode_vectorized() for _ in range(2)][-1]

    # Twelve steps are 3 episodes of 10 + 20 + 30 + 40, and 4 of 11 + 21 + 31.
    assert metrics["n_completed_episodes"] == 7
    assert metrics["rollout/total_episodes"] == 14
    assert metrics["rollout/episode_return"] == pytest.approx((3 * 100.0 + 4 * 63.0) / 7)
    assert metrics["rollout/episode_length_mean_100"] == pytest.approx(24 / 7)
    saved = trainer.state_dict()["recent_episodes"]
    assert [each[2] for each in saved] == [7, 7]


def test_episodes_that_an_older_checkpoint_tells_one_by_one_are_read() -> None:
    first, second = trainer_of(), trainer_of()
    first.train_episode_vectorized()
    state = first.state_dict()
    state["recent_episodes"] = [each[:2] for each in state["recent_episodes"]]

    second.load_state_dict(state)

    assert second.state_dict()["recent_episodes"] == first.state_dict()["recent_episodes"]


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
    trainer.envs[0].close()

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
