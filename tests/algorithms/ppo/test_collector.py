"""Collector and RolloutBuffer: what only host envs have.

tests/contracts/test_rollouts.py tests what they share with those of tensor envs.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from small_agents import Played, agent_in
from tiny_envs import BreakingEnv, CountingEnv, ForbiddingEnv, LivesEnv, MixedEnv
from vec_envs import forked

from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.rollout import RolloutBuffer
from ml_pipeline.envs.episode_stats import Episode
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.training.checks import BadValueError

LSTM = partial(Recurrent, size=4)
FIELDS = ("action", "reward", "truncated", "terminated")


class NanForbiddingEnv(ForbiddingEnv):
    """All observations are NaN."""

    def _next(self) -> tuple[Any, dict[str, Any]]:
        obs, info = super()._next()
        return np.full_like(obs, np.nan), info


class StrayingEnv(CountingEnv):
    """Leaves its observation space in one step."""

    def __init__(self, at: int) -> None:
        super().__init__(length=50)
        self.observation_space = spaces.Discrete(5)
        self.at = at

    def _observe(self) -> Any:
        return 7 if self._step == self.at else self._step % 5


def collected(envs: Any, n_steps: int, agent: Any = None, **options: Any) -> Any:
    """The buffer after one rollout."""
    played = Played(envs, n_steps, agent, **options)
    played.collect()
    return played.buffer


def test_a_recurrent_policy_values_the_final_observation_with_its_state_before_it() -> None:
    env = SerialEnv([partial(CountingEnv, 3, "truncated")] * 2)
    played = Played(env, 4, agent_in(env, LSTM))
    played.collect()
    # The value after the whole episode 0, 1, 2, 3.
    obs = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 2)
    starts = torch.tensor([[True] * 2, *[[False] * 2] * 3])
    memory = played.buffer.memory
    inputs = played.agent.inputs({"": obs.numpy()}, None, memory, starts)
    final_value = played.agent.score_batch(inputs, torch.zeros(4, 2, dtype=torch.int64))[1][3]

    played.finish(gamma=0.5, lam=0.0)

    expected = 30.0 + 0.5 * final_value.numpy() - played.buffer.value[2]
    np.testing.assert_allclose(played.buffer.advantage[2], expected, rtol=1e-5)


def test_any_same_step_vector_env_gives_the_same_rollout() -> None:
    # Gymnasium's vector envs keep a reference as final_obs, so each env needs new arrays.
    env_fns = [partial(CountingEnv, 3, "truncated", reuse=False)] * 3
    expected = collected(SerialEnv(env_fns), 7)
    mode = AutoresetMode.SAME_STEP

    for env in (
        forked(env_fns),
        SyncVectorEnv(env_fns, autoreset_mode=mode),
        AsyncVectorEnv(env_fns, autoreset_mode=mode, context="fork"),
    ):
        buffer = collected(env, 7)
        for field in FIELDS:
            assert np.array_equal(getattr(buffer, field), getattr(expected, field)), field
        assert np.array_equal(buffer.obs[""], expected.obs[""])
        assert str(buffer.final_steps) == str(expected.final_steps)
        env.close()


ENCODER = {"_target_": "ml_pipeline.policy.networks.MLP", "hidden_sizes": [8]}


@pytest.mark.parametrize(
    "network", [MLP, partial(Recurrent, size=4, encoder=ENCODER)], ids=["mlp", "lstm"]
)
@pytest.mark.parametrize("make", [SerialEnv, forked], ids=["serial", "parallel"])
def test_two_alternating_halves_give_the_same_rollout_as_one_env(network: Any, make: Any) -> None:
    envs = [make([MixedEnv] * n_envs, seed=seed) for n_envs, seed in ((4, 1), (2, 1), (2, 3))]
    agent = agent_in(envs[0], network)
    whole, halves = Played(envs[0], 20, agent), Played(envs[1:], 20, agent)

    episodes = [each.collect().episodes for each in (whole, halves)]
    for each in (whole, halves):
        each.finish()

    for field in (*FIELDS, "value", "advantage"):
        ours, theirs = getattr(halves.buffer, field), getattr(whole.buffer, field)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=field)
    assert sorted(episodes[0]) == sorted(episodes[1])
    assert len(episodes[0]) > 3
    for env in envs:
        env.close()


def test_recurrent_state_continues_in_the_next_rollout_and_ends_with_the_episode() -> None:
    env_fns = [partial(CountingEnv, 4)]
    agent = agent_in(SerialEnv(env_fns), LSTM)
    parts, whole = Played(SerialEnv(env_fns), 3, agent), Played(SerialEnv(env_fns), 6, agent)
    values = []
    for _ in range(2):
        parts.collect()
        parts.finish()
        values.append(parts.buffer.value)

    whole.collect()
    whole.finish()

    np.testing.assert_allclose(np.concatenate(values), whole.buffer.value, rtol=1e-4, atol=1e-6)
    first, fifth = whole.buffer.value[0], whole.buffer.value[4]  # both start an episode
    np.testing.assert_allclose(first, fifth, rtol=1e-5)


@pytest.mark.parametrize("where", ["info", "obs"])
def test_masks_are_respected_in_every_step_also_after_an_episode_ends(where: str) -> None:
    env = SerialEnv([partial(ForbiddingEnv, where)] * 3, seed=1)  # raises at a forbidden action
    played = Played(env, 40, agent_in(env, action_mask="info" if where == "info" else "auto"))

    stats = played.collect()

    assert played.buffer.action_mask is not None
    mask = played.buffer.action_mask[:40]
    assert np.take_along_axis(mask, played.buffer.action[..., None], axis=-1).all()
    assert not mask.all()
    assert len(stats.episodes) > 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("obs", r"env 1 returned an observation that is not finite at its step 4 .*\[1\] is nan"),
        ("reward", r"env 1 returned the reward inf at its step 4 \(step 1 of this rollout\)"),
        ("final", r"env 1 returned an observation that is not finite at its step 4"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_with_env_and_step(what: str, words: str) -> None:
    played = Played(SerialEnv([partial(BreakingEnv, None), partial(BreakingEnv, what)]), 3)
    played.collect()

    with pytest.raises(BadValueError, match=words):
        played.collect()


def test_huge_rewards_are_accepted() -> None:
    buffer = collected(SerialEnv([partial(BreakingEnv, "huge")]), 6)

    assert buffer.reward.max() == np.float32(3e38)


@pytest.mark.parametrize("network", [MLP, partial(MLP, activation="elu")], ids=["numpy", "torch"])
def test_with_nan_observations_all_allowed_actions_are_drawn_and_no_others(network: Any) -> None:
    env = SerialEnv([NanForbiddingEnv] * 4)  # raises at a forbidden action
    agent = agent_in(env, network, on_nonfinite="skip", action_mask="info")

    buffer = collected(env, 30, agent, allow_nonfinite=True)

    assert np.isnan(buffer.obs[""]).all()
    assert len(np.unique(buffer.action)) == 4


@pytest.mark.parametrize("halves", [False, True], ids=["sync", "double"])
def test_an_observation_outside_its_space_is_refused_with_env_and_step(halves: bool) -> None:
    made = [partial(StrayingEnv, at) for at in (99, 99, 99, 3)]
    envs = [SerialEnv(made[:2]), SerialEnv(made[2:])] if halves else [SerialEnv(made)]

    with pytest.raises(BadValueError, match=r"env 3, at its step 3 .*: .*7.*Discrete\(5\)"):
        collected(envs, 8)


def test_episodes_are_counted_from_the_infos_if_the_env_reports_them() -> None:
    env = SerialEnv([partial(LivesEnv.wrapped, lives=3)])

    stats = Played(env, 12, infos_have_episodes=True).collect()

    # 12 steps are 6 lives of 2 steps each, which are two games of 3 lives.
    assert stats.episodes == [Episode(6.0, 6, 1, {"life": 3.0})] * 2


def test_an_env_with_another_autoreset_mode_is_refused() -> None:
    env = SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.NEXT_STEP)

    with pytest.raises(ValueError, match=r"NEXT_STEP: the collector needs SAME_STEP"):
        Collector([env], env_seed=1, noise_seed=2)


@pytest.mark.parametrize("kind", ["recurrent", "masked"])
def test_a_resize_keeps_recurrent_state_and_masks(kind: str) -> None:
    make_env: Any = CountingEnv if kind == "recurrent" else ForbiddingEnv
    env = forked([make_env] * 6, seed=1)
    options = {"network": LSTM} if kind == "recurrent" else {"action_mask": "info"}
    played = Played(env, 5, agent_in(env, **options))

    for n_envs in (6, 2, 8, 3):
        if n_envs != 6:
            played.collector.resize(n_envs, played.agent)
        played.buffer = RolloutBuffer(5, n_envs, played.agent)
        played.collect()  # a forbidden action raises
        played.finish()
        assert np.isfinite(played.buffer.advantage).all()
    env.close()


def test_after_an_interrupt_both_halves_continue_where_their_envs_are() -> None:
    played = Played([SerialEnv([partial(CountingEnv, 50)]) for _ in range(2)], 4)
    played.collect()
    agent, buffer = played.agent, played.buffer
    real, calls = agent.sample_batch, iter(range(3))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    agent.sample_batch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        played.collect()
    agent.sample_batch = real  # type: ignore[method-assign]
    played.collect()

    assert buffer.obs[""][:4, 0, 0].tolist() == [5, 6, 7, 8]  # this half made its fifth step
    assert buffer.reward[:, 0].tolist() == [60, 70, 80, 90]
    assert buffer.obs[""][:4, 1, 0].tolist() == [4, 5, 6, 7]


def test_a_recurrent_policy_learns_from_whole_sequences() -> None:
    env = SerialEnv([partial(CountingEnv, length) for length in (3, 4, 5, 6)])
    played = Played(env, 5, agent_in(env, LSTM))
    for _ in range(2):  # the second rollout begins with a recurrent state
        played.collect()
    played.finish()
    order = torch.randperm(played.buffer.n_items, generator=torch.Generator().manual_seed(1))

    taken = played.buffer.finished().take(order)

    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert np.array_equal(taken.inputs.obs, played.buffer.obs[""][:5, order])
    assert np.array_equal(taken.action, played.buffer.action[:, order])
    assert torch.equal(taken.inputs.memory, played.buffer.memory[order])


def test_scoring_in_parts_equals_scoring_the_whole_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(SerialEnv([CountingEnv, partial(CountingEnv, 4)]), 5)
    played.collect()
    values = []
    for numbers in (2**24, 5):
        monkeypatch.setattr("ml_pipeline.algorithms.ppo.rollout._SCORED_NUMBERS", numbers)
        played.finish()
        values.append(played.buffer.value)

    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_a_rollout_must_be_finished_before_an_epoch() -> None:
    buffer = Played(SerialEnv([CountingEnv]), 4).buffer

    for call in (buffer.finished, buffer.observations):
        with pytest.raises(RuntimeError, match="call finish first"):
            call()


class ChoosyEnv(CountingEnv):
    """Masks two choices, one array each, as Gymnasium's ``sample`` takes them; is truncated."""

    def __init__(self) -> None:
        super().__init__(3, "truncated")
        self.action_space = spaces.MultiDiscrete([2, 3])
        self._masks = np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8)

    def reset(self, **given: Any) -> Any:
        obs, info = super().reset(**given)
        return obs, {**info, "action_mask": self._masks}

    def step(self, action: Any) -> Any:
        *result, info = super().step(action[0])
        return *result, {**info, "action_mask": self._masks}


