"""RolloutBuffer: successors of each kind, orders of transitions or sequences, scores in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_agents import agent_for, seen

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.agents.recurrent import Recurrent
from ml_pipeline.protocols import PolicyInput
from ml_pipeline.training.rollout_buffer import FinalStep, RolloutBuffer

OBS = spaces.Box(-1e6, 1e6, (1,), np.float32)


def agent_of(network: Any = MLP) -> PPOAgent:
    return agent_for(OBS, spaces.Discrete(100), network)


def written(n_steps: int, n_envs: int, agent: PPOAgent | None = None) -> RolloutBuffer:
    """Observation, action and reward = 10 * step + env; no episode ends."""
    buffer = RolloutBuffer(n_steps, n_envs, agent or agent_of())
    no, all_envs = np.zeros(n_envs, dtype=bool), slice(0, n_envs)
    for t in range(n_steps):
        place = 10.0 * t + np.arange(n_envs)
        buffer.write_seen(t, all_envs, {"": place[:, None]}, None, no)
        buffer.action[t] = place
        buffer.write_outcome(t, all_envs, place, no, no)
    return buffer


def last(values: list[float]) -> PolicyInput:
    return seen(torch.tensor(values).unsqueeze(1))


def test_a_step_that_terminates_and_is_truncated_has_no_successor() -> None:
    buffer = written(1, 2)
    buffer.reward[:] = buffer.obs[""][:] = 0.0
    buffer.terminated[0], buffer.truncated[0] = [False, True], [True, True]
    final = {"": np.array([7.0], dtype=np.float32)}
    buffer.final_steps = [FinalStep(0, env, final, None) for env in (0, 1)]

    buffer.finish(last([3.0] * 2), gamma=1.0, lam=0.0)

    value = agent_of().value_batch(last([7.0])).item()
    np.testing.assert_allclose(buffer.value_target, [[value, 0.0]], rtol=1e-5, atol=1e-6)


def test_a_recurrent_policy_learns_from_whole_sequences() -> None:
    buffer = written(5, 4, agent_of(partial(Recurrent, size=3)))
    assert buffer.memory is not None
    buffer.memory += torch.arange(4.0).unsqueeze(1)
    zeros = torch.zeros(4, dtype=torch.bool)
    inputs = PolicyInput(torch.zeros(4, 1), None, buffer.memory, zeros)
    buffer.finish(inputs, gamma=1.0, lam=1.0)
    buffer.shuffle(torch.Generator().manual_seed(1), n_orders=1)

    taken = buffer.finished().take(buffer.order(0))

    envs = buffer.order(0).tolist()
    assert sorted(envs) == [0, 1, 2, 3]
    assert taken.action.tolist() == [[10 * t + env for env in envs] for t in range(5)]
    assert taken.inputs.memory is not None
    assert taken.inputs.memory[:, 0].tolist() == envs


def test_scoring_in_parts_equals_scoring_the_whole_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of()
    values = []
    for numbers in (2**24, 5):
        monkeypatch.setattr("ml_pipeline.training.rollout_buffer._SCORED_NUMBERS", numbers)
        buffer = written(4, 3, agent)
        buffer.finish(last([0.0] * 3), gamma=1.0, lam=1.0)
        values.append(buffer.value)

    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_a_rollout_must_be_finished_and_shuffled_before_an_epoch() -> None:
    buffer = written(4, 3)

    for call in (buffer.finished, buffer.observations):
        with pytest.raises(RuntimeError, match="call finish first"):
            call()
    with pytest.raises(RuntimeError, match="call shuffle first"):
        buffer.order(0)
