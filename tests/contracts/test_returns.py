"""Advantages, scaled rewards and explained variance of arrays, of tensors and in a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from differences import gae_differences, random_outcome
from numpy.typing import NDArray

from ml_pipeline.training import returns
from ml_pipeline.training.returns import RolloutOutcome
from ml_pipeline.training.reward_scaler import RewardScaler


def gae_of(kind: str, given: RolloutOutcome, *, gamma: float, lam: float) -> NDArray[Any]:
    if kind == "torch":
        return given.estimate(returns.gae, gamma=gamma, lam=lam)[0].numpy()
    # As ``RolloutBuffer.finish`` calls it.
    reward, value, _, _, terminated, truncated = (each.numpy() for each in given)
    successor = next_value(given)
    ongoing = (~(terminated | truncated)).astype(np.float32)
    return returns.gae(reward, value, successor, ongoing, gamma=gamma, lam=lam)


def next_value(given: RolloutOutcome) -> NDArray[Any]:
    _, value, last_value, final_value, terminated, truncated = (each.numpy() for each in given)
    successor = np.concatenate([value[1:], last_value[np.newaxis]])
    successor[truncated] = final_value[truncated]
    successor[terminated] = 0.0
    return successor


kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


@kinds
def test_the_successor_is_the_next_value_the_final_value_or_zero(kind: str) -> None:
    given = RolloutOutcome(
        reward=torch.tensor([[1.0, 1.0], [1.0, 1.0]]),
        value=torch.tensor([[2.0, 2.0], [4.0, 4.0]]),
        last_value=torch.tensor([8.0, 8.0]),
        final_value=torch.tensor([[0.0, 16.0], [100.0, 100.0]]),
        terminated=torch.tensor([[False, False], [True, False]]),
        truncated=torch.tensor([[False, True], [True, False]]),  # both: termination counts
    )

    advantage = gae_of(kind, given, gamma=0.5, lam=1.0)

    # Env 0 terminates: 1 - 4. Before that: 1 + 0.5 * 4 - 2, plus half of what follows.
    # Env 1 continues: 1 + 0.5 * 8 - 4. Before that it was truncated: 1 + 0.5 * 16 - 2.
    assert advantage.tolist() == [[1.0 - 0.5 * 3.0, 7.0], [-3.0, 1.0]]


@kinds
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_sum_of_its_definition(kind: str, gamma: float, lam: float) -> None:
    given = random_outcome(12, 3, seed=1)

    advantage = gae_of(kind, given, gamma=gamma, lam=lam)

    delta = given.reward.numpy() + gamma * next_value(given) - given.value.numpy()
    done = (given.terminated | given.truncated).numpy()
    expected = summed(delta, done, gamma * lam)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6)


def summed(delta: NDArray[Any], done: NDArray[Any], decay: float) -> NDArray[Any]:
    """Sum over k of decay^k delta[t + k], up to the step that ends the episode."""
    result = np.zeros_like(delta)
    for t in range(delta.shape[0]):
        for env in range(delta.shape[1]):
            for k in range(delta.shape[0] - t):
                result[t, env] += decay**k * delta[t + k, env]
                if done[t + k, env]:
                    break
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(
    ("n_steps", "n_envs"), [(1, 1), (9, 5), (32, 128), (4, 130), (33, 300), (5, 4096)]
)
def test_the_kernel_computes_the_same_advantages_as_the_loop(n_steps: int, n_envs: int) -> None:
    pytest.importorskip("triton", reason="comes with torch's CUDA builds")

    found = gae_differences(n_steps, n_envs, torch.device("cuda"))

    assert all(each <= 1e-5 for each in found.values()), found


def scaler_of(kind: str, n_envs: int = 3, *, gamma: float = 0.9, clip: float = 3.0) -> Any:
    if kind == "torch":
        return RewardScaler(torch.zeros(n_envs), gamma=gamma, clip=clip)
    return RewardScaler(np.zeros(n_envs), gamma=gamma, clip=clip)


def scaled_by(scaler: Any, reward: Any, done: Any) -> NDArray[Any]:
    reward, done = torch.as_tensor(reward, dtype=torch.float32), torch.as_tensor(done)
    if isinstance(scaler._return, np.ndarray):
        return scaler.scaled(reward.numpy(), done.numpy())
    return np.asarray(scaler.scaled(reward, done))


def rollouts(n: int) -> list[tuple[Any, Any]]:
    """Rewards and ends."""
    outcomes = [random_outcome(8, 3, seed) for seed in range(n)]
    return [(5.0 + 20.0 * each.reward, each.terminated | each.truncated) for each in outcomes]


@kinds
def test_rewards_are_divided_by_the_deviation_of_the_discounted_return(kind: str) -> None:
    scaler = scaler_of(kind, 1, gamma=0.5, clip=10.0)
    reward = np.array([[2.0], [3.0], [1.0]])

    scaled = scaled_by(scaler, reward, [[False], [True], [False]])

    # The returns are 2, 3 + 0.5 * 2 and, in a new episode, 1: mean 7/3, variance 14/9.
    np.testing.assert_allclose(scaled, reward / (14 / 9) ** 0.5, rtol=1e-5)
    np.testing.assert_allclose(scaler.state_dict()["moments"], [7 / 3, 14 / 9, 3.0], rtol=1e-6)
    assert scaler.state_dict()["return"] == [1.0]


@kinds
def test_the_return_continues_in_the_next_rollout(kind: str) -> None:
    (reward, done), *_ = rollouts(1)
    whole, halves = scaler_of(kind, clip=0.7), scaler_of(kind, clip=0.7)

    expected = scaled_by(whole, reward, done)
    scaled_by(halves, reward[:4], done[:4])
    second = scaled_by(halves, reward[4:], done[4:])

    np.testing.assert_allclose(second, expected[4:], rtol=1e-5)


@kinds
def test_scaled_rewards_are_clipped(kind: str) -> None:
    reward = np.zeros((10, 100))
    reward[0, :2] = 1000.0, -1000.0

    scaled = scaled_by(scaler_of(kind, 100, clip=10.0), reward, np.ones((10, 100), dtype=bool))

    assert (scaled.min(), scaled.max()) == (-10.0, 10.0)


@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_rollout_that_is_not_finite_does_not_change_the_scale(kind: str, bad: float) -> None:
    (reward, done), (broken, _) = rollouts(2)
    scaler = scaler_of(kind)
    scaled_by(scaler, reward, done)
    before = scaler.state_dict()["moments"]
    broken[2, 1] = bad

    scaled_by(scaler, broken, done)

    assert scaler.state_dict() == {"moments": before, "return": [0.0, 0.0, 0.0]}
    assert np.isfinite(scaled_by(scaler, reward, done)).all()


@kinds
def test_a_loaded_scaler_continues_exactly(kind: str) -> None:
    (first, _), (second, _) = rollouts(2)
    done = np.zeros((8, 3), dtype=bool)
    ours, other, fewer = scaler_of(kind), scaler_of(kind), scaler_of(kind, 2)
    scaled_by(ours, first, done)
    for each in (other, fewer):
        each.load_state_dict(ours.state_dict())

    assert other.state_dict() == ours.state_dict()
    assert np.array_equal(scaled_by(ours, second, done), scaled_by(other, second, done))
    # With another number of envs, the returns start at zero.
    assert fewer.state_dict() == {"moments": fewer.state_dict()["moments"], "return": [0.0, 0.0]}
    assert fewer.state_dict()["moments"] != scaler_of(kind).state_dict()["moments"]
    other.begin_episodes()
    assert other.state_dict()["return"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        ([1.0, 2.0, 3.0], [5.0, 5.0, 5.0], 0.0),
    ],
    ids=["perfect", "constant", "reversed", "equal targets"],
)
def test_explained_variance(
    array: Any, value: list[float], target: list[float], expected: float
) -> None:
    explained = returns.explained_variance(array(value), array(target))

    assert float(explained) == pytest.approx(expected)
