"""TensorCollector and TensorBuffer: what only tensor envs have.

tests/contracts/test_rollouts.py tests what they share with ``Collector`` and ``RolloutBuffer``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_agents import Played
from tiny_torch_envs import Drift, Endless, Places
from torch import Tensor

from ml_pipeline.envs.tensor_tasks.cartpole import TorchCartPole


def tensors(played: Played) -> list[Tensor]:
    buffer = played.buffer
    fields = (buffer.obs, buffer.final_obs, buffer.action, buffer.reward)
    return [each.clone() for each in (*fields, buffer.terminated, buffer.truncated)]


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("make_env", [Places, Endless])
def test_the_buffer_also_holds_the_last_and_the_final_observations(make_env: Any) -> None:
    played = Played(make_env(2), n_steps=5)

    played.collect()

    # The reward equals the observation before the autoreset.
    assert played.buffer.final_obs[..., 0].tolist() == played.buffer.reward.tolist()
    last = [10, 21] if make_env is Places else [20, 21]
    assert played.buffer.obs[-1, :, 0].tolist() == last


@pytest.mark.parametrize("make_env", [TorchCartPole, Drift, Places, Endless])
def test_a_rollout_and_its_episodes_equal_those_of_a_plain_loop(make_env: Any) -> None:
    played, plain = Played(make_env(5), n_steps=40), make_env(5)
    plain.reset(seed=10)
    to_env = played.agent.distribution.to_torch_env

    for _ in range(2):
        (mean,) = played.collect().episodes
        returns: list[float] = []
        lengths: list[int] = []
        for t in range(40):
            _, reward, terminated, truncated, infos = plain.step(to_env(played.buffer.action[t]))
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


@pytest.mark.parametrize("make_env", [TorchCartPole, Drift])
def test_a_resumed_collector_continues_bit_for_bit_and_can_be_saved_again(make_env: Any) -> None:
    ours, other, third = (Played(make_env(4), 5, noise_seed=seed) for seed in (2, 9, 9))
    ours.collect()
    other.resume(ours.collector.state_dict())
    third.resume(other.collector.state_dict())  # before ``other`` has played

    for _ in range(2):
        for each in (ours, other, third):
            each.collect()
        assert are_equal(tensors(ours), tensors(other))
        assert are_equal(tensors(ours), tensors(third))
    assert ours.collector.snapshots() == []  # the state holds the envs


def test_before_the_first_rollout_there_is_no_position_and_no_last_observation() -> None:
    played = Played(Places(2), n_steps=3)

    assert played.collector.state_dict()["position"] is None
    with pytest.raises(RuntimeError, match="call collect first"):
        played.collector.last_inputs(played.agent)


def test_tensors_keep_their_addresses() -> None:
    played = Played(Drift(2), n_steps=3)
    found = []
    for _ in range(2):
        played.collect()
        played.finish()
        played.buffer.shuffle(torch.Generator(), 2)
        buffer, position = played.buffer, played.collector.env.position
        held = (buffer.obs, buffer.action, buffer.reward, *buffer.finished()[1:], *position.state)
        found.append([each.data_ptr() for each in (*held, buffer._keys)])

    assert found[0] == found[1]
