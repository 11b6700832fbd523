"""Collector and RolloutBuffer: what only tensor envs have.

tests/contracts/test_rollouts.py tests what they share with host envs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector.utils import batch_space, iterate
from small_agents import CPU, Played, agent_in
from tensor_transitions import READING, Recorder
from tiny_torch_envs import (
    Digits,
    DigitsAndForce,
    DigitsInBits,
    DigitsInRows,
    Drift,
    Forbidding,
    ForbiddingInObs,
    ForbiddingTwo,
    Leaves,
    Places,
    Steered,
    Stuck,
)
from torch.utils._pytree import tree_leaves

from ml_pipeline.algorithms.ppo.algorithm import make_trainer
from ml_pipeline.algorithms.ppo.on_device import DeviceOrders
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.training.contracts import Envs, RunContext
from ml_pipeline.training.graphs import Programs


@pytest.mark.parametrize(
    "make_env", [TorchCartPole, Drift, Places, Steered, partial(Places, max_episode_steps=3)]
)
def test_a_rollout_and_its_episodes_equal_those_of_a_plain_loop(make_env: Any) -> None:
    played, plain = Played(make_env(5), n_steps=40), make_env(5)
    plain.reset(seed=10)
    to_env = played.agent.distribution.to_torch_env

    for _ in range(2):
        (mean,) = played.collect().episodes
        returns: list[float] = []
        lengths: list[int] = []
        for t in range(40):
            obs, reward, terminated, truncated, infos = plain.step(to_env(played.buffer.action[t]))
            assert torch.equal(obs, played.buffer.obs[""][t + 1])
            assert torch.equal(reward, played.buffer.reward[t])
            assert torch.equal(infos["final_obs"], played.buffer.final_obs[""][t])
            returns += infos["episode"]["r"][terminated | truncated].tolist()
            lengths += infos["episode"]["l"][terminated | truncated].tolist()

        assert mean.n == len(returns) > 0
        assert mean.episode_return == pytest.approx(sum(returns) / len(returns), rel=1e-5)
        assert mean.length == pytest.approx(sum(lengths) / len(lengths))


masked = pytest.mark.parametrize("make_env", [Forbidding, ForbiddingTwo])


@masked
@pytest.mark.parametrize("fast", [True, False])
def test_a_forbidden_action_is_never_sampled(make_env: Any, fast: bool) -> None:
    env, plain = make_env(9), make_env(9)
    agent = agent_in(env, action_mask="info", fast=fast)
    played = Played(env, 60, agent)
    _, infos = plain.reset(seed=10)

    for _ in range(2):
        played.collect()
        buffer = played.buffer
        assert (buffer.reward == 1.0).all()
        assert torch.equal(buffer.action_mask[0], infos["action_mask"])
        for t, action in enumerate(buffer.action):
            *_, infos = plain.step(agent.distribution.to_torch_env(action))
            assert torch.equal(buffer.action_mask[t + 1], infos["action_mask"])

    unmasked = Played(make_env(9), 60, agent_in(env, action_mask="none", fast=fast))
    unmasked.collect()
    assert (unmasked.buffer.reward < 0.0).any()


@pytest.mark.parametrize("make_env", [Forbidding, ForbiddingTwo, ForbiddingInObs])
@pytest.mark.parametrize("fast", [True, False])
def test_a_recurrent_policy_never_samples_a_forbidden_action(make_env: Any, fast: bool) -> None:
    env = make_env(6)
    source = "info" if env.has_action_masks else "auto"
    agent = agent_in(env, partial(Recurrent, size=5), action_mask=source, fast=fast)
    played = Played(env, 20, agent)

    for _ in range(2):
        played.collect()
        played.finish()
        assert (played.buffer.reward == 1.0).all()

    finished = played.buffer.finished()
    log_prob, _ = agent.score_batch(finished.inputs, finished.action)
    torch.testing.assert_close(finished.log_prob, log_prob)
    assert finished.log_prob.min() > -5.0


@masked
@pytest.mark.parametrize("fast", [True, False])
def test_log_probs_and_entropies_with_masks_are_those_of_host_envs(
    make_env: Any, fast: bool
) -> None:
    env = make_env(3)
    agent = agent_in(env, action_mask="info", fast=fast)
    played = Played(env, 4, agent)
    played.collect()
    played.finish()
    finished = played.buffer.finished()
    mask = finished.inputs.action_mask
    assert mask is not None

    host = agent.inputs({"": finished.inputs.obs.numpy()}, mask.numpy())
    log_prob, _ = agent.score_batch(host, finished.action)
    outputs, _ = agent.plain.outputs(host)
    _, entropy = agent.distribution.log_prob_and_entropy(outputs, finished.action)

    torch.testing.assert_close(finished.log_prob, log_prob)
    # By hand: the softmax over the entries that are allowed.
    logits, _ = agent.plain.outputs(host._replace(action_mask=None))
    by_hand, entropy_by_hand, first = torch.zeros(12), torch.zeros(12), 0
    for part, size in enumerate(make_env.sizes):
        own = slice(first, first + size)
        odds = logits[:, own].exp() * mask[:, own]
        chances = odds / odds.sum(dim=1, keepdim=True)
        chosen = finished.action.reshape(12, -1)[:, part : part + 1]
        by_hand += chances.gather(1, chosen).log()[:, 0]
        entropy_by_hand -= torch.special.xlogy(chances, chances).sum(dim=1)
        first += size
    torch.testing.assert_close(log_prob, by_hand)
    torch.testing.assert_close(entropy, entropy_by_hand)


def test_a_mask_in_the_observation_of_a_tensor_env_is_used() -> None:
    played = Played(ForbiddingInObs(9), 60)

    played.collect()

    buffer = played.buffer
    assert (buffer.reward == 1.0).all()
    assert torch.equal(buffer.action_mask, buffer.obs["action_mask"] != 0)


def test_a_rollout_has_each_leaf_of_the_observations() -> None:
    played, plain = Played(Leaves(5), n_steps=12), Leaves(5)
    plain.reset(seed=10)
    reader = played.agent.reader
    assert set(reader.leaves) == {"arm/angles", "image", "parts/0", "parts/1"}

    for _ in range(2):
        buffer = played.collect() and played.buffer
        for t, action in enumerate(buffer.action):
            obs, *_, infos = plain.step(action)
            final = reader.split(infos["final_obs"])
            for name, leaf in reader.split(obs).items():
                assert torch.equal(leaf, buffer.obs[name][t + 1])
                assert torch.equal(final[name], buffer.final_obs[name][t])
                assert leaf.dtype == buffer.obs[name].dtype


@pytest.mark.parametrize("fast", [True, False])
def test_scores_and_targets_of_leaves_are_those_of_host_envs(fast: bool) -> None:
    env = Leaves(4)
    agent = agent_in(env, fast=fast, normalize_obs=True)
    played = Played(env, 6, agent)
    played.collect()
    played.finish(gamma=0.5, lam=0.0)
    agent.learn_moments(played.buffer.observations())
    played.collect()

    played.finish(gamma=0.5, lam=0.0)  # a target is then reward + gamma * V(final observation)

    finished, buffer = played.buffer.finished(), played.buffer
    obs = {name: leaf.numpy() for name, leaf in finished.inputs.obs.items()}  # type: ignore[union-attr]
    log_prob, value = agent.score_batch(agent.inputs(obs), finished.action)
    torch.testing.assert_close(finished.log_prob, log_prob)
    torch.testing.assert_close(finished.value, value)
    final = {name: leaf.flatten(0, 1).numpy() for name, leaf in buffer.final_obs.items()}
    following = agent.value_batch(agent.inputs(final)) * ~buffer.terminated.flatten()
    assert (buffer.truncated & ~buffer.terminated).any()
    torch.testing.assert_close(finished.value_target, buffer.reward.flatten() + 0.5 * following)


several_parts = pytest.mark.parametrize(
    "make_env", [Digits, DigitsInRows, DigitsInBits, DigitsAndForce]
)


@several_parts
def test_scores_of_actions_of_several_parts_are_those_of_host_envs(make_env: Any) -> None:
    env = make_env(5)
    source = "info" if env.has_action_masks else "none"
    agent = agent_in(env, action_mask=source)
    played = Played(env, 7, agent)
    played.collect()
    played.finish()

    finished = played.buffer.finished()
    mask = finished.inputs.action_mask
    masks = None if mask is None else mask.numpy()
    host = agent.inputs({"": finished.inputs.obs.numpy()}, masks)  # type: ignore[union-attr]
    log_prob, value = agent.score_batch(host, finished.action)
    torch.testing.assert_close(finished.log_prob, log_prob)
    torch.testing.assert_close(finished.value, value)
    # What the tensor envs took is what host envs would take.
    to_env, space = agent.distribution.to_env(finished.action.numpy()), env.single_action_space
    for ours, theirs in zip(
        tree_leaves(agent.distribution.to_torch_env(finished.action)),
        tree_leaves(to_env),
        strict=True,
    ):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6)
    first = next(iter(iterate(batch_space(space, len(log_prob)), to_env)))
    assert first in space


@several_parts
def test_ppo_learns_each_part_of_an_action(make_env: Any) -> None:
    env, context = make_env(32), RunContext.alone()
    source = "info" if env.has_action_masks else "none"
    options: dict[str, Any] = {"n_steps": 16, "learning_rate": 1e-2, "action_mask": source}
    agent = agent_in(env, **options)
    trainer = make_trainer(agent, Envs([env], 1, False), agent.config, context)

    metrics = [trainer.train_episode_vectorized() for _ in range(15)]

    returns = [each["rollout/episode_return"] for each in metrics]
    assert returns[0] < 2.5  # random actions repeat less than half of the digits
    assert returns[-1] > 3.4  # of four


def test_the_normaliser_learns_from_each_leaf_of_numbers() -> None:
    env = Leaves(4)
    agent = agent_in(env, normalize_obs=True)
    played = Played(env, 6, agent)
    played.collect()
    played.finish()

    agent.learn_moments(played.buffer.observations())

    moments = agent.model.preprocess.moments_of("arm/angles")
    angles = played.buffer.obs["arm/angles"][:6].reshape(-1, 2)
    assert moments is not None
    torch.testing.assert_close(moments.mean, angles.mean(dim=0))
    torch.testing.assert_close(moments.variance, angles.var(dim=0, correction=0))
    assert agent.model.preprocess.moments_of("image") is None


def test_ppo_learns_to_read_a_leaf_of_a_tensor_env() -> None:
    env, context = Leaves(16), RunContext.alone()
    agent = agent_in(env, n_steps=16, learning_rate=3e-3)
    trainer = make_trainer(agent, Envs([env], 1, False), agent.config, context)

    metrics = [trainer.train_episode_vectorized() for _ in range(12)]

    returns = [each["rollout/episode_return"] for each in metrics]
    assert returns[0] < 1.5  # a third of three steps
    assert returns[-1] > 2.5


class Traced(Programs):
    """Compiles as a GPU does, as one graph, but without generating kernels."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.compiles = True

    def compiled(self, function: Any, name: str, rewrite: Any = None) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="torch < 2.8 compiles nothing",
)
@pytest.mark.parametrize(
    "make_env", [Forbidding, ForbiddingTwo, ForbiddingInObs, Leaves, Digits, DigitsAndForce]
)
def test_a_program_is_one_graph_without_reads_from_the_device(make_env: Any) -> None:
    env = make_env(4, max_episode_steps=5)
    options = {"action_mask": "info" if env.has_action_masks else "auto", "normalize_obs": True}
    torch.compiler.reset()  # it limits how often one function is compiled
    programs = Traced()
    traced = Played(env, 8, agent_in(env, fast=False, **options), programs=programs)
    traced.agent.compile(programs)  # acting, scores and values
    plain = Played(make_env(4, max_episode_steps=5), 8, agent_in(env, fast=False, **options))

    for _ in range(2):
        traced.collect()
        with Recorder() as seen:
            plain.collect()
            plain.finish()
        traced.finish()

    ours, theirs = traced.buffer.finished(), plain.buffer.finished()
    for mine, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(mine, expected)
    # For choices in observations, one_hot reads its highest index, but not on a GPU.
    has_choices = make_env in (Leaves, Digits, DigitsAndForce)
    assert seen.names & READING == ({"_local_scalar_dense"} if has_choices else set())


