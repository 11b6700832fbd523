"""RolloutBuffer: why episodes end is decided here, and every transition is learned from once."""

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
    """V(observation) = the observation, so that every number can be done by hand."""

    def score_batch(self, inputs: PolicyInput, action: Any) -> Any:
        return torch.zeros(len(action)), inputs.obs[:, 0].clone()  # type: ignore[call-overload]

    def value_batch(self, inputs: PolicyInput) -> Any:
        return inputs.obs[:, 0].clone()  # type: ignore[call-overload]


def agent_of(network: Any = MLP) -> PPOAgent:
    kind = IdentityCritic if network is MLP else PPOAgent
    return kind(OBS, spaces.Discrete(100), network, PPOConfig(), device=CPU, seed=1)


def written(n_steps: int, n_envs: int, agent: PPOAgent | None = None) -> RolloutBuffer:
    """Observation, value, action and reward = 10 * step + env; nothing ends."""
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


def test_the_successor_is_the_next_value_the_final_value_or_nothing() -> None:
    buffer = written(2, 4)
    buffer.reward[:] = 0.0
    for leaf in buffer.obs.values():
        leaf[:] = 0.0
    buffer.truncated[1] = [False, True, False, True]
    buffer.terminated[1] = [False, False, True, True]
    buffer.final_steps = [
        FinalStep(1, env, {"": np.array([7.0], dtype=np.float32)}, None) for env in (1, 3)
    ]

    buffer.finish(last([3.0] * 4), gamma=1.0, lam=0.0)

    assert buffer.advantage[1].tolist() == [3.0, 7.0, 0.0, 0.0]
    assert buffer.advantage[0].tolist() == [0.0] * 4


def test_the_value_target_is_advantage_plus_value() -> None:
    buffer = written(1, 2)

    buffer.finish(last([4.0, 6.0]), gamma=0.5, lam=1.0)

    # reward + gamma * last value, in row 0: 0 + 2 and 1 + 3
    assert buffer.value_target.tolist() == [[2.0, 4.0]]


def test_every_transition_comes_once_per_epoch_with_its_fields_together() -> None:
    buffer = written(4, 3)
    buffer.finish(last([0.0] * 3), gamma=1.0, lam=1.0)

    batches = list(buffer.minibatches(3, torch.Generator().manual_seed(1)))

    actions = torch.cat([batch.action for batch in batches])
    assert [len(batch.action) for batch in batches] == [4, 4, 4]
    assert sorted(actions.tolist()) == [10 * t + env for t in range(4) for env in range(3)]
    assert actions.tolist() != sorted(actions.tolist())
    for batch in batches:
        assert batch.inputs.obs.flatten().tolist() == batch.action.tolist()  # type: ignore[union-attr]
        assert batch.value.tolist() == batch.action.tolist()


def test_a_policy_with_a_memory_learns_from_whole_sequences() -> None:
    agent = agent_of(partial(Recurrent, size=3))
    buffer = written(5, 4, agent)
    assert buffer.state is not None
    buffer.state += torch.arange(4.0).unsqueeze(1)
    zeros = torch.zeros(4, dtype=torch.bool)
    inputs = PolicyInput(torch.zeros(4, 1), None, buffer.state, zeros)
    buffer.finish(inputs, gamma=1.0, lam=1.0)

    batches = list(buffer.minibatches(2, torch.Generator().manual_seed(1)))

    envs = []
    for batch in batches:
        assert batch.action.shape == (5, 2)
        assert batch.inputs.state is not None
        for column in range(2):
            env = int(batch.action[0, column])
            envs.append(env)
            assert batch.action[:, column].tolist() == [10 * t + env for t in range(5)]
            assert batch.inputs.state[column].unique().tolist() == [float(env)]
    assert sorted(envs) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 sequences cannot be cut into 3"):
        next(buffer.minibatches(3, torch.Generator()))


def test_a_rollout_that_cannot_be_cut_evenly_is_refused() -> None:
    buffer = written(4, 3)
    buffer.finish(last([0.0] * 3), gamma=1.0, lam=1.0)

    with pytest.raises(ValueError, match="12 transitions cannot be cut into 5"):
        next(buffer.minibatches(5, torch.Generator()))


def test_scores_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = PPOAgent(OBS, spaces.Discrete(100), MLP, PPOConfig(), device=CPU, seed=1)
    values = []
    for numbers in (2**24, 5):
        monkeypatch.setattr("ml_pipeline.training.rollout_buffer._SCORED_NUMBERS", numbers)
        buffer = written(4, 3, agent)
        buffer.finish(last([0.0] * 3), gamma=1.0, lam=1.0)
        values.append(buffer.value)

    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_minibatches_before_the_finish_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="never finished"):
        next(written(4, 3).minibatches(2, torch.Generator()))
