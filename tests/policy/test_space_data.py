"""Spaces as plain data: equal for equal spaces only, short, and readable again."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from ml_pipeline.policy.space_data import (
    check_spaces,
    space_from_data,
    space_to_data,
    without_infinities,
)


class MyBox(spaces.Box):
    """A subclass that a user might write."""


SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(-1, 1, (2, 3), np.float32),
    spaces.Box(np.array([-np.inf, 0]), np.array([1, np.inf]), dtype=np.float32),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    MyBox(-1, 1, (), np.float32),
    spaces.Discrete(4, start=-1),
    spaces.Discrete(4),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple((spaces.Box(0, 1, (1,)),))}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_data_is_plain_short_and_equal_for_equal_spaces_only(space: spaces.Space[Any]) -> None:
    data = space_to_data(space)

    assert space_to_data(deepcopy(space)) == data
    assert json.loads(json.dumps(data)) == data
    assert len(json.dumps(data)) < 500  # also for an image
    assert [each for each in SPACES if space_to_data(each) == data] == [space]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_space_is_restored_from_strict_json(space: spaces.Space[Any]) -> None:
    text = json.dumps(without_infinities(space_to_data(space)), allow_nan=False)

    back = space_from_data(json.loads(text))

    assert space_to_data(back) == space_to_data(space)
    assert isinstance(space, MyBox) or back == space


def test_unsupported_space_is_refused() -> None:
    with pytest.raises(TypeError, match="is not supported"):
        space_to_data(spaces.Text(3))


def test_the_order_of_dict_keys_is_kept_and_checked() -> None:
    parts: list[tuple[str, Any]] = [("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))]
    space, swapped = spaces.Dict(parts), spaces.Dict(parts[::-1])
    saved = {"observation_space": space_to_data(spaces.Tuple([space]))}

    assert list(space_from_data(space_to_data(space))) == ["b", "a"]
    check_spaces({"observation_space": spaces.Tuple([space])}, saved)
    with pytest.raises(ValueError, match=r"were \[\['b', 'a'\]\] when saved, and are \[\['a'"):
        check_spaces({"observation_space": spaces.Tuple([swapped])}, saved)
