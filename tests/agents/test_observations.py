"""Observations of every supported space, from an env's hands to a network's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from ml_pipeline.agents.observations import (
    ObservationReader,
    ObservationSpaceError,
    Preprocess,
)

CPU = torch.device("cpu")
MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 6, 3), np.uint8),
        "arm": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=5))),
        "a/b": spaces.MultiDiscrete([2, 3]),
        "flags": spaces.MultiBinary((2, 2)),
    }
)


def seen(space: spaces.Space[Any], n_envs: int = 4, **options: Any) -> tuple[Any, Preprocess]:
    """A batch of samples as a network gets them."""
    reader = ObservationReader(space)
    preprocess = Preprocess(reader, **{"ignored": None, "clip": None, **options})
    batch = batch_space(space, n_envs)
    batch.seed(1)
    return preprocess(reader.to_tensors(reader.read(batch.sample()), CPU)), preprocess


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
def test_a_network_sees_floats_of_the_space_it_was_told(space: spaces.Space[Any]) -> None:
    obs, preprocess = seen(space)

    leaves = obs if isinstance(obs, dict) else {"": obs}
    told = preprocess.space.spaces if isinstance(obs, dict) else {"": preprocess.space}
    assert leaves.keys() == told.keys()
    for name, leaf in leaves.items():
        assert leaf.dtype == torch.float32
        assert leaf.shape == (4, *told[name].shape)


def test_leaves_are_named_by_their_paths_and_hold_their_numbers() -> None:
    reader = ObservationReader(MIXED)
    one = {
        "camera": np.full((1, 8, 6, 3), 51, dtype=np.uint8),
        "arm": (np.array([[0.25, -0.5]]), np.array([6])),
        "a/b": np.array([[1, 2]]),
        "flags": np.array([[[0, 1], [1, 0]]], dtype=np.int8),
    }

    obs = Preprocess(reader, ignored=None, clip=None)(reader.to_tensors(reader.read(one), CPU))

    assert set(obs) == {"camera", "arm/0", "arm/1", "a/b", "flags"}
    assert obs["camera"].unique().tolist() == pytest.approx([0.2])
    assert obs["arm/0"].tolist() == [[0.25, -0.5]]
    assert obs["arm/1"].tolist() == [[0.0, 1.0, 0.0]]  # 6 is the second of 5, 6, 7
    assert obs["a/b"].tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]
    assert obs["flags"].tolist() == [[[0.0, 1.0], [1.0, 0.0]]]


def test_images_are_stored_as_bytes() -> None:
    reader = ObservationReader(MIXED)

    assert reader.dtypes["camera"] == np.uint8
    assert reader.dtypes["arm/0"] == np.float32


def test_a_leaf_can_be_kept_from_the_network() -> None:
    obs, preprocess = seen(MIXED, ignored="flags")

    assert "flags" not in obs
    assert "flags" not in preprocess.space.spaces


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(3), r"this env has Text\(1, 3"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), r"this env has Sequence.* 'a'"),
        (spaces.Dict({}), "it is empty"),
        (spaces.Box(0, 1, (0,)), "holds no numbers"),
    ],
)
def test_a_space_that_cannot_be_read_is_named(space: spaces.Space[Any], words: str) -> None:
    with pytest.raises(ObservationSpaceError, match=words):
        ObservationReader(space)


def test_running_moments_are_those_of_all_that_was_taken_in() -> None:
    reader = ObservationReader(spaces.Box(-1e6, 1e6, (3,), np.float32))
    preprocess = Preprocess(reader, ignored=None, clip=2.0)
    data = 50.0 + 3.0 * torch.randn(400, 3, generator=torch.Generator().manual_seed(1))

    for part in data.split([10, 150, 240]):
        preprocess.learn_moments(part)
    obs = preprocess(data)

    expected = (data - data.mean(0)) / data.std(0, correction=0)
    torch.testing.assert_close(obs, expected.clamp(-2.0, 2.0), atol=1e-4, rtol=0)
    assert obs.abs().max() == 2.0


def test_only_boxes_of_numbers_are_normalised() -> None:
    _, preprocess = seen(MIXED, clip=10.0)

    assert preprocess.moments_of("arm/0") is not None
    assert all(preprocess.moments_of(name) is None for name in ("camera", "arm/1", "a/b", "flags"))


def test_a_rollout_with_a_nan_leaves_no_trace_in_the_moments() -> None:
    preprocess = Preprocess(ObservationReader(spaces.Box(-1, 1, (1,))), ignored=None, clip=2.0)
    preprocess.learn_moments(torch.tensor([[1.0], [3.0]]))

    preprocess.learn_moments(torch.tensor([[torch.nan], [3.0]]))

    moments = preprocess.moments_of("")
    assert moments is not None
    assert (moments.mean.item(), moments.count.item()) == (2.0, 2.0)


def test_taking_moments_in_does_not_ask_the_device_for_a_number() -> None:
    preprocess = Preprocess(ObservationReader(spaces.Box(-1, 1, (3,))), ignored=None, clip=2.0)

    preprocess.to("meta").learn_moments(torch.zeros(5, 3, device="meta"))  # it holds no numbers
