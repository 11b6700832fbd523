"""RolloutBuffer: successors of each kind, orders of transitions or sequences, scores in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.agents.recurrent import Recurrent
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.protocols import PolicyInput
from ml_pipeline.training.rollout_buffer import FinalStep, RolloutBuffer

CPU = torch.device("cpu")
OBS = spaces.Box(-1e6, 1e6, (1,), np.float32)


class IdentityCritic(PPOAgent):
    """V(observation) is the observation."""

    def score_batch(self, inputs: PolicyInput, action: Any) -> Any:
        return torch.zeros(len(action)), inputs.obs[:, 0].clone()  # type: ignore[call-overload]

    def value_batch(self, inputs: PolicyInput, wanted: Any = None) -> Any:
        return inputs.obs[:, 0].clone()  # type: ignore[call-overload]


def agent_of(kind: type[PPOAgent] = IdentityCritic, network: Any = MLP) -> PPOAgent:
    return kind(OBS, spaces.Discrete(100), network, PPOConfig(), device=CPU, seed=1)


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
    return PolicyInput(torch.tensor(values).unsqueeze(1), None, None, None)


def test_the_successor_is_the_next_value_the_final_value_or_zero() -> None:
    buffer = written(2, 4)
    buffer.reward[:] = 0.0
    buffer.obs[""][:] = 0.0
    buffer.truncated[1] = [False, True, False, True]
    buffer.terminated[1] = [False, False, True, True]
    seven = {"": np.array([7.0], dtype=np.float32)}
    buffer.final_steps = [FinalStep(1, env, seven, None) for env in (1, 3)]

    buffer.finish(last([3.0] * 4), gamma=1.0, lam=0.0)

    assert buffer.advantage.tolist() == [[0.0] * 4, [3.0, 7.0, 0.0, 0.0]]


def test_an_order_keeps_the_fields_of_a_transition_together() -> None:
    buffer = written(4, 3)
    buffer.finish(last([0.0] * 3), gamma=1.0, lam=1.0)
    buffer.shuffle(torch.Generator().manual_seed(1), n_orders=1)

    taken = buffer.finished().take(buffer.order(0))

    actions = taken.action.tolist()
    assert sorted(actions) == [10 * t + env for t in range(4) for env in range(3)]
    assert actions != sorted(actions)
    assert taken.inputs.obs.flatten().tolist() == actions  # type: ignore[union-attr]
    assert taken.value.tolist() == actions


def test_a_recurrent_policy_learns_from_whole_sequences() -> None:
    buffer = written(5, 4, agent_of(PPOAgent, partial(Recurrent, size=3)))
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


def test_scores_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_of(PPOAgent)
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
