"""Spaces of two-player envs: from one player to both and back."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from ml_pipeline.games.two_players import both_spaces, player_space


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (4,)),
        spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32)),
        spaces.Box(0, 255, (3, 8, 8), np.uint8),
        spaces.Discrete(8),
    ],
)
def test_player_space_undoes_both_spaces(space):
    assert player_space(both_spaces(space)) == space


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (3, 4)),
        spaces.Box(np.array([[-1.0], [-2.0]], np.float32), np.ones((2, 1), np.float32)),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiDiscrete([3, 3, 3]),
        spaces.Discrete(2),
    ],
)
def test_spaces_without_two_equal_players_are_refused(space):
    with pytest.raises(ValueError, match="not the space of two equal players"):
        player_space(space)


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=1), spaces.MultiBinary(3)])
def test_players_with_other_spaces_are_refused(space):
    with pytest.raises(ValueError, match="needs a Box, or a Discrete"):
        both_spaces(space)
