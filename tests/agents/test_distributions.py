"""Action distributions against torch's own, and their noise against hand arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.agents.distributions import (
    FORBIDDEN,
    ActionSpaceError,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
    StateDependentNoise,
    action_distribution,
)
from ml_pipeline.config.ppo import PPOConfig


def test_a_categorical_action_is_where_the_noise_falls() -> None:
    distribution = Categorical(spaces.Discrete(3))
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(5, 3)
    noise = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.9999999])

    assert distribution.sample(logits, noise).tolist() == [0, 0, 1, 1, 2]
    assert distribution.mode(logits).tolist() == [1] * 5


def test_categorical_samples_follow_the_probabilities() -> None:
    distribution = Categorical(spaces.Discrete(3))
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    noise = distribution.draw_noise(1, 100_000, torch.Generator().manual_seed(1))[0]

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
    noise = distribution.draw_noise(1, 6, generator)[0]
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


def multi_space() -> spaces.MultiDiscrete:
    return spaces.MultiDiscrete([2, 4, 3], start=[0, 10, -1])


def test_several_choices_are_scored_as_independent_categoricals() -> None:
    distribution = MultiCategorical(multi_space())
    outputs = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    action = torch.tensor([[0, 3, 2], [1, 0, 0], [1, 2, 1], [0, 1, 2], [1, 3, 0]])
    parts = outputs.split([2, 4, 3], dim=-1)
    peers = [torch.distributions.Categorical(logits=part) for part in parts]

    log_prob, entropy = distribution.log_prob_and_entropy(outputs, action)

    expected = sum(peer.log_prob(action[:, i]) for i, peer in enumerate(peers))
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, sum(peer.entropy() for peer in peers))


def test_several_choices_are_drawn_each_by_its_own_noise_and_fit_the_space() -> None:
    distribution = MultiCategorical(multi_space())
    probs = torch.tensor([0.5, 0.5, 0.1, 0.2, 0.3, 0.4, 0.3, 0.3, 0.4])
    noise = torch.tensor([[0.6, 0.05, 0.9], [0.4, 0.95, 0.0]])

    action = distribution.sample(probs.log().expand(2, 9), noise)

    assert action.tolist() == [[1, 0, 2], [0, 3, 0]]
    assert distribution.to_env(action.numpy()).tolist() == [[1, 10, 1], [0, 13, -1]]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([[2, 3], [4, 2]]),
        spaces.MultiBinary(4),
        spaces.MultiBinary((2, 3)),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Box(-2, 2, (2, 3), np.float64),
    ],
    ids=str,
)
def test_sampled_actions_lie_in_every_space_that_is_supported(space: spaces.Space[object]) -> None:
    distribution = action_distribution(space, 8, PPOConfig())
    generator = torch.Generator().manual_seed(1)
    outputs = 5.0 * torch.randn(32, distribution.n_outputs, generator=generator)
    noise = distribution.draw_noise(1, 32, generator)[0]

    actions = distribution.to_env(distribution.sample(outputs, noise).detach().numpy())

    assert all(space.contains(action) for action in actions)


def test_a_squashed_gaussian_is_torchs_own_and_lies_within_the_bounds() -> None:
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float32)
    distribution = SquashedGaussian(space, log_std_init=-0.3)
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(7, 2, generator=generator)
    stored = distribution.sample(mean, distribution.draw_noise(1, 7, generator)[0])
    bend = [
        torch.distributions.TanhTransform(cache_size=1),
        torch.distributions.AffineTransform(torch.tensor([1.0, 0.25]), torch.tensor([2.0, 0.25])),
    ]
    normal = torch.distributions.Normal(mean, distribution.log_std.exp())
    peer = torch.distributions.TransformedDistribution(normal, bend)
    env_action = bend[1](bend[0](stored))

    log_prob, entropy = distribution.log_prob_and_entropy(mean, stored)

    torch.testing.assert_close(log_prob, peer.log_prob(env_action).sum(-1))
    np.testing.assert_allclose(
        distribution.to_env(stored.detach().numpy()), env_action.detach().numpy(), rtol=1e-5
    )
    drawn = -peer.log_prob(peer.sample((100_000,))).sum(-1).mean(dim=0)
    torch.testing.assert_close(entropy, drawn, atol=0.02, rtol=0)


def test_a_number_without_a_choice_does_not_spoil_a_squashed_gaussian() -> None:
    space = spaces.Box(np.array([-1.0, 2.0], np.float32), np.array([1.0, 2.0], np.float32))
    squashed = SquashedGaussian(space)
    outputs = torch.zeros(1, 2)

    log_prob, entropy = squashed.log_prob_and_entropy(outputs, torch.full((1, 2), 0.3))

    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(entropy).all()
    assert squashed.to_env(np.full((1, 2), 0.3))[0, 1] == 2.0


def test_gsde_keeps_its_noise_for_some_steps_and_scores_what_it_drew() -> None:
    distribution = StateDependentNoise(spaces.Box(-1, 1, (2,)), 3, log_std_init=-1.0, every_steps=2)
    noise = distribution.draw_noise(5, 4, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    mean, features = torch.randn(4, 2, generator=generator), torch.randn(4, 3, generator=generator)
    outputs = torch.cat([mean, features], dim=-1)

    rows = [distribution.noise_row(t) for t in range(5)]
    action = distribution.sample(outputs, noise[0])
    log_prob, entropy = distribution.log_prob_and_entropy(outputs, action)

    assert (len(noise), rows) == (3, [0, 0, 1, 1, 2])
    matrix = noise[0] * np.exp(-1.0)
    expected = mean + torch.einsum("nf,nfa->na", features, matrix)
    torch.testing.assert_close(action, expected)
    std = (features.square().sum(-1, keepdim=True) * np.exp(-2.0) + 1e-6).sqrt()
    peer = torch.distributions.Normal(mean, std.expand(4, 2))
    torch.testing.assert_close(log_prob, peer.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, peer.entropy().sum(-1))


def test_gsde_can_keep_its_noise_for_a_whole_rollout() -> None:
    distribution = StateDependentNoise(spaces.Box(-1, 1, (2,)), 3, log_std_init=0.0, every_steps=0)

    noise = distribution.draw_noise(5, 1, torch.Generator().manual_seed(1))

    assert noise.shape == (1, 1, 3, 2)
    assert distribution.noise_row(4) == 0


def test_what_is_forbidden_is_never_drawn_and_has_no_share_in_the_entropy() -> None:
    distribution = Categorical(spaces.Discrete(4))
    mask = torch.tensor([False, True, False, True])
    outputs = torch.zeros(1000, 4).masked_fill(~mask, FORBIDDEN)
    noise = torch.linspace(0, 1 - 1e-7, 1000)

    action = distribution.sample(outputs, noise)
    log_prob, entropy = distribution.log_prob_and_entropy(outputs, action)

    assert sorted(set(action.tolist())) == [1, 3]
    torch.testing.assert_close(log_prob, torch.full((1000,), -np.log(2.0), dtype=torch.float32))
    torch.testing.assert_close(entropy, torch.full((1000,), np.log(2.0), dtype=torch.float32))


@pytest.mark.parametrize(
    ("space", "options", "words"),
    [
        (spaces.Text(3), {}, "this env has Text"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {}, "this env has Dict"),
        (spaces.Box(-np.inf, 1, (2,)), {"box_policy": "squashed"}, "needs bounds on every side"),
    ],
)
def test_an_action_space_without_a_distribution_is_named(
    space: spaces.Space[object], options: dict[str, str], words: str
) -> None:
    with pytest.raises(ActionSpaceError, match=words):
        action_distribution(space, 8, PPOConfig(**options))


EVERY = pytest.mark.parametrize(
    "distribution",
    [
        Categorical(spaces.Discrete(3, start=-5)),
        MultiCategorical(spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]])),
        MultiCategorical(spaces.MultiBinary((2, 2))),
        DiagonalGaussian(spaces.Box(-1, 1, (2, 2), np.float32)),
        DiagonalGaussian(spaces.Box(np.array([-np.inf, 0]), np.array([0, np.inf]))),
        DiagonalGaussian(spaces.Box(-3, 3, (4,), np.int32)),
        SquashedGaussian(spaces.Box(np.array([-1.0, 2.0]), np.array([3.0, 2.0]))),
        StateDependentNoise(spaces.Box(-1, 1, (2,)), 3, log_std_init=0.0, every_steps=1),
    ],
    ids=lambda each: f"{type(each).__name__} {each.space}",
)


@EVERY
def test_to_env_is_the_same_in_torch(distribution: Any) -> None:
    outputs = 4.0 * torch.randn(
        50, distribution.n_outputs, generator=torch.Generator().manual_seed(1)
    )
    action = distribution.mode(outputs)

    given = distribution.to_env_tensor(action).numpy()

    expected = distribution.to_env(action.numpy())
    assert given.shape == expected.shape
    assert np.allclose(given, expected, rtol=1e-6)
    assert given[0].astype(distribution.space.dtype) in distribution.space


@EVERY
def test_envs_that_are_tensors_get_the_same_actions(distribution: Any) -> None:
    outputs = 4.0 * torch.randn(
        50, distribution.n_outputs, generator=torch.Generator().manual_seed(1)
    )
    action = distribution.mode(outputs)

    given = distribution.to_torch_env(action)

    expected = distribution.to_env(action.numpy())
    is_whole = np.issubdtype(distribution.space.dtype, np.integer)
    assert given.dtype == (torch.int64 if is_whole else torch.float32)
    assert given.shape == expected.shape
    assert np.allclose(given.numpy(), expected, rtol=1e-6, atol=1e-6)


@EVERY
def test_the_noise_of_a_rollout_is_what_torch_draws_in_one_go(distribution: Any) -> None:
    shape = distribution.noise_shape(7, 3)
    draw = torch.randn if distribution.has_normal_noise else torch.rand

    drawn = distribution.draw_noise(7, 3, torch.Generator().manual_seed(5))

    assert torch.equal(drawn, draw(shape, generator=torch.Generator().manual_seed(5)))
    # One row for each step, or of gSDE for several, and one column for each env.
    assert drawn.shape[:2] == (1 + distribution.noise_row(6), 3)


def test_the_shape_of_the_noise_is_one_number_per_choice_or_dimension() -> None:
    gsde = {"log_std_init": 0.0, "every_steps": 4}

    assert Categorical(spaces.Discrete(3)).noise_shape(7, 2) == (7, 2)
    assert MultiCategorical(spaces.MultiDiscrete([2, 3])).noise_shape(7, 2) == (7, 2, 2)
    assert DiagonalGaussian(spaces.Box(-1, 1, (2, 2))).noise_shape(7, 2) == (7, 2, 4)
    noise = StateDependentNoise(spaces.Box(-1, 1, (2,)), 3, **gsde)
    assert noise.noise_shape(7, 2) == (2, 2, 3, 2)  # steps 0 to 3, and 4 to 6
