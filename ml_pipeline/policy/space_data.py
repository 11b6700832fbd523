"""Spaces as plain data, for checkpoints and exported policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.records import StateDict


def space_to_data(space: gym.Space[Any]) -> StateDict:
    """A supported space as numbers, strings, lists and dicts; equal for equal spaces."""
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
    raise TypeError(f"space {space} is not supported")


def space_from_data(data: StateDict) -> gym.Space[Any]:
    """Inverse of ``space_to_data``; also reads the output of ``without_infinities``."""
    kind = data["kind"]
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (
            np.broadcast_to(np.asarray(data[bound], dtype=dtype), shape)
            for bound in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], start=data["start"])
    if kind == "MultiBinary":
        shape = data["shape"]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "Dict":
        # Pairs keep their order; Gymnasium sorts a dict.
        return spaces.Dict([(name, space_from_data(part)) for name, part in data["parts"].items()])
    if kind == "Tuple":
        return spaces.Tuple([space_from_data(part) for part in data["parts"]])
    raise ValueError(f"space of kind {kind!r} is not supported")


def named_parts(tree: Any, name: str) -> dict[str, Any]:
    """The leaves of a dict or tuple, or of a Dict or Tuple space, by path: "action/arm/0"."""
    if isinstance(tree, (Mapping, tuple, spaces.Tuple)):
        parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        found = [named_parts(part, f"{name}/{key}") for key, part in parts]
        joined = {path: leaf for part in found for path, leaf in part.items()}
        if len(joined) < sum(map(len, found)):
            raise ValueError(f"two parts of {name} have the same path; rename a key")
        return joined
    return {name: tree}


def tree_of(space: gym.Space[Any], name: str, leaf: Callable[[str, gym.Space[Any]], Any]) -> Any:
    """The value of a space, from a function of the path and the space of each leaf."""
    if isinstance(space, spaces.Dict):
        return {key: tree_of(part, f"{name}/{key}", leaf) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(tree_of(part, f"{name}/{key}", leaf) for key, part in enumerate(space))
    return leaf(name, space)


def check_spaces(own: Mapping[str, gym.Space[Any]], saved: Mapping[str, Any]) -> None:
    """Refuse the state of an agent for other spaces."""
    for name, space in own.items():
        data = space_to_data(space)
        if saved[name] != data:
            raise ValueError(f"{name} was {saved[name]} when saved, and is {data} now")
        before, now = _keys_of(saved[name]), _keys_of(data)
        if before != now:  # a network reads the leaves in their order
            raise ValueError(
                f"the keys of {name} were {before} when saved, and are {now}; restore their order"
            )


def _keys_of(data: StateDict) -> list[Any]:
    """The keys of all Dict spaces, in their order."""
    parts = data.get("parts", [])
    if not isinstance(parts, dict):
        return [keys for part in parts if (keys := _keys_of(part))]
    inner = {name: _keys_of(part) for name, part in parts.items()}
    return [[name, keys] if keys else name for name, keys in inner.items()]


def without_infinities(data: Any) -> Any:
    """Plain data with infinities as "inf" and "-inf", because JSON has no infinities."""
    if isinstance(data, dict):
        return {name: without_infinities(part) for name, part in data.items()}
    if isinstance(data, list):
        return [without_infinities(part) for part in data]
    return str(data) if isinstance(data, float) and math.isinf(data) else data


def _short(bound: NDArray[Any]) -> Any:
    """One number if all are equal: an image has thousands."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound.tolist()
