"""The spaces of two-player envs, whose observations and actions have a leading axis of two.

Row 0 is what player 0 sees and does, row 1 the same for player 1, each from its own point of view.
The reward is that of player 0; ``info["winner"]`` of the last step is 1, 0 or -1 for player 0.
An env with the keyword ``discrete`` has ``moves`` [n, *act]: the action that each of n stands for.
"""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

N_PLAYERS = 2

Array = NDArray[np.generic]  # observations or actions, of any dtype
Space = gym.Space[Any]
Info = dict[str, Any]  # of an env: it may hold anything


class Scripted(Protocol):
    """A player without a network; the class of a two-player env names its own in ``scripted``."""

    def act_batch(self, obs: Array, deterministic: bool = True) -> Array: ...


def both_spaces(space: Space) -> Space:
    """The space of both players, from that of one."""
    if isinstance(space, spaces.Box):
        low, high = (np.stack([bound] * N_PLAYERS) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype)
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return spaces.MultiDiscrete([space.n] * N_PLAYERS)
    raise ValueError(f"{space}: a player of two needs a Box, or a Discrete that starts at 0")


def player_space(space: Space) -> Space:
    """The space of one player, from that of both."""
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
        if _are_equal(low) and _are_equal(high):
            return spaces.Box(low[0], high[0], dtype=space.dtype)
    if isinstance(space, spaces.MultiDiscrete) and _are_equal(space.nvec):
        return spaces.Discrete(int(space.nvec[0]))
    raise ValueError(
        f"{space} is not the space of two equal players; a two-player env has a Box of shape "
        "(2, ...) with equal rows, or a MultiDiscrete([n, n])"
    )


def _are_equal(rows: NDArray[np.generic]) -> bool:
    """Whether there are two rows, and they are equal."""
    return rows.shape[:1] == (N_PLAYERS,) and bool(np.array_equal(rows[0], rows[1]))
