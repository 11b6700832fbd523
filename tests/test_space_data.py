"""Spaces as plain data: every space that PPO supports comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from ml_pipeline.agents.space_data import space_from_data, space_to_data


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Box(np.array([-np.inf, 0]), np.array([1, np.inf]), dtype=np.float32),
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Discrete(4, start=-1),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        spaces.MultiBinary((2, 3)),
        spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple((spaces.Box(0, 1, (1,)),))}),
    ],
    ids=str,
)
def test_a_space_comes_back_as_it_was(space: spaces.Space[Any]) -> None:
    data = space_to_data(space)

    assert space_from_data(data) == space
    assert len(json.dumps(data)) < 500  # plain, and short for an image


def test_a_space_that_ppo_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="no space that PPO supports"):
        space_to_data(spaces.Text(3))
    with pytest.raises(ValueError, match="'Text' is no kind of space"):
        space_from_data({"kind": "Text"})
