"""Observations of every supported space, from the env to the input of a network."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from ml_pipeline.policy.observations import (
    ObservationReader,
    ObservationSpaceError,
    Preprocess,
    is_image,
)

CPU = torch.device("cpu")
VECTOR = spaces.Box(-1, 1, (1,))
MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 6, 3), np.uint8),
        "arm": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=5))),
        "a/b": spaces.MultiDiscrete([2, 3]),
        "flags": spaces.MultiBinary((2, 2)),
    }
)


def preprocess_of(space: spaces.Space[Any], **options: Any) -> Preprocess:
    return Preprocess(ObservationReader(space), **{"ignored": None, "clip": None, **options})


def network_input(space: spaces.Space[Any], preprocess: Preprocess, batch: Any) -> Any:
    reader = ObservationReader(space)
    return preprocess(reader.to_tensors(reader.read(batch), CPU))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-1, 1, (2, 3, 4), np.float64),
        spaces.Box(0, 60_000, (2,), np.uint16),
        spaces.Box(-5, 5, (2,), np.int32),
        spaces.Box(0, 1, (3,), np.bool_),
        spaces.Discrete(4),
        spaces.MultiDiscrete([[2, 3], [4, 2]]),
        spaces.MultiBinary(3),
        spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
        MIXED,
    ],
    ids=str,
)
def test_network_gets_floats_that_match_its_observation_space(space: spaces.Space[Any]) -> None:
    preprocess = preprocess_of(space)
    batch = batch_space(space, 4)
    batch.seed(1)

    obs = network_input(space, preprocess, batch.sample())

    leaves = obs if isinstance(obs, dict) else {"": obs}
    boxes = preprocess.space.spaces if isinstance(obs, dict) else {"": preprocess.space}
    assert leaves.keys() == boxes.keys()
    for name, leaf in leaves.items():
        assert leaf.dtype == torch.float32
        assert leaf.shape == (4, *boxes[name].shape)


def test_leaves_are_named_by_their_paths_and_keep_their_values() -> None:
    one = {
        "camera": np.full((1, 8, 6, 3), 51, dtype=np.uint8),
        "arm": (np.array([[0.25, -0.5]]), np.array([6])),
        "a/b": np.array([[1, 2]]),
        "flags": np.array([[[0, 1], [1, 0]]], dtype=np.int8),
    }

    obs = network_input(MIXED, preprocess_of(MIXED), one)

    dtypes = ObservationReader(MIXED).dtypes
    assert set(obs) == set(dtypes) == {"camera", "arm/0", "arm/1", "a/b", "flags"}
    assert (dtypes["camera"], dtypes["arm/0"]) == (np.uint8, np.float32)  # as stored
    assert obs["camera"].unique().tolist() == pytest.approx([0.2])
    assert obs["arm/0"].tolist() == [[0.25, -0.5]]
    assert obs["arm/1"].tolist() == [[0.0, 1.0, 0.0]]  # 6 is the second of 5, 6, 7
    assert obs["a/b"].tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]
    assert obs["flags"].tolist() == [[[0.0, 1.0], [1.0, 0.0]]]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(3), r"space Text\(1, 3.* is not supported"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), r"Sequence.* at 'a' is not"),
        (spaces.Dict({}), "is empty"),
        (spaces.Box(0, 1, (0,)), "has size 0"),
        (spaces.Dict({"a/b": VECTOR, "a": spaces.Dict({"b": VECTOR})}), "have the same path"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_unsupported_observation_space_is_refused(space: spaces.Space[Any], words: str) -> None:
    with pytest.raises(ObservationSpaceError, match=words):
        ObservationReader(space)


def test_observations_are_normalised_by_the_moments_of_all_rollouts_and_clipped() -> None:
    preprocess = preprocess_of(spaces.Box(-1e6, 1e6, (3,), np.float32), clip=2.0)
    data = 50.0 + 3.0 * torch.randn(400, 3, generator=torch.Generator().manual_seed(1))

    for part in data.split([10, 150, 240]):
        preprocess.learn_moments(part)
    obs = preprocess(data)

    expected = (data - data.mean(0)) / data.std(0, correction=0)
    torch.testing.assert_close(obs, expected.clamp(-2.0, 2.0), atol=1e-4, rtol=0)
    assert obs.abs().max() == 2.0


def test_only_boxes_of_numbers_are_normalised() -> None:
    preprocess = preprocess_of(MIXED, clip=10.0)

    assert preprocess.moments_of("arm/0") is not None
    assert all(preprocess.moments_of(name) is None for name in ("camera", "arm/1", "a/b", "flags"))


def test_rollout_with_a_nan_does_not_change_the_moments() -> None:
    preprocess = preprocess_of(VECTOR, clip=2.0)
    preprocess.learn_moments(torch.tensor([[1.0], [3.0]]))

    preprocess.learn_moments(torch.tensor([[torch.nan], [3.0]]))

    moments = preprocess.moments_of("")
    assert moments is not None
    assert (moments.mean.item(), moments.count.item()) == (2.0, 2.0)


def test_learning_moments_does_not_read_a_value_back_from_the_device() -> None:
    preprocess = preprocess_of(VECTOR, clip=2.0)

    preprocess.to("meta").learn_moments(torch.zeros(5, 1, device="meta"))  # has no values


SYMBOLS = np.broadcast_to(np.array([10, 5, 3], np.uint8), (7, 7, 3))


def symbol_space(high: Any, shape: Any = None) -> spaces.Box:
    return spaces.Box(np.zeros_like(high), high, shape, np.uint8)


def prepared(space: spaces.Box, obs: Any) -> torch.Tensor:
    result = network_input(space, preprocess_of(space, clip=10.0), obs[None])
    assert isinstance(result, torch.Tensor)
    return result[0]


def test_image_with_a_bound_for_each_channel_is_divided_by_these_bounds() -> None:
    obs = np.zeros((7, 7, 3), np.uint8)
    obs[2, 3] = 8, 5, 1

    image = prepared(symbol_space(SYMBOLS.copy()), obs)
    first = prepared(symbol_space(SYMBOLS.transpose(2, 0, 1).copy()), obs.transpose(2, 0, 1))

    assert image[2, 3].tolist() == pytest.approx([0.8, 1.0, 1 / 3])
    assert image.sum() == image[2, 3].sum()
    assert torch.equal(first.permute(1, 2, 0), image)


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (np.full((7, 7, 3), 255, np.uint8), 4 / 255),  # pixels
        (np.full((7, 7, 3), 4, np.uint8), 4.0),  # one bound: numbers, as they are
        (np.full((9,), 10, np.uint8), 4.0),
        (np.arange(1, 148, dtype=np.uint8).reshape(7, 7, 3), 4.0),  # not by channel
    ],
)
def test_other_bytes_are_pixels_only_with_bounds_of_0_and_255(high: Any, expected: float) -> None:
    obs = np.minimum(np.full_like(high, 4), high)

    assert float(prepared(symbol_space(high), obs).max()) == pytest.approx(expected)


def test_bounds_of_symbols_are_in_no_state_and_in_copies() -> None:
    preprocess = preprocess_of(symbol_space(SYMBOLS.copy()))
    obs = torch.full((1, 7, 7, 3), 3, dtype=torch.uint8)

    assert preprocess.state_dict() == {}
    assert torch.equal(copy.deepcopy(preprocess)(obs), preprocess(obs))
    assert is_image(preprocess.leaves[""])
    assert preprocess.space == spaces.Box(0.0, 1.0, (7, 7, 3))
