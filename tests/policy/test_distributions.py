"""Action distributions: equal to torch's own, with noise and actions checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    ActionSpaceError,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
    StateDependentNoise,
)
from ml_pipeline.policy.product import action_distribution

CHOICES = MultiCategorical(spaces.MultiDiscrete([2, 4, 3], start=[0, 10, -1]))


def gsde(every_steps: int) -> StateDependentNoise:
    space = spaces.Box(-1, 1, (2,))
    return StateDependentNoise(space, 3, log_std_init=-1.0, every_steps=every_steps)


def test_categorical_action_is_the_interval_that_contains_the_noise() -> None:
    distribution = Categorical(spaces.Discrete(3))
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(5, 3)
    noise = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.9999999])

    assert distribution.sample(logits, noise).tolist() == [0, 0, 1, 1, 2]
    assert distribution.mode(logits).tolist() == [1] * 5


def test_each_choice_uses_its_own_noise() -> None:
    probs = torch.tensor([0.5, 0.5, 0.1, 0.2, 0.3, 0.4, 0.3, 0.3, 0.4])
    noise = torch.tensor([[0.6, 0.05, 0.9], [0.4, 0.95, 0.0]])

    assert CHOICES.sample(probs.log().expand(2, 9), noise).tolist() == [[1, 0, 2], [0, 3, 0]]


@pytest.mark.parametrize("distribution", [Categorical(spaces.Discrete(4)), CHOICES])
def test_choices_are_scored_as_torchs_independent_categoricals(distribution: Any) -> None:
    sizes = [2, 4, 3] if distribution is CHOICES else [4]
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(6, sum(sizes), generator=generator)
    peers = [torch.distributions.Categorical(logits=part) for part in outputs.split(sizes, dim=-1)]
    actions = [torch.randint(size, (6,), generator=generator) for size in sizes]

    log_prob, entropy = distribution.log_prob_and_entropy(
        outputs, torch.stack(actions, dim=-1) if distribution is CHOICES else actions[0]
    )

    expected = sum(peer.log_prob(action) for peer, action in zip(peers, actions, strict=True))
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, sum(peer.entropy() for peer in peers))


def test_gaussian_sample_log_prob_and_entropy_equal_torchs() -> None:
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


def test_squashed_gaussian_equals_torchs_and_respects_the_bounds() -> None:
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float32)
    distribution = SquashedGaussian(space, log_std_init=-0.3)
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(7, 2, generator=generator)
    stored = distribution.sample(mean, distribution.draw_noise(1, 7, generator)[0])
    squash = [
        torch.distributions.TanhTransform(cache_size=1),
        torch.distributions.AffineTransform(torch.tensor([1.0, 0.25]), torch.tensor([2.0, 0.25])),
    ]
    normal = torch.distributions.Normal(mean, distribution.log_std.exp())
    peer = torch.distributions.TransformedDistribution(normal, squash)
    env_action = squash[1](squash[0](stored))

    log_prob, entropy = distribution.log_prob_and_entropy(mean, stored)

    torch.testing.assert_close(log_prob, peer.log_prob(env_action).sum(-1))
    np.testing.assert_allclose(
        distribution.to_env(stored.detach().numpy()), env_action.detach().numpy(), rtol=1e-5
    )
    sampled = -peer.log_prob(peer.sample((100_000,))).sum(-1).mean(dim=0)
    torch.testing.assert_close(entropy, sampled, atol=0.02, rtol=0)


def test_squashed_gaussian_ignores_a_dimension_with_equal_bounds() -> None:
    space = spaces.Box(np.array([-1.0, 2.0], np.float32), np.array([1.0, 2.0], np.float32))
    squashed = SquashedGaussian(space)

    scores = squashed.log_prob_and_entropy(torch.zeros(1, 2), torch.full((1, 2), 0.3))

    assert all(torch.isfinite(score).all() for score in scores)
    assert squashed.to_env(np.full((1, 2), 0.3))[0, 1] == 2.0


def test_gsde_noise_is_linear_in_the_features_and_scored_as_torchs_normal() -> None:
    distribution = gsde(every_steps=2)
    noise = distribution.draw_noise(1, 4, torch.Generator().manual_seed(1))[0]
    generator = torch.Generator().manual_seed(2)
    mean, features = torch.randn(4, 2, generator=generator), torch.randn(4, 3, generator=generator)
    outputs = torch.cat([mean, features], dim=-1)

    action = distribution.sample(outputs, noise)
    log_prob, entropy = distribution.log_prob_and_entropy(outputs, action)

    expected = mean + torch.einsum("nf,nfa->na", features, noise * np.exp(-1.0))
    torch.testing.assert_close(action, expected)
    std = (features.square().sum(-1, keepdim=True) * np.exp(-2.0) + 1e-6).sqrt()
    peer = torch.distributions.Normal(mean, std.expand(4, 2))
    torch.testing.assert_close(log_prob, peer.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, peer.entropy().sum(-1))


def test_masked_actions_are_never_drawn_and_do_not_count_in_the_entropy() -> None:
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
    ("distribution", "action", "expected"),
    [
        (Categorical(spaces.Discrete(3, start=-1)), [0, 1, 2], [-1, 0, 1]),
        (CHOICES, [[1, 0, 2], [0, 3, 0]], [[1, 10, 1], [0, 13, -1]]),
        (
            DiagonalGaussian(spaces.Box(np.array([[-1.0, -2.0]]), np.array([[1.0, 2.0]]))),
            [[5.0, -5.0], [0.5, 0.5]],
            [[[1.0, -2.0]], [[0.5, 0.5]]],
        ),
    ],
    ids=["start", "starts", "clipped"],
)
def test_env_actions_are_shifted_clipped_and_shaped_by_hand(
    distribution: Distribution, action: list[Any], expected: list[Any]
) -> None:
    assert distribution.to_env(np.array(action)).tolist() == expected


@pytest.mark.parametrize(
    "distribution",
    [
        Categorical(spaces.Discrete(3, start=-5)),
        MultiCategorical(spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]])),
        MultiCategorical(spaces.MultiBinary(4)),
        MultiCategorical(spaces.MultiBinary((2, 3))),
        DiagonalGaussian(spaces.Box(-1, 1, (2, 2), np.float32)),
        DiagonalGaussian(spaces.Box(-2, 2, (2, 3), np.float64)),
        DiagonalGaussian(spaces.Box(np.array([-np.inf, 0]), np.array([0, np.inf]))),
        DiagonalGaussian(spaces.Box(-3, 3, (4,), np.int32)),
        SquashedGaussian(spaces.Box(np.array([-1.0, 2.0]), np.array([3.0, 2.0]))),
        gsde(every_steps=1),
    ],
    ids=lambda each: f"{type(each).__name__} {each.space}",
)
@pytest.mark.parametrize("is_greedy", [True, False])
@torch.no_grad()
def test_actions_fit_the_space_in_numpy_exports_and_tensor_envs(
    distribution: Any, is_greedy: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    n_features = 3 if distribution.reads_features else 0
    outputs = 4.0 * torch.randn(50, distribution.n_outputs + n_features, generator=generator)
    noise = distribution.draw_noise(1, 50, generator)[0]

    action = distribution.mode(outputs) if is_greedy else distribution.sample(outputs, noise)

    space, expected = distribution.space, distribution.to_env(action.numpy())
    assert action.shape == (50, *distribution.action_shape)
    assert action.dtype == distribution.action_dtype
    assert expected.dtype == space.dtype
    assert all(each in space for each in expected)
    is_integer = np.issubdtype(space.dtype, np.integer)
    exported, tensor = distribution.to_env_tensor(action), distribution.to_torch_env(action)
    assert tensor.dtype == (torch.int64 if is_integer else torch.float32)
    assert exported.shape == tensor.shape == expected.shape
    assert exported[0].numpy().astype(space.dtype) in space
    assert np.allclose(exported.numpy(), expected, rtol=1e-6)
    assert np.allclose(tensor.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("distribution", "shape", "rows"),
    [
        (Categorical(spaces.Discrete(3)), (5, 2), [0, 1, 2, 3, 4]),
        (MultiCategorical(spaces.MultiDiscrete([2, 3])), (5, 2, 2), [0, 1, 2, 3, 4]),
        (DiagonalGaussian(spaces.Box(-1, 1, (2, 2))), (5, 2, 4), [0, 1, 2, 3, 4]),
        (gsde(every_steps=2), (3, 2, 3, 2), [0, 0, 1, 1, 2]),
        (gsde(every_steps=0), (1, 2, 3, 2), [0, 0, 0, 0, 0]),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Distribution) else None,
)
def test_rollout_noise_is_one_draw_of_torch_with_one_row_per_step_or_gsde_interval(
    distribution: Any, shape: tuple[int, ...], rows: list[int]
) -> None:
    draw = torch.randn if distribution.has_normal_noise else torch.rand

    noise = distribution.draw_noise(5, 2, torch.Generator().manual_seed(5))

    assert distribution.noise_shape(5, 2) == shape
    assert torch.equal(noise, draw(shape, generator=torch.Generator().manual_seed(5)))
    assert [distribution.noise_row(t) for t in range(5)] == rows


@pytest.mark.parametrize(
    ("space", "box_policy", "kind"),
    [
        (spaces.Discrete(3), "gaussian", Categorical),
        (spaces.MultiDiscrete([2, 3]), "gaussian", MultiCategorical),
        (spaces.MultiBinary(2), "gaussian", MultiCategorical),
        (spaces.Box(-1, 1, (2,)), "gaussian", DiagonalGaussian),
        (spaces.Box(-1, 1, (2,)), "squashed", SquashedGaussian),
        (spaces.Box(-1, 1, (2,)), "gsde", StateDependentNoise),
    ],
)
def test_space_and_box_policy_decide_the_distribution(
    space: spaces.Space[Any], box_policy: str, kind: type[Distribution]
) -> None:
    assert type(action_distribution(space, 8, PPOConfig(box_policy=box_policy))) is kind


@pytest.mark.parametrize(
    ("space", "options", "words"),
    [
        (spaces.Text(3), {}, "space Text.* is not supported"),
        (spaces.Box(-np.inf, 1, (2,)), {"box_policy": "squashed"}, "is not bounded on every side"),
    ],
)
def test_unsupported_action_space_is_refused(
    space: spaces.Space[object], options: dict[str, str], words: str
) -> None:
    with pytest.raises(ActionSpaceError, match=words):
        action_distribution(space, 8, PPOConfig(**options))


@pytest.mark.parametrize(
    ("low", "high", "log_std_init", "is_said"),
    [
        (-1.0, 1.0, 0.0, False),
        (-1.0, 1.0, -2.0, False),  # as in experiment=half_cheetah_tuned
        (-0.4, 0.4, 0.0, False),
        (-3.0, 3.0, 0.0, False),
        (0.0, 1.0, 0.0, False),
        (-0.1, 0.1, 0.0, True),
        (-0.1, 0.1, -2.3, False),
        (-200.0, 200.0, 0.0, True),
        (-200.0, 200.0, 5.0, False),
        (50.0, 51.0, 0.0, True),
        (7.0, 7.0, 0.0, False),  # cannot be chosen
        (-np.inf, np.inf, 0.0, False),
        (0.0, np.inf, 0.0, False),
    ],
)
def test_bounds_that_do_not_suit_a_gaussian_are_reported(
    low: float, high: float, log_std_init: float, is_said: bool
) -> None:
    space: Any = spaces.Box(*np.array([[low, low], [high, high]], np.float32))

    remark = DiagonalGaussian(space, log_std_init=log_std_init).remark()

    assert (remark is not None) == is_said
    assert remark is None or f"actions go from {low:g} to {high:g}, but" in remark
    if space.is_bounded():
        assert SquashedGaussian(space).remark() is None
    assert Categorical(spaces.Discrete(200)).remark() is None
