"""Advantages against hand arithmetic and against the definition written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml_pipeline.training.returns import explained_variance, gae


def test_truncated_step_bootstraps_from_the_final_observation() -> None:
    reward, value = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [0.0]])
    next_value = torch.tensor([[0.0], [10.0]])  # row 1 was cut by the time limit at V = 10
    done = torch.tensor([[False], [True]])

    advantage = gae(reward, value, next_value, done, gamma=0.5, lam=1.0)

    assert advantage.flatten().tolist() == [1.0 + 0.5 * 6.0, 1.0 + 0.5 * 10.0]


def test_an_advantage_does_not_reach_over_the_end_of_an_episode() -> None:
    reward = torch.tensor([[1.0, 1.0], [100.0, 1.0]])
    zero = torch.zeros(2, 2)
    done = torch.tensor([[True, False], [False, False]])

    advantage = gae(reward, zero, zero, done, gamma=1.0, lam=1.0)

    assert advantage.tolist() == [[1.0, 2.0], [100.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)])
def test_gae_equals_the_sum_of_its_definition(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (12, 3)
    reward, value, next_value = (torch.randn(shape, generator=generator) for _ in range(3))
    done = torch.rand(shape, generator=generator) < 0.2

    advantage = gae(reward, value, next_value, done, gamma=gamma, lam=lam)

    torch.testing.assert_close(advantage, summed(reward, value, next_value, done, gamma, lam))


def summed(
    reward: Tensor, value: Tensor, next_value: Tensor, done: Tensor, gamma: float, lam: float
) -> Tensor:
    """sum over k of (gamma lam)^k delta[t + k], up to and with the step that ends the episode."""
    delta = reward + gamma * next_value - value
    result = torch.zeros_like(delta)
    for t in range(delta.shape[0]):
        for env in range(delta.shape[1]):
            for k in range(delta.shape[0] - t):
                result[t, env] += (gamma * lam) ** k * delta[t + k, env]
                if done[t + k, env]:
                    break
    return result


def test_explained_variance_of_a_perfect_a_useless_and_a_constant_target() -> None:
    target = torch.tensor([1.0, 2.0, 3.0])

    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(torch.zeros(3), target).item() == 0.0
    assert explained_variance(target, torch.ones(3)).item() == 0.0
