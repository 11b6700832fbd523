"""Product: actions of several parts, as tuples and dicts for the env and as one row inside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.policy.distributions import ActionSpaceError
from ml_pipeline.policy.masks import MaskError, checked_mask, flat_mask, masks_in
from ml_pipeline.policy.product import Product, action_distribution
from ml_pipeline.policy.space_data import named_parts, tree_of

CHOICE, BOX = spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)
PAIR = spaces.Tuple((CHOICE, BOX))
NESTED = spaces.Dict(
    {
        "arm": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.Box(-2, 2, (2, 2), np.float64))),
        "keys": spaces.MultiDiscrete([2, 4], start=[1, 10]),
        "bits": spaces.MultiBinary((2, 2)),
        "steps": spaces.Box(-3, 3, (1,), np.int32),
    }
)


def test_log_prob_and_entropy_are_sums_over_the_parts_by_hand() -> None:
    distribution = action_distribution(PAIR)
    outputs = torch.tensor([[math.log(0.25), math.log(0.75), 0.5, -1.0]])
    action = torch.tensor([[1.0, 0.5, 1.0]])  # choice 1, the mean, 2 deviations above the mean

    log_prob, entropy = distribution.log_prob_and_entropy(outputs, action)

    density = -0.5 * 2.0**2 - math.log(2 * math.pi)
    assert log_prob.item() == pytest.approx(math.log(0.75) + density)
    of_choice = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert entropy.item() == pytest.approx(of_choice + math.log(2 * math.pi * math.e))


def test_each_part_uses_its_own_outputs_and_noise_by_hand() -> None:
    distribution = action_distribution(spaces.Tuple((BOX, CHOICE)))
    outputs = torch.tensor([[0.5, -1.0, 0.0, 0.0]]).expand(2, 4)
    noise = torch.tensor([[1.0, -2.0, 0.4], [0.0, 0.0, 0.6]])

    action = distribution.sample(outputs, noise)

    assert action.tolist() == [[1.5, -3.0, 0.0], [0.5, -1.0, 1.0]]
    box, choice = distribution.to_env(action.detach().numpy())
    assert box.tolist() == [[1.0, -1.0], [0.5, -1.0]]
    assert choice.tolist() == [0, 1]
    assert choice.dtype == np.int64


@pytest.mark.parametrize("box_policy", ["gaussian", "squashed"])
@torch.no_grad()
def test_nested_actions_fit_the_space_in_numpy_exports_and_tensor_envs(box_policy: str) -> None:
    distribution: Any = action_distribution(NESTED, 8, PPOConfig(box_policy=box_policy))
    generator = torch.Generator().manual_seed(1)
    outputs = 4.0 * torch.randn(50, distribution.n_outputs, generator=generator)

    action = distribution.sample(outputs, distribution.draw_noise(1, 50, generator)[0])

    assert action.shape == (50, *distribution.action_shape) == (50, 1 + 4 + 2 + 4 + 1)
    assert action.dtype == distribution.action_dtype == torch.float32
    for row in range(50):
        own = distribution.to_env(action[row : row + 1].numpy())
        assert tree_of(NESTED, "", lambda name, _, own=own: named_parts(own, "")[name][0]) in NESTED
    expected = named_parts(distribution.to_env(action.numpy()), "")
    for tree in (distribution.to_env_tensor(action), distribution.to_torch_env(action)):
        leaves = named_parts(tree, "")
        assert leaves.keys() == expected.keys()
        for name, leaf in leaves.items():
            is_integer = np.issubdtype(expected[name].dtype, np.integer)
            assert leaf.is_floating_point() != is_integer
            assert np.allclose(leaf.numpy(), expected[name], rtol=1e-6, atol=1e-6)


def test_largest_choice_survives_storage_beside_floats() -> None:
    n = 2**24
    space = spaces.Tuple((spaces.Discrete(n), BOX))
    parts = [action_distribution(part) for part in space]

    choice, _ = Product(space, parts).to_env(np.array([[n - 1, 0.5, 0.5]], dtype=np.float32))

    assert choice.tolist() == [n - 1]


@pytest.mark.parametrize("part", [CHOICE, BOX, spaces.MultiDiscrete([2, 3])])
@torch.no_grad()
def test_one_part_equals_its_own_distribution_bit_for_bit(part: Any) -> None:
    alone, product = action_distribution(part), action_distribution(spaces.Tuple((part,)))
    outputs = torch.randn(6, alone.n_outputs, generator=torch.Generator().manual_seed(2))
    noises = [each.draw_noise(3, 6, torch.Generator().manual_seed(5)) for each in (alone, product)]

    own = alone.sample(outputs, noises[0][1])
    action = product.sample(outputs, noises[1][1])

    assert torch.equal(action.flatten(), own.flatten())
    assert action.dtype == own.dtype
    for ours, theirs in zip(
        product.log_prob_and_entropy(outputs, action),
        alone.log_prob_and_entropy(outputs, own),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert np.array_equal(product.to_env(action.numpy())[0], alone.to_env(own.numpy()))


def test_noise_is_uniform_for_choices_and_normal_for_boxes() -> None:
    distribution = action_distribution(spaces.Tuple((PAIR, CHOICE)))

    noise = distribution.draw_noise(1_000, 2, torch.Generator().manual_seed(1))

    assert noise.shape == distribution.noise_shape(1_000, 2) == (1_000, 2, 4)
    columns = noise.flatten(0, 1).T
    for column in (0, 3):
        assert 0.0 <= columns[column].min() < 0.01
        assert 0.99 < columns[column].max() < 1.0
    assert columns[1:3].min() < -2.0
    correlation = torch.corrcoef(columns) - torch.eye(4)
    assert correlation.abs().max() < 0.1


# Gymnasium sorts the keys: arm, bits, keys, steps.
MASK = [False, True, True] + [True] * 8 + [True, False] + [False, True, True, True]
IN_PARTS = {
    "arm": (np.array([0, 1, 1]), None),
    "keys": (np.array([1, 0]), np.array([0, 1, 1, 1])),
    "bits": np.ones(8),
}


@pytest.mark.parametrize(
    ("mask", "space", "expected"),
    [
        (IN_PARTS, NESTED, MASK),
        (np.array(MASK), NESTED, MASK),
        ((np.array([0, 1]), None), PAIR, [False, True]),
    ],
)
def test_mask_has_the_form_of_the_space_or_is_one_array(
    mask: Any, space: Any, expected: list[bool]
) -> None:
    assert flat_mask(mask, space).tolist() == expected
    found = masks_in({"action_mask": [mask] * 2}, space)
    assert found is not None
    assert found.tolist() == [expected] * 2


def test_masks_that_gymnasium_has_joined_are_read() -> None:
    joined: dict[str, Any] = {"_bits": np.ones(2, dtype=bool), "bits": np.ones((2, 8))}
    for name in ("arm", "keys"):
        joined[name] = np.empty(2, dtype=object)
        joined[name][:] = [IN_PARTS[name]] * 2

    found = masks_in({"action_mask": joined, "_action_mask": np.ones(2, dtype=bool)}, NESTED)

    assert found is not None
    assert found.tolist() == [MASK] * 2


def test_forbidden_choices_of_any_part_are_never_drawn() -> None:
    distribution: Any = action_distribution(NESTED)
    mask = torch.tensor([MASK]).expand(500, -1)
    outputs = distribution.masked(torch.zeros(500, distribution.n_outputs), mask)
    noise = distribution.draw_noise(1, 500, torch.Generator().manual_seed(1))[0]

    drawn = distribution.to_env(distribution.sample(outputs, noise).detach().numpy())
    _, entropy = distribution.log_prob_and_entropy(outputs, distribution.mode(outputs))

    assert set(drawn["arm"][0].tolist()) == {0, 1}
    assert set(drawn["keys"][:, 0].tolist()) == {1}
    assert set(drawn["keys"][:, 1].tolist()) == {11, 12, 13}
    assert outputs[:, 3:7].eq(0.0).all()  # the means of the arm's Box, which is not masked
    choices = math.log(2) + math.log(3) + 4 * math.log(2)
    gaussians = 5 * 0.5 * math.log(2 * math.pi * math.e)
    assert entropy[0].item() == pytest.approx(choices + gaussians, rel=1e-5)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.array([[1, 1], [0, 0]]), "of env 1 allows no action"),
        (np.ones((2, 3)), r"must have 2 entries, got shape \(3,\)"),
    ],
)
def test_wrong_mask_of_a_part_is_refused(mask: Any, words: str) -> None:
    with pytest.raises(MaskError, match=words):
        checked_mask(mask.astype(bool), action_distribution(PAIR))


def test_mask_as_a_dict_needs_a_dict_space() -> None:
    with pytest.raises(MaskError, match=r"an action mask for Discrete\(2\) must be an array"):
        flat_mask({"a": np.ones(2)}, CHOICE)


def test_no_actions_have_the_form_of_the_space() -> None:
    nothing: Any = action_distribution(NESTED).no_actions()

    assert list(nothing) == list(NESTED)
    assert [each.shape for each in nothing["arm"]] == [(0,), (0, 2, 2)]


@pytest.mark.parametrize(
    ("space", "options", "words"),
    [
        (spaces.Tuple(()), {}, r"action space Tuple\(\) is not supported"),
        (spaces.Dict({"a": spaces.Text(2)}), {}, r"Text.* is not supported; use Discrete"),
        (PAIR, {"box_policy": "gsde"}, "box_policy=gsde: needs Box actions"),
        (
            spaces.Tuple((CHOICE, spaces.Box(-np.inf, 1, (2,)))),
            {"box_policy": "squashed"},
            "is not bounded on every side",
        ),
    ],
)
def test_unsupported_parts_are_refused(space: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ActionSpaceError, match=words):
        action_distribution(space, 8, PPOConfig(**options))


def test_remark_names_the_part() -> None:
    space = spaces.Dict({"lane": CHOICE, "torque": spaces.Box(-200, 200, (1,), np.float32)})

    remark = action_distribution(space).remark()

    assert remark is not None
    assert remark.startswith("part 'torque': actions go from -200 to 200, but")
    assert action_distribution(PAIR).remark() is None


def test_two_parts_of_one_path_are_refused() -> None:
    space: Any = spaces.Dict({"a/b": CHOICE, "a": spaces.Dict({"b": CHOICE})})

    with pytest.raises(ValueError, match="two parts of action have the same path; rename a key"):
        named_parts(space, "action")
