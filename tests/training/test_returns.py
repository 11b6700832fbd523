"""Advantages and scaled rewards against hand arithmetic and against the definition written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ml_pipeline.training.returns import RewardScaler, explained_variance, gae


def array(rows: Any) -> Any:
    return np.array(rows, dtype=np.float32)


def test_truncated_step_bootstraps_from_the_final_observation() -> None:
    reward, value = array([[1.0], [1.0]]), array([[0.0], [0.0]])
    next_value = array([[0.0], [10.0]])  # row 1 was cut by the time limit at V = 10
    done = np.array([[False], [True]])

    advantage = gae(reward, value, next_value, done, gamma=0.5, lam=1.0)

    assert advantage.flatten().tolist() == [1.0 + 0.5 * 6.0, 1.0 + 0.5 * 10.0]


def test_an_advantage_does_not_reach_over_the_end_of_an_episode() -> None:
    reward = array([[1.0, 1.0], [100.0, 1.0]])
    zero = array(np.zeros((2, 2)))
    done = np.array([[True, False], [False, False]])

    advantage = gae(reward, zero, zero, done, gamma=1.0, lam=1.0)

    assert advantage.tolist() == [[1.0, 2.0], [100.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_sum_of_its_definition(gamma: float, lam: float) -> None:
    random = np.random.default_rng(1)
    reward, value, next_value = (array(random.normal(size=(12, 3))) for _ in range(3))
    done = random.random((12, 3)) < 0.2

    advantage = gae(reward, value, next_value, done, gamma=gamma, lam=lam)

    expected = summed(reward, value, next_value, done, gamma, lam)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-6)


def summed(reward: Any, value: Any, next_value: Any, done: Any, gamma: float, lam: float) -> Any:
    """sum over k of (gamma lam)^k delta[t + k], up to and with the step that ends the episode."""
    delta = reward + gamma * next_value - value
    result = np.zeros_like(delta)
    for t in range(delta.shape[0]):
        for env in range(delta.shape[1]):
            for k in range(delta.shape[0] - t):
                result[t, env] += (gamma * lam) ** k * delta[t + k, env]
                if done[t + k, env]:
                    break
    return result


def test_explained_variance_of_a_perfect_a_useless_and_a_constant_target() -> None:
    target = array([1.0, 2.0, 3.0])

    assert explained_variance(target, target) == 1.0
    assert explained_variance(array([0.0] * 3), target) == 0.0
    assert explained_variance(target, array([1.0] * 3)) == 0.0


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    scaler = RewardScaler(1, gamma=0.5, clip=10.0)
    reward = array([[4.0], [4.0], [8.0]])
    done = np.array([[False], [True], [False]])

    scaled = scaler.scaled(reward, done)

    returns = [4.0, 0.5 * 4.0 + 4.0, 8.0]  # the second ends an episode: the third begins anew
    np.testing.assert_allclose(scaled, reward / np.std(returns), rtol=1e-5)


def test_the_return_goes_on_from_one_rollout_to_the_next_and_huge_rewards_are_clipped() -> None:
    random = np.random.default_rng(1)
    reward, done = array(random.normal(size=(8, 2))), random.random((8, 2)) < 0.2
    whole, halves = (RewardScaler(2, gamma=0.9, clip=0.7) for _ in range(2))

    expected = whole.scaled(reward, done)
    halves.scaled(reward[:4], done[:4])
    second = halves.scaled(reward[4:], done[4:])

    np.testing.assert_allclose(second, expected[4:], rtol=1e-5)
    assert np.abs(expected).max() == np.float32(0.7)


def test_a_rollout_with_a_nan_leaves_no_trace_in_the_scale() -> None:
    scaler = RewardScaler(1, gamma=0.9, clip=10.0)
    scaler.scaled(array([[1.0], [3.0]]), np.zeros((2, 1), dtype=bool))
    before = scaler.state_dict()["moments"]

    scaler.scaled(array([[np.nan], [1.0]]), np.zeros((2, 1), dtype=bool))

    assert scaler.state_dict()["moments"] == before
    assert np.isfinite(scaler.scaled(array([[1.0]]), np.zeros((1, 1), dtype=bool))).all()
