"""SyncCollector: the numbers of a tiny env, found again at their places of the buffer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tiny_envs import CountingEnv

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config import PPOConfig
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.training.collectors import SyncCollector
from ml_pipeline.training.rollout_buffer import RolloutBuffer

CPU = torch.device("cpu")


def agent_of(env: Any) -> PPOAgent:
    spaces = env.single_observation_space, env.single_action_space
    return PPOAgent(*spaces, MLP, PPOConfig(), device=CPU, seed=1)


def collected(env: Any, n_steps: int) -> tuple[RolloutBuffer, PPOAgent, Any]:
    agent = agent_of(env)
    buffer = RolloutBuffer(n_steps, env.num_envs, obs_shape=(2,), device=CPU)
    stats = SyncCollector(env, env_seed=1, noise_seed=2).collect(agent, buffer)
    return buffer, agent, stats


def test_a_rollout_holds_what_was_seen_before_each_action() -> None:
    buffer, _, stats = collected(SerialEnv([CountingEnv, partial(CountingEnv, 4)]), 5)

    assert buffer.obs[:, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert buffer.obs[:, 1, 0].tolist() == [0, 1, 2, 3, 0]
    assert buffer.reward[:, 0].tolist() == [10, 20, 30, 10, 20]
    assert buffer.terminated[:, 0].tolist() == [False, False, True, False, False]
    assert [tuple(episode) for episode in stats.episodes] == [(60.0, 3), (100.0, 4)]


def test_a_truncated_episode_bootstraps_from_its_final_observation_not_the_next_reset() -> None:
    buffer, agent, _ = collected(SerialEnv([partial(CountingEnv, 3, "truncated")] * 2), 4)
    final_value = agent.value_batch(torch.full((2, 2), 3.0))

    torch.testing.assert_close(buffer.final_value[2], final_value)
    buffer.finish(torch.zeros(2), gamma=0.5, lam=0.0)

    expected = 30.0 + 0.5 * final_value - buffer.value[2]
    torch.testing.assert_close(buffer.advantage[2], expected)


def test_a_terminated_episode_bootstraps_from_nothing() -> None:
    buffer, _, _ = collected(SerialEnv([CountingEnv] * 2), 4)

    buffer.finish(torch.zeros(2), gamma=0.5, lam=0.0)

    torch.testing.assert_close(buffer.advantage[2], 30.0 - buffer.value[2])


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
        for field in ("obs", "action", "log_prob", "reward", "truncated", "final_value"):
            assert torch.equal(getattr(buffer, field), getattr(expected, field)), field
        env.close()


def test_the_second_rollout_goes_on_where_the_first_ended() -> None:
    env = SerialEnv([partial(CountingEnv, 5)])
    agent = agent_of(env)
    buffer = RolloutBuffer(3, 1, obs_shape=(2,), device=CPU)
    collector = SyncCollector(env, env_seed=1, noise_seed=2)

    collector.collect(agent, buffer)
    stats = collector.collect(agent, buffer)

    assert buffer.obs[:, 0, 0].tolist() == [3, 4, 0]
    assert [tuple(episode) for episode in stats.episodes] == [(150.0, 5)]


def test_an_env_that_resets_one_step_late_is_refused() -> None:
    env = SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.NEXT_STEP)

    with pytest.raises(ValueError, match=r"needs an env with autoreset_mode SAME_STEP"):
        SyncCollector(env, env_seed=1, noise_seed=2)


def test_nothing_of_double_precision_reaches_the_buffer() -> None:
    buffer, _, _ = collected(SerialEnv([CountingEnv]), 2)

    tensors = [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10
    assert not [tensor for tensor in tensors if tensor.dtype == torch.float64]