def test_masks_of_several_choices_may_come_with_a_truncated_episode() -> None:
    env = SerialEnv([ChoosyEnv] * 2)
    played = Played(env, 7, agent_in(env, action_mask="info"))

    played.collect()

    assert played.buffer.truncated.any()
    assert set(played.buffer.action[..., 0].ravel().tolist()) == {1}
    assert set(played.buffer.action[..., 1].ravel().tolist()) == {0, 2}


def test_episodes_are_counted_whole_after_an_interrupt_of_two_halves() -> None:
    played = Played([SerialEnv([partial(CountingEnv, 5)]) for _ in range(2)], 4)
    agent, real, calls = played.agent, played.agent.sample_batch, iter(range(99))

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(*given, **more)

    agent.sample_batch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        played.collect()
    episodes = [each for _ in range(4) for each in played.collect().episodes]

    assert {each.length for each in episodes} == {5}


class InterruptingEnv(CountingEnv):
    """Its sixth step interrupts the process that trains."""

    def __init__(self, trainer: int) -> None:
        super().__init__(5)
        self._trainer = trainer
        self._n_steps = 0

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        if self._n_steps == 6:
            os.kill(self._trainer, signal.SIGINT)
            time.sleep(0.3)
        return super().step(action)


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("make", [SerialEnv, forked], ids=["serial", "parallel"])
def test_an_interrupt_while_envs_step_starts_new_episodes(make: Any, n_parts: int) -> None:
    envs = [make([partial(CountingEnv, 5)] * 2) for _ in range(n_parts - 1)]
    envs.append(make([partial(InterruptingEnv, os.getpid()), partial(CountingEnv, 5)]))
    played = Played(envs, 4)
    played.collect()
    with pytest.raises(KeyboardInterrupt):
        played.collect()

    episodes = [each for _ in range(5) for each in played.collect().episodes]

    assert {each.length for each in episodes} == {5}
    for each in envs:
        each.close()


def test_if_one_half_cannot_be_restored_both_start_new_episodes() -> None:
    played, other = (
        Played([SerialEnv([partial(CountingEnv, 9)]) for _ in range(2)], 4) for _ in range(2)
    )
    played.collect()
    good, _ = played.collector.snapshots()

    with pytest.raises(Exception, match="pickle data was truncated"):
        other.resume(played.collector.state_dict(), [good, good[:-9]])
    other.collect()

    assert other.buffer.obs[""][0, :, 0].tolist() == [0, 0]
