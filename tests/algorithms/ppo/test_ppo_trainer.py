"""PPOTrainer: one iteration of PPO, its metrics, and values that are not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_agents import Played, agent_in
from tiny_envs import BreakingEnv, CountingEnv
from tiny_torch_envs import Breaking, Places

from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.contracts import Resizes, ResumesEpisodes, RunContext, ShowsRollouts


def trainer_of(env: Any = None, network: Any = MLP, **more: Any) -> PPOTrainer:
    """``env`` has two envs; ``more`` are settings of PPO, or ``fast``."""
    env = env or SerialEnv([CountingEnv] * 2)
    settings = {"n_steps": 6, "n_epochs": 2, "n_minibatches": 3, "learning_rate": 0.01}
    agent = agent_in(env, network, **{**settings, **more})
    skips = agent.config.on_nonfinite == "skip"
    return PPOTrainer(
        agent, Played(env, 6, agent, allow_nonfinite=skips).collector, RunContext.alone(seed=1)
    )


def test_an_iteration_returns_the_metrics_of_rollout_and_update() -> None:
    metrics = trainer_of().train_episode_vectorized()

    assert metrics["n_envs"] == 2
    assert metrics["n_completed_episodes"] == 4
    assert metrics["rollout/episode_return"] == 60.0
    assert metrics["rollout/episode_length"] == 3.0
    assert metrics["rollout/episode_return_mean_100"] == 60.0
    names = ["loss/policy", "loss/value", "loss/grad_norm", "policy/entropy", "policy/approx_kl"]
    names += ["policy/clip_fraction", "policy/learning_rate", "value/explained_variance"]
    for name in (*names, "time/collect_seconds"):
        assert isinstance(metrics[name], float), name


def test_a_trainer_resizes_resumes_episodes_and_shows_rollouts() -> None:
    abilities = (Resizes, ResumesEpisodes, ShowsRollouts)

    assert all(isinstance(trainer_of(), ability) for ability in abilities)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (MLP, r"n_minibatches=5: .* = 12 transitions do not divide into 5 equal minibatches"),
        (Recurrent, r"n_minibatches=5: n_envs=2 sequences .* do not divide into 5"),
    ],
    ids=["mlp", "lstm"],
)
def test_sizes_that_do_not_divide_are_refused(network: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_of(network=network, n_minibatches=5)


def test_every_epoch_gets_the_rates_of_the_progress() -> None:
    names = ("learning_rate", "clip_range", "entropy_coef")
    schedules = {f"{name}_schedule": "linear" for name in names}
    trainer = trainer_of(entropy_coef=0.1, **schedules)
    seen: list[Rates] = []
    epoch = trainer.agent.epoch

    def noted(rollout: Any, order: Any, rates: Rates) -> Any:
        seen.append(rates)
        return epoch(rollout, order, rates)

    trainer.agent.epoch = noted  # type: ignore[method-assign]

    trainer.progress = 0.75
    metrics = trainer.train_episode_vectorized()

    assert seen == [pytest.approx((0.0025, 0.05, 0.025))] * 2
    assert metrics["policy/learning_rate"] == pytest.approx(0.0025)


def test_a_large_kl_ends_the_iteration_after_the_epoch() -> None:
    options = {"n_epochs": 10, "learning_rate": 0.05}

    free = trainer_of(**options).train_episode_vectorized()
    limited = trainer_of(**options, max_kl=1e-6).train_episode_vectorized()

    assert free["policy/n_epochs"] == 10
    assert 1 <= limited["policy/n_epochs"] < 10


def test_an_adaptive_learning_rate_changes_after_each_epoch() -> None:
    options = {"learning_rate_schedule": "adaptive", "learning_rate": 1e-3}
    slow, fast = (trainer_of(**options, target_kl=kl) for kl in (1e-12, 10.0))
    for trainer in (slow, fast):
        for _ in range(2):  # iterations of two epochs
            trainer.train_episode_vectorized()

    assert slow.state_dict()["learning_rate"] == pytest.approx(1e-3 / 1.5**4)
    assert fast.state_dict()["learning_rate"] == pytest.approx(1e-3 * 1.5**4)


def test_scaled_rewards_change_the_loss_and_not_the_reported_return() -> None:
    plain, scaled = (trainer_of(scale_reward=each) for each in (False, True))

    metrics = [each.train_episode_vectorized() for each in (plain, scaled)]

    assert metrics[0]["rollout/episode_return"] == metrics[1]["rollout/episode_return"] == 60.0
    assert metrics[1]["loss/value"] < 0.1 * metrics[0]["loss/value"]


def test_observations_are_normalised_by_earlier_rollouts() -> None:
    trainer = trainer_of(normalize_obs=True)
    moments = trainer.agent.model.preprocess.moments_of("")

    assert moments is not None
    assert moments.count.item() == 0
    trainer.train_episode_vectorized()

    assert moments.count.item() == 12
    assert moments.mean.tolist() == [1.0, 1.0]  # of 0, 1, 2 in each episode


@pytest.mark.parametrize("fast", [True, False], ids=["numpy", "torch"])
def test_a_loss_that_is_not_finite_stops_training_before_a_weight_changes(fast: bool) -> None:
    trainer = trainer_of(fast=fast)
    trainer.agent.model.value_head.weight.data.fill_(1e30)  # values overflow
    before = trainer.agent.adam.values.clone()

    with pytest.raises(TrainingError) as caught:
        trainer.train_episode_vectorized()

    words = str(caught.value)
    assert words.startswith("epoch 1, minibatch 1: value_loss")
    assert "the gradients of critic.layers.0.weight" in words
    assert torch.equal(trainer.agent.adam.values, before)


@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
@pytest.mark.parametrize("shared_trunk", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", ["host", "tensor"])
def test_skipped_updates_are_counted_and_change_nothing(
    kind: str, shared_trunk: bool, schedule: str
) -> None:
    env = Breaking(2) if kind == "tensor" else SerialEnv([partial(BreakingEnv, "obs")] * 2)
    options = {"normalize_obs": True, "scale_reward": True, "learning_rate_schedule": schedule}
    options |= {"on_nonfinite": "skip", "n_minibatches": 1, "shared_trunk": shared_trunk}
    trainer = trainer_of(env, learning_rate=1e-3, **options)
    before = trainer.agent.adam.values.clone()

    metrics = trainer.train_episode_vectorized()

    assert metrics["loss/skipped_updates"] == 2  # this rollout had a NaN
    assert torch.equal(trainer.agent.adam.values, before)
    assert trainer.schedules.rates(0.0).learning_rate == 1e-3
    # The rollouts of host envs that follow have none.
    second = trainer.train_episode_vectorized()
    assert second.get("loss/skipped_updates") == (2 if kind == "tensor" else None)
    assert all(each.isfinite().all() for each in trainer.agent.model.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "calls"), [("host", [True]), ("tensor", [False, True])], ids=["host", "tensor"]
)
def test_hold_is_called_after_the_update_or_before_one_that_is_a_single_launch(
    kind: str, calls: list[bool]
) -> None:
    trainer = trainer_of(Places(2) if kind == "tensor" else None)
    before = trainer.agent.adam.values.clone()
    has_learnt = []

    def hold() -> None:
        assert not trainer.collector.is_between_rollouts
        has_learnt.append(not torch.equal(trainer.agent.adam.values, before))

    trainer.train_episode_vectorized(hold)

    assert has_learnt == calls
    assert np.isfinite(trainer.last_rollout()["rollout/advantages"]).all()
