"""Action distributions against torch's own, and their noise against hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.agents.distributions import (
    ActionSpaceError,
    Categorical,
    DiagonalGaussian,
    action_distribution,
)


def test_a_categorical_action_is_where_the_noise_falls() -> None:
    distribution = Categorical(spaces.Discrete(3))
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(5, 3)
    noise = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.9999999])

    assert distribution.sample(logits, noise).tolist() == [0, 0, 1, 1, 2]
    assert distribution.mode(logits).tolist() == [1] * 5


def test_categorical_samples_follow_the_probabilities() -> None:
    distribution = Categorical(spaces.Discrete(3))
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    noise = distribution.draw_noise((100_000,), torch.Generator().manual_seed(1))

    actions = distribution.sample(logits.expand(100_000, 3), noise)

    shares = torch.bincount(actions) / 100_000
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.5, 0.3]), atol=0.01, rtol=0)


def test_categorical_log_prob_and_entropy_equal_torchs() -> None:
    distribution = Categorical(spaces.Discrete(4))
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    action = torch.tensor([0, 1, 2, 3, 0, 1])
    peer = torch.distributions.Categorical(logits=logits)

    log_prob, entropy = distribution.log_prob_and_entropy(logits, action)

    torch.testing.assert_close(log_prob, peer.log_prob(action))
    torch.testing.assert_close(entropy, peer.entropy())


def test_gaussian_log_prob_entropy_and_sample_equal_torchs() -> None:
    distribution = DiagonalGaussian(spaces.Box(-1, 1, (3,)))
    with torch.no_grad():
        distribution.log_std.copy_(torch.tensor([0.1, -0.5, 0.3]))
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(6, 3, generator=generator)
    noise = distribution.draw_noise((6,), generator)
    peer = torch.distributions.Normal(mean, distribution.log_std.exp())

    action = distribution.sample(mean, noise)
    log_prob, entropy = distribution.log_prob_and_entropy(mean, action)

    torch.testing.assert_close(action, mean + peer.stddev * noise)
    torch.testing.assert_close(log_prob, peer.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, peer.entropy().sum(-1))


def test_box_actions_are_clipped_and_shaped_for_the_env() -> None:
    space = spaces.Box(np.array([[-1.0, -2.0]]), np.array([[1.0, 2.0]]), dtype=np.float64)
    distribution = DiagonalGaussian(space)

    action = distribution.to_env(np.array([[5.0, -5.0], [0.5, 0.5]], dtype=np.float32))

    assert action.tolist() == [[[1.0, -2.0]], [[0.5, 0.5]]]
    assert action.dtype == np.float64


def test_discrete_actions_count_from_the_spaces_start() -> None:
    distribution = Categorical(spaces.Discrete(3, start=-1))

    assert distribution.to_env(np.array([0, 1, 2])).tolist() == [-1, 0, 1]


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.Box(0, 9, (2,), np.int64)])
def test_an_action_space_without_a_distribution_is_named(space: spaces.Space[object]) -> None:
    with pytest.raises(ActionSpaceError, match="this env has"):
        action_distribution(space)
