"""Advantages and reward scaling in torch: the numbers of ``returns``, which are NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.training import returns
from ml_pipeline.training.tensor.returns import (
    RolloutOutcome,
    TensorRewardScaler,
    explained_variance,
    gae,
    gae_step_by_step,
)

CPU = torch.device("cpu")


def outcomes(n_steps: int, n_envs: int, seed: int, device: str = "cpu") -> RolloutOutcome:
    """A random rollout; of its steps a quarter terminate, a quarter are cut, some are both."""
    generator = torch.Generator().manual_seed(seed)
    grid = (n_steps, n_envs)
    reward, value, final_value = (torch.randn(grid, generator=generator) for _ in range(3))
    last_value = torch.randn(n_envs, generator=generator)
    terminated, truncated = (torch.rand(grid, generator=generator) < 0.25 for _ in range(2))
    made = RolloutOutcome(reward, value, last_value, final_value, terminated, truncated)
    return RolloutOutcome(*(each.to(device) for each in made))


def by_numpy(given: RolloutOutcome, *, gamma: float, lam: float) -> Any:
    """As ``RolloutBuffer.finish`` does it."""
    reward, value, last_value, final_value, terminated, truncated = (
        each.cpu().numpy() for each in given
    )
    next_value = np.concatenate([value[1:], last_value[np.newaxis]])
    next_value[truncated] = final_value[truncated]
    next_value[terminated] = 0.0
    done = terminated | truncated
    return returns.gae(reward, value, next_value, done, gamma=gamma, lam=lam)


def test_the_successor_of_a_step_is_the_next_value_the_final_value_or_nothing() -> None:
    given = RolloutOutcome(
        reward=torch.tensor([[1.0, 1.0], [1.0, 1.0]]),
        value=torch.tensor([[2.0, 2.0], [4.0, 4.0]]),
        last_value=torch.tensor([8.0, 8.0]),
        final_value=torch.tensor([[0.0, 16.0], [100.0, 100.0]]),
        terminated=torch.tensor([[False, False], [True, False]]),
        truncated=torch.tensor([[False, True], [True, False]]),  # both at once: it is an end
    )

    advantage, target = gae(given, gamma=0.5, lam=1.0)

    # Env 0: 1 - 4 at its end; before it 1 + 0.5 * 4 - 2, and half of what follows.
    # Env 1: 1 + 0.5 * 8 - 4 at last; before it 1 + 0.5 * 16 - 2, and nothing follows.
    assert advantage.tolist() == [[1.0 - 0.5 * 3.0, 7.0], [-3.0, 1.0]]
    assert target.tolist() == [[1.5, 9.0], [1.0, 5.0]]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_advantages_in_torch_are_those_in_numpy(seed: int, gamma: float, lam: float) -> None:
    given = outcomes(17, 5, seed)

    advantage, target = gae_step_by_step(given, gamma=gamma, lam=lam)

    expected = by_numpy(given, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(target, advantage + given.value)


def test_what_an_unwanted_final_value_is_does_not_matter() -> None:
    given = outcomes(9, 4, seed=1)
    other = given._replace(final_value=torch.where(given.truncated, given.final_value, 1e6))

    ours, theirs = (gae_step_by_step(each, gamma=0.9, lam=0.9)[0] for each in (given, other))

    assert torch.equal(ours, theirs)


def scalers(n_envs: int) -> tuple[TensorRewardScaler, returns.RewardScaler]:
    same: Any = {"gamma": 0.9, "clip": 3.0}
    return TensorRewardScaler(n_envs, device=CPU, **same), returns.RewardScaler(n_envs, **same)


def rollouts(n: int) -> list[RolloutOutcome]:
    return [each._replace(reward=5.0 + 20.0 * each.reward) for each in _made(n)]


def _made(n: int) -> list[RolloutOutcome]:
    return [outcomes(8, 3, seed) for seed in range(n)]


def test_the_reward_scaler_in_torch_is_the_one_in_numpy_over_several_rollouts() -> None:
    ours, theirs = scalers(3)

    for given in rollouts(5):
        done = given.terminated | given.truncated
        scaled = ours.scaled(given.reward, done)
        expected = theirs.scaled(given.reward.numpy(), done.numpy())
        np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-4)

    np.testing.assert_allclose(
        ours.state_dict()["moments"], theirs.state_dict()["moments"], rtol=1e-4
    )
    np.testing.assert_allclose(ours.state_dict()["return"], theirs.state_dict()["return"], 1e-4)


def test_the_scale_is_the_deviation_of_the_discounted_return() -> None:
    scaler = TensorRewardScaler(1, gamma=0.5, clip=10.0, device=CPU)
    done = torch.tensor([[False], [True], [False]])

    scaled = scaler.scaled(torch.tensor([[2.0], [3.0], [1.0]]), done)

    # The returns are 2, 3 + 0.5 * 2 and, after the end, 1: their mean 7/3, their variance 14/9.
    np.testing.assert_allclose(scaled.flatten(), np.array([2.0, 3.0, 1.0]) / (14 / 9) ** 0.5, 1e-5)
    np.testing.assert_allclose(scaler.state_dict()["moments"], [7 / 3, 14 / 9, 3.0], rtol=1e-6)
    assert scaler.state_dict()["return"] == [1.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_rollout_that_is_not_finite_leaves_no_trace_in_the_scaler(bad: float) -> None:
    first, second = rollouts(2)
    done = first.terminated | first.truncated
    ours, theirs = scalers(3)
    ours.scaled(first.reward, done)
    theirs.scaled(first.reward.numpy(), done.numpy())
    before = ours.state_dict()["moments"]
    broken = second.reward.clone()
    broken[2, 1] = bad

    scaled = ours.scaled(broken, done)
    expected = theirs.scaled(broken.numpy(), done.numpy())

    assert ours.state_dict() == {"moments": before, "return": [0.0, 0.0, 0.0]}
    np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-4)


def test_a_loaded_scaler_goes_on_bit_for_bit_and_begun_episodes_have_no_return_yet() -> None:
    first, second = rollouts(2)
    done = torch.zeros(8, 3, dtype=torch.bool)
    ours, other = (scalers(3)[0] for _ in range(2))
    ours.scaled(first.reward, done)
    other.load_state_dict(ours.state_dict())

    assert other.state_dict() == ours.state_dict()
    assert torch.equal(ours.scaled(second.reward, done), other.scaled(second.reward, done))

    other.begin_episodes()
    assert other.state_dict()["return"] == [0.0, 0.0, 0.0]


def test_a_scaler_of_other_envs_takes_the_moments_over_and_begins_with_no_returns() -> None:
    given = rollouts(1)[0]
    ours, other = scalers(3)[0], TensorRewardScaler(2, gamma=0.9, clip=3.0, device=CPU)
    ours.scaled(given.reward, torch.zeros(8, 3, dtype=torch.bool))

    other.load_state_dict(ours.state_dict())

    assert other.state_dict()["moments"] == ours.state_dict()["moments"]
    assert other.state_dict()["return"] == [0.0, 0.0]


def test_the_clip_of_the_config_bounds_the_scaled_reward() -> None:
    clip = PPOConfig().clip_reward
    scaler = TensorRewardScaler(100, gamma=0.9, clip=clip, device=CPU)
    reward = torch.zeros(10, 100)
    reward[0, 0], reward[0, 1] = 1000.0, -1000.0

    scaled = scaler.scaled(reward, torch.ones(10, 100, dtype=torch.bool))

    assert (scaled.min().item(), scaled.max().item()) == (-clip, clip)


@pytest.mark.parametrize(
    ("value", "expected"),
    [([1.0, 2.0, 3.0], 1.0), ([2.0, 2.0, 2.0], 0.0), ([3.0, 2.0, 1.0], -3.0)],
)
def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant(
    value: list[float], expected: float
) -> None:
    explained = explained_variance(torch.tensor(value), torch.tensor([1.0, 2.0, 3.0]))

    assert explained.item() == pytest.approx(expected)


def test_targets_that_are_all_the_same_explain_nothing() -> None:
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])).item() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(("n_steps", "n_envs"), [(1, 1), (17, 5), (32, 128), (33, 300), (5, 4096)])
def test_the_kernel_gives_the_advantages_of_the_loop(n_steps: int, n_envs: int) -> None:
    pytest.importorskip("triton", reason="comes with torch's CUDA")
    from ml_pipeline.training.tensor.gae_kernel import gae_in_one_kernel

    given = outcomes(n_steps, n_envs, 1, device="cuda")

    ours = gae_in_one_kernel(*given, gamma=0.99, lam=0.95)

    for our, expected in zip(ours, gae_step_by_step(given, gamma=0.99, lam=0.95), strict=True):
        torch.testing.assert_close(our, expected, rtol=1e-5, atol=1e-5)
