"""Collector and buffer of host envs and of tensor envs: the same rollouts and the same targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from small_agents import Played, agent_in, seen
from tiny_envs import CountingEnv
from tiny_torch_envs import Places
from torch import Tensor

from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.training.contracts import RunContext


class PlaceEnv(CountingEnv):
    """``Places`` as a single env, which always returns the same buffer."""

    def __init__(self, number: int, limit: int | None) -> None:
        super().__init__(length=4 - number % 2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._buffer = np.zeros(1, dtype=np.float32)
        self.number = number
        self.limit = limit

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, _, info = super().step(action)
        return obs, float(obs[0]), terminated, self._step == self.limit, info

    def _observe(self) -> Any:
        self._buffer[:] = 10.0 * self._step + self.number
        return self._buffer


class Rollouts(Played):
    """Rollouts of ``n_envs`` host envs or tensor envs; ``limit`` truncates their episodes."""

    def __init__(
        self,
        kind: str,
        n_envs: int = 2,
        n_steps: int = 5,
        *,
        limit: int | None = None,
        noise_seed: int = 2,
        **options: Any,
    ) -> None:
        env: Any
        if kind == "tensor":
            env = Places(n_envs, max_episode_steps=limit)
        else:
            env = SerialEnv([partial(PlaceEnv, i, limit) for i in range(n_envs)])
        self.n_envs = n_envs
        super().__init__(env, n_steps, agent_in(env, **options), noise_seed=noise_seed)

    def values(self, obs: Any) -> NDArray[Any]:
        """The agent's values of observations [T, n_envs]."""
        flat = torch.as_tensor(obs, dtype=torch.float32).reshape(-1, 1)
        value = self.agent.value_batch(seen(flat))
        return value.numpy().reshape(np.shape(obs))

    def field(self, name: str) -> NDArray[Any]:
        """A field of the collected rollout, [T, n_envs]."""
        if name == "obs":
            obs = self.buffer.obs
            return np.asarray(obs[""] if isinstance(obs, dict) else obs)[: self.n_steps, :, 0]
        return np.asarray(getattr(self.buffer, name)).copy()

    def finished(self, name: str) -> NDArray[Any]:
        """A field of the finished rollout, [T, n_envs]."""
        field: Tensor = getattr(self.buffer.finished(), name)
        return field.numpy().reshape(self.n_steps, self.n_envs)


kinds = pytest.mark.parametrize("kind", ["host", "tensor"])


@kinds
def test_a_rollout_stores_each_number_at_its_step_and_env(kind: str) -> None:
    played = Rollouts(kind)

    played.collect()

    # Env 0 ends with its fourth step, env 1 with its third.
    assert played.field("obs").tolist() == [[0, 1], [10, 11], [20, 21], [30, 1], [0, 11]]
    assert played.field("reward").tolist() == [[10, 11], [20, 21], [30, 31], [40, 11], [10, 21]]
    assert np.argwhere(played.field("terminated")).tolist() == [[2, 1], [3, 0]]
    assert not played.field("truncated").any()
    assert set(played.field("action").flatten().tolist()) <= {0, 1, 2}


@kinds
def test_the_next_rollout_continues_where_the_last_one_ended(kind: str) -> None:
    played = Rollouts(kind, n_steps=2)
    found = []
    for _ in range(3):
        played.collect()
        found += played.field("obs").tolist()

    assert found == [[0, 1], [10, 11], [20, 21], [30, 1], [0, 11], [10, 21]]
    assert played.collector.state_dict()["n_steps"] == 6


@kinds
def test_stats_count_each_episode_that_ended(kind: str) -> None:
    played = Rollouts(kind, n_steps=4)

    episodes = played.collect().episodes

    # Env 0: 10 + 20 + 30 + 40 in four steps; env 1: 11 + 21 + 31 in three.
    assert sum(each.n for each in episodes) == 2
    assert sum(each.n * each.episode_return for each in episodes) == 100.0 + 63.0
    assert sum(each.n * each.length for each in episodes) == 7
    assert Rollouts(kind, n_steps=2).collect().episodes == []


@kinds
@pytest.mark.parametrize("fast", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("limit", "ends"),
    [
        (None, [[2, 1], [3, 0], [3, 2], [5, 1]]),
        (3, [[2, 0], [2, 1], [2, 2], [5, 0], [5, 1], [5, 2]]),  # env 1 also terminates
    ],
    ids=["terminated", "truncated"],
)
def test_targets_bootstrap_after_truncation_and_not_after_termination(
    limit: int | None, ends: list[list[int]], fast: bool, kind: str
) -> None:
    played = Rollouts(kind, 3, 6, limit=limit, fast=fast)
    played.collect()

    played.finish(gamma=0.5, lam=0.0)  # a target is then reward + gamma * V(successor)

    # The reward of a step equals the observation that follows, before the autoreset.
    reward, done = played.field("reward"), played.field("terminated") | played.field("truncated")
    expected = reward + 0.5 * played.values(reward) * ~played.field("terminated")
    np.testing.assert_allclose(played.finished("value_target"), expected, rtol=1e-5, atol=1e-5)
    assert np.argwhere(done).tolist() == ends
    assert played.field("truncated").any() == (limit is not None)


