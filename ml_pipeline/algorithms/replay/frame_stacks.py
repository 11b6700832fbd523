"""FrameStacks: lets a replay buffer store each frame of stacked observations once.

A stack holds the newest frame and those of the steps before it, in its first dimension. Row t
stores its newest frame only; the others are the newest frames of rows t - 1, t - 2 and so on. At
the start of an episode a stack repeats its first frame, as ``FrameStackObservation`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.training.checks import TrainingError

_FIX = "agent.stacked_frames=1 stores whole observations"


class FrameStacks:
    """Which leaves are stacks of ``n_frames``, and how a ring of rows stores them."""

    def __init__(self, n_frames: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``n_frames`` 1: no leaf is a stack. ``shapes`` are those of the observations."""
        self.n_frames = n_frames
        self.names = {
            name
            for name, shape in shapes.items()
            if n_frames > 1 and len(shape) > 1 and shape[0] == n_frames
        }
        if n_frames > 1 and not self.names:
            found = ", ".join(str(list(shape)) for shape in shapes.values())
            raise TrainingError(
                f"agent.stacked_frames={n_frames}: no observation is a stack of {n_frames} frames, "
                f"the shapes are {found}; {_FIX}"
            )
        self._current: dict[str, NDArray[Any]] = {}

    def stored_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[1:] if name in self.names else shape

    def newest(self, name: str, leaf: NDArray[Any]) -> NDArray[Any]:
        """What a row stores of a leaf, [n_envs, *shape]."""
        return leaf[:, -1] if name in self.names else leaf

    def check(self, leaves: Mapping[str, NDArray[Any]], start: NDArray[Any] | None) -> None:
        """Refuse stacks that could not be restored from their newest frames.

        ``start``: which envs begin an episode, [n_envs]; None if the rows before are not known.
        """
        for name in self.names:
            leaf = leaves[name]
            if start is not None:
                before = self._current.get(name, leaf)
                expected = before[:, 1:]
                if start.any():
                    is_start = start.reshape(-1, *[1] * (leaf.ndim - 1))
                    expected = np.where(is_start, leaf[:, -1:], expected)
                if not np.array_equal(leaf[:, :-1], expected):
                    differs = (leaf[:, :-1] != expected).reshape(len(leaf), -1).any(axis=1)
                    env = int(differs.argmax())
                    raise TrainingError(self._misfit(name, env, is_start=bool(start[env])))
            self._current[name] = leaf.copy()  # a vector env may use its arrays again

    def _misfit(self, name: str, env: int, *, is_start: bool) -> str:
        which = f" {name!r}" if name else ""
        fact = (
            "does not repeat its first frame at the start of an episode"
            if is_start
            else "does not continue that of the step before"
        )
        return (
            f"agent.stacked_frames={self.n_frames}: the observation{which} of env {env} {fact}; "
            f"{_FIX}"
        )

    def rows(self, index: Any, done: Any, n_envs: int) -> Any:
        """Indices of the frames in the stacks of ``index`` [B], oldest first: [B, n_frames].

        Arguments are arrays, or tensors of one device.
        """
        library: Any = torch if isinstance(index, Tensor) else np
        rows = [index]
        for _ in range(self.n_frames - 1):
            before = (rows[-1] - n_envs) % len(done)
            rows.append(library.where(done[before], rows[-1], before))
        return library.stack(rows[::-1], 1)
