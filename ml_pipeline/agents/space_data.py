"""Spaces as plain data, as a checkpoint keeps them, and back."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.protocols import State


def space_to_data(space: gym.Space[Any]) -> State:
    """A space that PPO supports as numbers, strings, lists and dicts."""
    kind = type(space).__name__
    if isinstance(space, spaces.Box):
        bounds = {"low": _short(space.low), "high": _short(space.high)}
        return {"kind": kind, "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": kind, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": kind, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": kind, "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"kind": kind, "parts": {k: space_to_data(part) for k, part in space.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": kind, "parts": [space_to_data(part) for part in space]}
    raise TypeError(f"{space} is no space that PPO supports")


def space_from_data(data: State) -> gym.Space[Any]:
    kind = data["kind"]
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (
            np.broadcast_to(np.array(data[name], dtype=dtype), shape) for name in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["shape"])
    if kind == "Dict":
        return spaces.Dict({k: space_from_data(part) for k, part in data["parts"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_data(part) for part in data["parts"]])
    raise ValueError(f"{kind!r} is no kind of space")


def _short(bound: NDArray[Any]) -> Any:
    """One number where all are the same: an image has thousands."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
