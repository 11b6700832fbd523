"""EpisodeStats: raw return and length of each finished episode, over all envs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.protocols import Episode


class EpisodeStats:
    """Adds up rewards per env and gives out an ``Episode`` for each env that is done."""

    def __init__(self, n_envs: int) -> None:
        self._return = np.zeros(n_envs, dtype=np.float64)
        self._length = np.zeros(n_envs, dtype=np.int64)

    def resize(self, n_envs: int) -> None:
        """Forget the last envs, or begin with new ones at the end."""
        kept = min(n_envs, len(self._return))
        before = self._return[:kept], self._length[:kept]
        self._return, self._length = np.zeros(n_envs), np.zeros(n_envs, dtype=np.int64)
        self._return[:kept], self._length[:kept] = before

    def step(self, reward: NDArray[Any], done: NDArray[np.bool_]) -> list[Episode]:
        """Episodes that ended in this step, in the order of the envs."""
        self._return += reward
        self._length += 1
        if not done.any():
            return []
        finished = [
            Episode(float(self._return[i]), int(self._length[i])) for i in np.flatnonzero(done)
        ]
        self._return[done] = 0.0
        self._length[done] = 0
        return finished
