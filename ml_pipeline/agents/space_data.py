"""Spaces as plain data, as a checkpoint keeps them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.protocols import State


def space_to_data(space: gym.Space[Any]) -> State:
    """A space that PPO supports as numbers, strings, lists and dicts; equal for equal spaces."""
    if isinstance(space, spaces.Box):
        bounds = {"low": _short(space.low), "high": _short(space.high)}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        start = space.start.tolist()
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": start}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": {k: space_to_data(part) for k, part in space.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [space_to_data(part) for part in space]}
    raise TypeError(f"{space} is no space that PPO supports")


def _short(bound: NDArray[Any]) -> Any:
    """One number where all are the same: an image has thousands."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
