"""Collector and RolloutBuffer: what only tensor envs have.

tests/contracts/test_rollouts.py tests what they share with host envs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_agents import CPU, Played
from tiny_torch_envs import Drift, Places, Steered

from ml_pipeline.algorithms.ppo.on_device import DeviceOrders
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
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
            assert torch.equal(infos["final_obs"], played.buffer.final_obs[t])
            returns += infos["episode"]["r"][terminated | truncated].tolist()
            lengths += infos["episode"]["l"][terminated | truncated].tolist()

        assert mean.n == len(returns) > 0
        assert mean.episode_return == pytest.approx(sum(returns) / len(returns), rel=1e-5)
        assert mean.length == pytest.approx(sum(lengths) / len(lengths))


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
