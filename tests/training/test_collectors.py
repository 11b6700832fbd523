"""Collector: the numbers of tiny envs, found again at their places of the buffer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tiny_envs import BreakingEnv, CountingEnv, ForbiddingEnv, LivesEnv, MixedEnv

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.agents.recurrent import Recurrent
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.training.collector import BadValueError, Collector
from ml_pipeline.training.rollout_buffer import RolloutBuffer

CPU = torch.device("cpu")


class BlindForbiddingEnv(ForbiddingEnv):
    def _next(self) -> tuple[Any, dict[str, Any]]:
        obs, info = super()._next()
        return np.full_like(obs, np.nan), info


class StrayingEnv(CountingEnv):
    """Leaves its observation space at one of its steps."""

    def __init__(self, at: int) -> None:
        super().__init__(length=50)
        self.observation_space = spaces.Discrete(5)
        self.at = at

    def _observe(self) -> Any:
        return 7 if self._step == self.at else self._step % 5


def agent_of(env: Any, network: Any = MLP, **options: Any) -> PPOAgent:
    spaces = env.single_observation_space, env.single_action_space
    return PPOAgent(*spaces, network, PPOConfig(**options), device=CPU, seed=1)


def collected(
    envs: Any, n_steps: int, agent: PPOAgent | None = None, **options: Any
) -> tuple[RolloutBuffer, PPOAgent, Any, Collector]:
    envs = envs if isinstance(envs, list) else [envs]
    agent = agent or agent_of(envs[0])
    collector = Collector(envs, env_seed=1, noise_seed=2, **options)
    buffer = RolloutBuffer(n_steps, collector.n_envs, agent)
    stats = collector.collect(agent, buffer)
    return buffer, agent, stats, collector


def test_a_rollout_holds_what_was_seen_before_each_action() -> None:
    buffer, _, stats, _ = collected(SerialEnv([CountingEnv, partial(CountingEnv, 4)]), 5)

    assert buffer.obs[""][:, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert buffer.obs[""][:, 1, 0].tolist() == [0, 1, 2, 3, 0]
    assert buffer.reward[:, 0].tolist() == [10, 20, 30, 10, 20]
    assert buffer.terminated[:, 0].tolist() == [False, False, True, False, False]
    assert buffer.episode_start[:, 0].tolist() == [True, False, False, True, False]
    assert [tuple(episode) for episode in stats.episodes] == [(60.0, 3, 1), (100.0, 4, 1)]


@pytest.mark.parametrize("network", [MLP, partial(Recurrent, size=4)], ids=["mlp", "lstm"])
def test_a_truncated_episode_bootstraps_from_its_final_observation_not_the_next_reset(
    network: Any,
) -> None:
    env = SerialEnv([partial(CountingEnv, 3, "truncated")] * 2)
    agent = agent_of(env, network)
    buffer, _, _, collector = collected(env, 4, agent)
    state = buffer.state
    if state is None:
        final_value = agent.value_batch(agent.inputs({"": np.full((2, 2), 3.0, np.float32)}))
    else:  # the value after the whole episode 0, 1, 2, 3, from its beginning
        obs = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 2)
        starts = torch.tensor([[True] * 2, *[[False] * 2] * 3])
        inputs = agent.inputs({"": obs.numpy()})._replace(state=state, episode_start=starts)
        final_value = agent.score_batch(inputs, torch.zeros(4, 2, dtype=torch.int64))[1][3]

    buffer.finish(collector.last_inputs(agent), gamma=0.5, lam=0.0)

    expected = 30.0 + 0.5 * final_value.numpy() - buffer.value[2]
    np.testing.assert_allclose(buffer.advantage[2], expected, rtol=1e-5)


def test_a_terminated_episode_bootstraps_from_nothing() -> None:
    buffer, agent, _, collector = collected(SerialEnv([CountingEnv] * 2), 4)

    buffer.finish(collector.last_inputs(agent), gamma=0.5, lam=0.0)

    np.testing.assert_allclose(buffer.advantage[2], 30.0 - buffer.value[2], rtol=1e-6)


FIELDS = ("action", "reward", "truncated", "terminated", "episode_start")


def test_any_same_step_vector_env_gives_the_same_rollout() -> None:
    # Gymnasium's own keep a reference as final_obs, which an env with one buffer overwrites.
    env_fns = [partial(CountingEnv, 3, "truncated", reuse=False)] * 3
    expected = collected(SerialEnv(env_fns), 7)[0]
    mode = AutoresetMode.SAME_STEP

    for env in (
        ParallelEnv(env_fns, start_method="fork", n_workers=2),
        SyncVectorEnv(env_fns, autoreset_mode=mode),
        AsyncVectorEnv(env_fns, autoreset_mode=mode, context="fork"),
    ):
        buffer = collected(env, 7)[0]
        for field in FIELDS:
            assert np.array_equal(getattr(buffer, field), getattr(expected, field)), field
        assert np.array_equal(buffer.obs[""], expected.obs[""])
        assert str(buffer.final_steps) == str(expected.final_steps)
        env.close()


ENCODER = {"_target_": "ml_pipeline.agents.networks.MLP", "hidden_sizes": [8]}


@pytest.mark.parametrize(
    "network", [MLP, partial(Recurrent, size=4, encoder=ENCODER)], ids=["mlp", "lstm"]
)
@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_two_halves_in_turn_give_the_rollout_of_the_whole(network: Any, kind: str) -> None:
    def make(n_envs: int, seed: int) -> Any:
        if kind == "serial":
            return SerialEnv([MixedEnv] * n_envs, seed=seed)
        return ParallelEnv([MixedEnv] * n_envs, seed=seed, n_workers=1, start_method="fork")

    whole = make(4, 1)
    agent = agent_of(whole, network)
    halves = [make(2, 1), make(2, 3)]

    expected, _, one, first = collected(whole, 20, agent)
    buffer, _, two, second = collected(halves, 20, agent)
    for each, collector in ((expected, first), (buffer, second)):
        each.finish(collector.last_inputs(agent), gamma=0.9, lam=0.9)

    for field in FIELDS:
        ours, theirs = getattr(buffer, field), getattr(expected, field)
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=field)
    for field in ("value", "advantage"):
        ours, theirs = getattr(buffer, field), getattr(expected, field)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=field)
    assert sorted(one.episodes) == sorted(two.episodes)
    assert len(one.episodes) > 3
    for env in (whole, *halves):
        env.close()


def test_the_second_rollout_goes_on_where_the_first_ended() -> None:
    env = SerialEnv([partial(CountingEnv, 5)])
    agent = agent_of(env)
    buffer = RolloutBuffer(3, 1, agent)
    collector = Collector([env], env_seed=1, noise_seed=2)

    collector.collect(agent, buffer)
    stats = collector.collect(agent, buffer)

    assert buffer.obs[""][:, 0, 0].tolist() == [3, 4, 0]
    assert buffer.episode_start[:, 0].tolist() == [False, False, True]
    assert [tuple(episode) for episode in stats.episodes] == [(150.0, 5, 1)]


def test_a_memory_is_carried_over_rollouts_and_lost_at_the_end_of_an_episode() -> None:
    env = SerialEnv([partial(CountingEnv, 4)])
    agent = agent_of(env, partial(Recurrent, size=4))
    collector = Collector([env], env_seed=1, noise_seed=2)
    parts, whole = RolloutBuffer(3, 1, agent), RolloutBuffer(6, 1, agent)
    values = []
    for _ in range(2):
        collector.collect(agent, parts)
        parts.finish(collector.last_inputs(agent), gamma=0.9, lam=0.9)
        values.append(parts.value)

    fresh = Collector([SerialEnv([partial(CountingEnv, 4)])], env_seed=1, noise_seed=2)
    fresh.collect(agent, whole)
    whole.finish(fresh.last_inputs(agent), gamma=0.9, lam=0.9)

    np.testing.assert_allclose(np.concatenate(values), whole.value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(whole.value[0], whole.value[4], rtol=1e-5)  # both begin an episode


@pytest.mark.parametrize("where", ["info", "obs"])
def test_a_mask_is_heeded_at_every_step_also_after_an_end(where: str) -> None:
    env = SerialEnv([partial(ForbiddingEnv, where)] * 3, seed=1)
    agent = agent_of(env, action_mask="info" if where == "info" else "auto")

    buffer, _, stats, _ = collected(env, 40, agent)  # the env raises at a forbidden action

    assert buffer.action_mask is not None
    taken = np.take_along_axis(buffer.action_mask, buffer.action[..., None], axis=-1)
    assert taken.all()
    assert not buffer.action_mask.all()
    assert len(stats.episodes) > 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "obs",
            r"env 1 gave an observation that is not finite at its step 4 .*number \[1\] is nan",
        ),
        ("reward", r"env 1 gave the reward inf at its step 4 \(step 4 of this rollout\)"),
        ("final", r"env 1 gave an observation that is not finite at its step 4"),
    ],
)
def test_a_number_that_is_none_is_named_with_env_and_step(what: str, words: str) -> None:
    env_fns = [partial(BreakingEnv, None), partial(BreakingEnv, what)]

    with pytest.raises(BadValueError, match=words):
        collected(SerialEnv(env_fns), 6)


def test_huge_numbers_are_numbers() -> None:
    buffer, _, _, _ = collected(SerialEnv([partial(BreakingEnv, "huge")]), 6)

    assert buffer.reward.max() == np.float32(3e38)


def test_the_step_of_a_broken_number_counts_over_rollouts() -> None:
    env = SerialEnv([partial(BreakingEnv, "obs")])
    agent = agent_of(env)
    collector, buffer = Collector([env], env_seed=1, noise_seed=2), RolloutBuffer(3, 1, agent)
    collector.collect(agent, buffer)
    collector.commit(3)

    with pytest.raises(BadValueError, match=r"its step 4 \(step 1 of this rollout\)"):
        collector.collect(agent, buffer)


def test_where_it_is_allowed_the_envs_are_still_given_numbers() -> None:
    env = SerialEnv([partial(BreakingEnv, "obs")])

    agent = agent_of(env, on_nonfinite="skip")
    buffer, _, _, _ = collected(env, 8, agent, allow_nonfinite=True)

    assert np.isnan(buffer.obs[""]).any()
    assert np.isfinite(buffer.action).all()


@pytest.mark.parametrize("network", [MLP, partial(MLP, activation="elu")], ids=["numpy", "torch"])
def test_what_is_no_number_leads_to_nothing_that_is_forbidden(network: Any) -> None:
    env = SerialEnv([BlindForbiddingEnv] * 4)  # raises at an action that is
    agent = agent_of(env, network, on_nonfinite="skip", action_mask="info")

    buffer, _, _, _ = collected(env, 30, agent, allow_nonfinite=True)

    assert np.isnan(buffer.obs[""]).all()
    assert len(np.unique(buffer.action)) == 4


@pytest.mark.parametrize("halves", [False, True], ids=["sync", "double"])
def test_an_observation_outside_of_its_space_is_named_with_env_and_step(halves: bool) -> None:
    made = [partial(StrayingEnv, at) for at in (99, 99, 99, 3)]
    envs = [SerialEnv(made[:2]), SerialEnv(made[2:])] if halves else [SerialEnv(made)]

    words = (
        r"an observation holds 7, which is outside of Discrete\(5\); env 3 gave it at its step 3"
    )
    with pytest.raises(BadValueError, match=words):
        collected(envs, 8)


def test_an_env_that_counts_its_own_episodes_is_believed() -> None:
    env = SerialEnv([partial(LivesEnv.wrapped, lives=3)])

    _, _, stats, _ = collected(env, 12, episodes_from_infos=True)

    # 12 steps are 6 lives of 2 steps each, which are two games of 3 lives.
    assert [tuple(episode) for episode in stats.episodes] == [(6.0, 6, 1), (6.0, 6, 1)]


def test_an_env_that_resets_one_step_late_is_refused() -> None:
    env = SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.NEXT_STEP)

    with pytest.raises(ValueError, match=r"needs an env with autoreset_mode SAME_STEP"):
        Collector([env], env_seed=1, noise_seed=2)


def test_nothing_of_double_precision_reaches_the_learner() -> None:
    buffer, agent, _, collector = collected(SerialEnv([CountingEnv]), 2)
    buffer.finish(collector.last_inputs(agent), gamma=0.9, lam=0.9)

    (batch,) = buffer.minibatches(1, torch.Generator())

    assert {field.dtype for field in batch[1:]} == {torch.int64, torch.float32}
    assert batch.inputs.obs.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["memory", "mask"])
def test_a_resize_carries_memory_and_masks_along(kind: str) -> None:
    if kind == "memory":
        env = ParallelEnv([CountingEnv] * 6, seed=1, n_workers=2, start_method="fork")
        agent = agent_of(env, partial(Recurrent, size=4))
    else:
        env = ParallelEnv([ForbiddingEnv] * 6, seed=1, n_workers=2, start_method="fork")
        agent = agent_of(env, action_mask="info")
    collector = Collector([env], env_seed=1, noise_seed=2)

    for n_envs in (6, 2, 8, 3):
        if n_envs != 6:
            collector.resize(n_envs, agent)
        buffer = RolloutBuffer(5, n_envs, agent)
        collector.collect(agent, buffer)  # forbidden actions raise
        buffer.finish(collector.last_inputs(agent), gamma=0.9, lam=0.9)
        assert np.isfinite(buffer.advantage).all()
    env.close()


def test_after_an_interrupt_both_halves_go_on_where_their_envs_are() -> None:
    envs = [SerialEnv([partial(CountingEnv, 50)]) for _ in range(2)]
    agent = agent_of(envs[0])
    collector, buffer = Collector(envs, env_seed=1, noise_seed=2), RolloutBuffer(4, 2, agent)
    collector.collect(agent, buffer)
    real, calls = agent.sample_batch, iter(range(3))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    agent.sample_batch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        collector.collect(agent, buffer)
    agent.sample_batch = real  # type: ignore[method-assign]
    collector.collect(agent, buffer)

    assert buffer.obs[""][:, 0, 0].tolist() == [5, 6, 7, 8]  # the fifth step was taken
    assert buffer.reward[:, 0].tolist() == [60, 70, 80, 90]
    assert buffer.obs[""][:, 1, 0].tolist() == [4, 5, 6, 7]


def test_a_rollout_that_was_not_learned_from_does_not_count_as_whole() -> None:
    env = SerialEnv([CountingEnv])
    agent = agent_of(env)
    collector, buffer = Collector([env], env_seed=1, noise_seed=2), RolloutBuffer(4, 1, agent)
    before = collector.state_dict()["generator"]

    collector.collect(agent, buffer)
    state = collector.state_dict()
    collector.commit(4)

    assert state["position"] is None
    assert torch.equal(state["generator"], before)
    assert collector.state_dict()["position"] is not None