def test_the_quality_says_whether_every_mask_allows_an_action() -> None:
    for make_env, is_fine in ((Forbidding, True), (ForbiddingTwo, True), (Stuck, False)):
        env = make_env(2)
        played = Played(env, 3, agent_in(env, action_mask="info"))
        played.collect()
        played.finish()
        assert played.buffer.quality().has_choices is is_fine


def test_the_quality_says_whether_all_rewards_were_finite() -> None:
    played = Played(Places(2), n_steps=4)
    played.collect()
    played.finish()
    assert played.buffer.quality().is_finite

    played.buffer.reward[1, 1] = torch.nan
    played.finish()

    assert not played.buffer.quality().is_finite


def test_before_the_first_rollout_there_is_no_position() -> None:
    played = Played(Places(2), n_steps=3)

    assert played.collector.snapshots() == []  # the position also holds the envs
    assert played.collector.state_dict()["position"] is None


def test_tensors_keep_their_addresses() -> None:
    played = Played(Drift(2), n_steps=3)
    orders = DeviceOrders(6, CPU, Programs(CPU))
    found = []
    for _ in range(2):
        played.collect()
        played.finish()
        orders.draw(torch.Generator(), 2)
        buffer, position = played.buffer, played.collector.envs[0].position
        held = (buffer.obs[""], buffer.action, buffer.reward, *position.state, orders.keys)
        found.append([each.data_ptr() for each in held])

    assert found[0] == found[1]
