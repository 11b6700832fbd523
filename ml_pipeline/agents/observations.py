"""Observations: from what an env gives to what is stored, and on to what a network takes.

Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these. A single observation is a
tensor; a Dict or Tuple is flattened to a dict with one tensor per leaf, named by its path:
"camera", "arm/angle", "0". Integers and images are stored as they are, and turned into floats
only by ``Preprocess``, in front of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Obs

# What is stored as it comes; all else, float64 among it, as float32: MPS has no float64.
_KEPT_DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_, np.float32)


class ObservationSpaceError(UserError):
    """An observation space that the agent cannot read."""


class ObservationError(UserError):
    """An observation that is not of its space; ``index`` is its place in the batch."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def map_obs(function: Callable[[Tensor], Tensor], obs: Obs) -> Obs:
    """``function`` of the observation, or of each of its leaves."""
    if isinstance(obs, Tensor):
        return function(obs)
    return {name: function(leaf) for name, leaf in obs.items()}


class ObservationReader:
    """Takes apart a batch of observations as a vector env hands it out."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.is_single = not isinstance(space, (spaces.Dict, spaces.Tuple))
        found = list(_leaves_of(space, ()))
        self._paths = {"/".join(map(str, path)): path for path, _ in found}
        if len(self._paths) < len(found):
            raise ObservationSpaceError(f"two leaves of {space} have the same path; rename a key")
        # By path; "" if single.
        self.leaves = dict(zip(self._paths, (leaf for _, leaf in found), strict=True))
        self.dtypes = {name: _stored_dtype(leaf) for name, leaf in self.leaves.items()}
        self.shapes = {name: leaf.shape or () for name, leaf in self.leaves.items()}
        self._bounds = {
            name: bounds
            for name, leaf in self.leaves.items()
            if (bounds := _bounds_of(leaf)) is not None
        }

    def read(self, obs: Any) -> dict[str, NDArray[Any]]:
        """[n_envs, ...] arrays by leaf, of the dtypes that are stored."""
        if self.is_single:
            leaves = {"": np.asarray(obs, dtype=self.dtypes[""])}
        else:
            leaves = {
                name: np.asarray(reduce(getitem, path, obs), dtype=self.dtypes[name])
                for name, path in self._paths.items()
            }
        self.check_bounds(leaves)
        return leaves

    def check_bounds(self, leaves: dict[str, NDArray[Any]]) -> None:
        """Refuse what has no place in a one-hot vector."""
        for name, (low, high) in self._bounds.items():
            outside = (leaves[name] < low) | (leaves[name] >= high)
            if outside.any():
                index = int(np.argwhere(np.atleast_1d(outside))[0, 0])
                value, which = leaves[name][outside].flat[0], f" {name!r}" if name else ""
                raise ObservationError(
                    f"an observation{which} holds {value}, which is outside of {self.leaves[name]}",
                    index,
                )

    def to_tensors(self, leaves: dict[str, NDArray[Any]], device: torch.device) -> Obs:
        """What ``read`` gave, on the device; on the CPU the memory is shared.

        Nothing waits for a copy out of pinned memory, which must stay as it is until it is used.
        """
        pinned = device.type == "cuda"  # if it is not, CUDA waits by itself, and MPS does not
        tensors = {
            # Contiguous: torch takes no array that runs backwards, as flipped images do.
            name: torch.from_numpy(np.ascontiguousarray(leaf)).to(device, non_blocking=pinned)
            for name, leaf in leaves.items()
        }
        return tensors[""] if self.is_single else tensors


class Preprocess(nn.Module):
    """In front of a network: floats of every leaf, normalised where that is asked for.

    Discrete leaves become one-hot, images of bytes lie between 0 and 1, the other Boxes are
    normalised by their running mean and deviation, if ``clip`` is not None, and clipped to so
    many deviations. The moments change between rollouts only: in between, what a policy did and
    what it is scored by are the same.
    """

    def __init__(
        self, reader: ObservationReader, *, ignored: str | None, clip: float | None
    ) -> None:
        """``ignored``: a leaf that the network is not shown, such as an action mask."""
        super().__init__()
        self.leaves = {name: leaf for name, leaf in reader.leaves.items() if name != ignored}
        if not self.leaves:
            raise ObservationSpaceError(f"nothing is left to observe beside {ignored!r}")
        self._is_single = reader.is_single
        shown: dict[str, gym.Space[Any]] = {
            name: _shown_space(leaf) for name, leaf in self.leaves.items()
        }
        # What a network takes: a Box, or a flat Dict of them.
        self.space: gym.Space[Any] = shown[""] if self._is_single else spaces.Dict(shown)
        self.clip = clip
        normalised = [
            name
            for name, leaf in self.leaves.items()
            if clip is not None and isinstance(leaf, spaces.Box) and not is_image(leaf)
        ]
        self.moments = nn.ModuleList(RunningMoments(reader.shapes[name]) for name in normalised)
        self._moments_of = {name: index for index, name in enumerate(normalised)}

    @property
    def is_plain(self) -> bool:
        """Whether there is one leaf, a Box of numbers."""
        leaf = self.leaves.get("") if self._is_single else None
        return isinstance(leaf, spaces.Box) and not is_image(leaf)

    def forward(self, obs: Obs) -> Obs:
        if isinstance(obs, Tensor):
            return self._prepared("", obs)
        return {name: self._prepared(name, obs[name]) for name in self.leaves}

    def _prepared(self, name: str, leaf: Tensor) -> Tensor:
        space = self.leaves[name]
        if isinstance(space, spaces.Discrete):
            return nn.functional.one_hot(leaf.long() - int(space.start), int(space.n)).float()
        if isinstance(space, spaces.MultiDiscrete):
            return _one_hots(leaf, space)
        if is_image(space):
            return leaf.float() / 255.0
        moments = self.moments_of(name)
        if moments is None or self.clip is None:
            return leaf.float()
        # Before the first rollout is taken in, nothing is known that could be clipped by.
        limit = torch.where(moments.count > 0, self.clip, torch.inf)
        return moments.normalised(leaf.float()).clamp(-limit, limit)

    def moments_of(self, name: str) -> RunningMoments | None:
        """Of a leaf that is normalised."""
        index = self._moments_of.get(name)
        return None if index is None else self.moments[index]  # type: ignore[return-value]

    @torch.no_grad()
    def learn_moments(self, obs: Obs) -> None:
        """Take in a rollout's observations, [N, ...]; what is not finite is left out as a whole."""
        for name, moments in zip(self._moments_of, self.moments, strict=True):
            leaf = obs if isinstance(obs, Tensor) else obs[name]
            moments.take_in(leaf.float())  # type: ignore[operator]