@kinds
def test_the_finished_rollout_is_flat_and_scored_by_the_agent(kind: str) -> None:
    played = Rollouts(kind, 3, 4)
    played.collect()
    played.finish()

    finished, buffer = played.buffer.finished(), played.buffer

    log_prob, value = played.agent.score_batch(finished.inputs, finished.action)
    assert torch.equal(finished.inputs.obs, buffer.observations().reshape(12, 1))
    assert np.array_equal(played.finished("action"), played.field("action"))
    assert torch.equal(finished.log_prob, log_prob)
    assert torch.equal(finished.value, value)
    assert np.array_equal(played.finished("advantage"), played.field("advantage"))
    torch.testing.assert_close(finished.value_target, finished.advantage + finished.value)
    assert {field.dtype for field in finished[1:]} == {torch.int64, torch.float32}
    assert finished.inputs.obs.dtype == torch.float32
    shapes = {name: each.shape for name, each in buffer.arrays().items()}
    assert shapes == {"rollout/actions": (4, 3), "rollout/advantages": (4, 3)}


@kinds
def test_quality_is_the_explained_variance(kind: str) -> None:
    played = Rollouts(kind, n_steps=4)
    played.collect()
    played.finish()

    target, value = played.finished("value_target"), played.finished("value")
    expected = 1.0 - (target - value).var() / target.var()
    assert played.buffer.quality() == pytest.approx((expected, True, True), rel=1e-4)


@kinds
def test_scaled_rewards_change_the_targets_and_not_the_kept_rewards(kind: str) -> None:
    played = Rollouts(kind, n_steps=4, scale_reward=True)
    played.collect()
    before = played.field("reward")

    played.finish(gamma=0.0, lam=0.0)  # a target is then the scaled reward

    assert np.array_equal(played.field("reward"), before)
    ratio = played.finished("value_target") / before
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-4)
    assert 0.0 < ratio[0, 0] < 1.0


@kinds
def test_each_epoch_has_every_transition_once_and_the_seed_determines_its_order(kind: str) -> None:
    orders = []
    for seed in (1, 1, 2):
        played = Rollouts(kind, 3, n_minibatches=2, n_epochs=2)
        taken: list[list[int]] = []
        real = played.agent.epoch

        def epoch(rollout: Any, order: Tensor, rates: Any, real: Any = real) -> Tensor:
            taken.append(order.flatten().tolist())  # noqa: B023
            result: Tensor = real(rollout, order, rates)
            return result

        played.agent.epoch = epoch  # type: ignore[method-assign, assignment]
        context = RunContext.alone(seed=seed)
        PPOTrainer(played.agent, played.collector, context).train_episode_vectorized()
        orders.append(taken)

    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    assert all(sorted(order) == list(range(3 * 128)) for pair in orders for order in pair)


@kinds
def test_the_noise_seed_determines_the_actions_and_each_rollout_has_new_ones(kind: str) -> None:
    # Twelve steps are complete episodes, so that both rollouts start the same way.
    ours, same, other = (Rollouts(kind, 8, 12, noise_seed=seed) for seed in (2, 2, 3))
    actions = []
    for _ in range(2):
        for each in (ours, same, other):
            each.collect()
        assert np.array_equal(ours.field("action"), same.field("action"))
        assert not np.array_equal(ours.field("action"), other.field("action"))
        actions.append(ours.field("action"))

    assert not np.array_equal(*actions)


@kinds
def test_an_uncommitted_rollout_does_not_change_the_state(kind: str) -> None:
    played = Rollouts(kind, n_steps=3)
    played.collect()
    before = played.collector.state_dict()

    played.collector.collect(played.agent, played.buffer)

    after = played.collector.state_dict()
    assert before["position"] is not None
    assert not played.collector.is_between_rollouts
    assert torch.equal(before["generator"], after["generator"])
    assert (before["n_steps"], after["n_steps"]) == (3, 3)
    assert after["position"] is None  # the envs are within a rollout that does not count


@kinds
@pytest.mark.parametrize("n_before", [0, 3], ids=["new", "used"])
def test_a_resumed_collector_continues_within_the_episodes(kind: str, n_before: int) -> None:
    ours, other, third = (Rollouts(kind, noise_seed=seed) for seed in (2, 9, 9))
    for _ in range(n_before):
        other.collect()
    ours.collect()

    other.resume(ours.collector.state_dict(), ours.collector.snapshots())
    third.resume(other.collector.state_dict(), other.collector.snapshots())  # has not played yet
    episodes, *others = [each.collect().episodes for each in (ours, other, third)]

    assert others == [episodes] * 2 != [[], []]
    for each in (other, third):
        assert each.collector.state_dict()["n_steps"] == 10
        for name in ("obs", "action", "reward", "terminated", "truncated"):
            assert np.array_equal(ours.field(name), each.field(name)), name


@kinds
def test_episodes_that_were_not_saved_cannot_be_resumed(kind: str) -> None:
    played = Rollouts(kind)

    with pytest.raises(ValueError, match="holds no env positions"):
        played.collector.resume_at(None, [], played.agent)