class RunningMoments(nn.Module):
    """Mean and variance of all that was taken in, by Chan's rule for merging two samples."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def normalised(self, values: Tensor) -> Tensor:
        return (values - self.mean) * torch.rsqrt(self.variance + 1e-8)

    def take_in(self, values: Tensor) -> None:
        """[N, *shape]; what is not finite changes nothing, and an accelerator is not waited for."""
        mean, variance = values.mean(dim=0), values.var(dim=0, correction=0)
        finite = torch.isfinite(variance).all()
        total = self.count + len(values)
        share = len(values) / total
        shift = mean - self.mean
        between = shift.square() * share * (1.0 - share)
        merged = self.variance * (1.0 - share) + variance * share + between
        # In place, so that whoever holds a view of them sees the change.
        self.variance.copy_(torch.where(finite, merged, self.variance))
        self.mean.copy_(torch.where(finite, self.mean + shift * share, self.mean))
        self.count.copy_(torch.where(finite, total, self.count))


def is_image(space: gym.Space[Any]) -> bool:
    """Bytes over their whole range."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and bool(np.all(space.low == 0) and np.all(space.high == 255))
    )


def _leaves_of(
    space: gym.Space[Any], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], gym.Space[Any]]]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        empty = True
        for name, part in parts:
            empty = False
            yield from _leaves_of(part, (*path, name))
        if empty:
            raise ObservationSpaceError(f"PPO cannot read {space}: it is empty")
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        if math.prod(space.shape or ()) == 0:
            raise ObservationSpaceError(f"PPO cannot read {space}: it holds no numbers")
        yield path, space
    else:
        at = f" at {'/'.join(map(str, path))!r}" if path else ""
        raise ObservationSpaceError(
            "PPO reads Box, Discrete, MultiDiscrete and MultiBinary observations, and Dict and "
            f"Tuple of these; this env has {space}{at}"
        )


def _bounds_of(space: gym.Space[Any]) -> tuple[Any, Any] | None:
    """From and up to, of what becomes one-hot: any other number would have no place there."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec
    return None


def _stored_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return np.dtype(np.int64)
    dtype = np.dtype(space.dtype)
    return dtype if dtype in _KEPT_DTYPES else np.dtype(np.float32)


def _shown_space(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0.0, 1.0, (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Box(0.0, 1.0, (int(space.nvec.sum()),))
    if is_image(space):
        return spaces.Box(0.0, 1.0, space.shape)
    return spaces.Box(-np.inf, np.inf, space.shape)


def _one_hots(leaf: Tensor, space: spaces.MultiDiscrete) -> Tensor:
    sizes, starts = space.nvec.flatten().tolist(), space.start.flatten().tolist()
    digits = leaf.flatten(-len(space.nvec.shape)).long()
    return torch.cat(
        [nn.functional.one_hot(digits[..., i] - starts[i], sizes[i]) for i in range(len(sizes))],
        dim=-1,
    ).float()


def batched(space: gym.Space[Any], observations: Sequence[Any]) -> Any:
    """Observations of single envs as a vector env of them would hand them out."""
    if isinstance(observations[0], np.ndarray):
        return np.stack(observations)
    empty: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, empty)
