"""Observations: ``ObservationReader`` reads them into arrays, ``Preprocess`` makes them floats.

Both support Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these. A single
observation is one tensor. A Dict or Tuple becomes a flat dict with one tensor per leaf, named by
its path: "camera", "arm/angle", "0". Rollouts keep integers and images in their own dtype; only
``Preprocess``, the first layer of the policy, converts them to floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple, TypeGuard

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.errors import UserError
from ml_pipeline.moments import merge_moments
from ml_pipeline.policy.contracts import Obs, PolicyInput
from ml_pipeline.ranks.world import ALONE, World

# Stored unchanged. All other dtypes become float32, including float64, which MPS lacks.
_KEPT_DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_, np.float32)


class ObservationSpaceError(UserError):
    """The observation space is not supported."""


class ObservationError(UserError):
    """An observation is outside its space; ``index`` is its position in the batch."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def map_obs(function: Callable[[Tensor], Tensor], obs: Obs) -> Obs:
    """Apply ``function`` to the observation, or to each of its leaves."""
    if isinstance(obs, Tensor):
        return function(obs)
    return {name: function(leaf) for name, leaf in obs.items()}


class ObservationReader:
    """Flattens a vector env's batch of observations into arrays by leaf."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.is_single = not isinstance(space, (spaces.Dict, spaces.Tuple))
        found = list(_leaves_of(space, ()))
        self._paths = {"/".join(map(str, path)): path for path, _ in found}
        if len(self._paths) < len(found):
            raise ObservationSpaceError(f"two leaves of {space} have the same path; rename a key")
        # By path; a single observation has the path "".
        self.leaves = dict(zip(self._paths, (leaf for _, leaf in found), strict=True))
        self.dtypes = {name: _stored_dtype(leaf) for name, leaf in self.leaves.items()}
        self.shapes = {name: leaf.shape or () for name, leaf in self.leaves.items()}
        self._bounds = {
            name: bounds
            for name, leaf in self.leaves.items()
            if (bounds := _bounds_of(leaf)) is not None
        }

    def read(self, obs: Any) -> dict[str, NDArray[Any]]:
        """[n_envs, ...] arrays by leaf, in the dtypes of ``dtypes``."""
        leaves = {
            name: np.asarray(reduce(getitem, path, obs), dtype=self.dtypes[name])
            for name, path in self._paths.items()
        }
        self.check_bounds(leaves)
        return leaves

    def split(self, obs: Any) -> dict[str, Tensor]:
        """The leaves of observations that are tensors."""
        return {name: reduce(getitem, path, obs) for name, path in self._paths.items()}

    def joined(self, leaves: dict[str, Tensor]) -> Obs:
        """Tensors by leaf as a policy takes them."""
        return leaves[""] if self.is_single else leaves

    def check_bounds(self, leaves: dict[str, NDArray[Any]]) -> None:
        """Refuse values that a one-hot vector cannot hold."""
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
        """The arrays of ``read`` as tensors on the device; CPU tensors share the arrays' memory.

        Copies from pinned memory are asynchronous: do not change the arrays until they are used.
        """
        # torch rejects negative strides, which flipped images have.
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(leaf)) for name, leaf in leaves.items()
        }
        if device.type != "cpu":  # saves the time of to()
            # Only CUDA is safe here: it waits if the memory is not pinned, and MPS does not.
            is_async = device.type == "cuda"
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device, non_blocking=is_async)
        return self.joined(tensors)

    def policy_input(
        self,
        leaves: dict[str, NDArray[Any]],
        action_mask: NDArray[np.bool_] | None = None,
        memory: Tensor | None = None,
        episode_start: Tensor | None = None,
        *,
        device: torch.device,
    ) -> PolicyInput:
        """The input of a policy on ``device``, from the arrays of ``read``."""
        obs = self.to_tensors(leaves, device)
        mask = None if action_mask is None else torch.from_numpy(action_mask).to(device)
        return PolicyInput(obs, mask, memory, episode_start)


class Preprocess(nn.Module):
    """Converts stored observations to the floats that a network takes.

    Discrete leaves become one-hot, images are divided by their highest values. If ``clip`` is not
    None, other Boxes are normalised by running mean and standard deviation, and clipped to ``clip``
    deviations. The moments change only between rollouts, so that acting and scoring agree.
    """

    def __init__(
        self,
        reader: ObservationReader,
        *,
        ignored: str | None,
        clip: float | None,
        only: Sequence[str] | None = None,
    ) -> None:
        """``ignored``: a leaf to hide from the network, such as an action mask.

        ``only``: the leaves that the network reads; None: all.
        """
        super().__init__()
        self.leaves = {
            name: leaf
            for name, leaf in reader.leaves.items()
            if name != ignored and (only is None or name in only)
        }
        if not self.leaves:
            raise ObservationSpaceError(
                f"the observation has no leaf except the action mask {ignored!r}; "
                "add one for the network"
            )
        self._is_single = reader.is_single
        boxes: dict[str, gym.Space[Any]] = {
            name: _network_space(leaf) for name, leaf in self.leaves.items()
        }
        # The network's observation space: a Box, or a flat Dict of Boxes.
        self.space: gym.Space[Any] = boxes[""] if self._is_single else spaces.Dict(boxes)
        self.clip = clip
        # Read here, because torch.compile cannot branch on the numbers of a space.
        self._images = [name for name, leaf in self.leaves.items() if is_image(leaf)]
        self._choices = {
            name: choices
            for name, leaf in self.leaves.items()
            if (choices := _choices_of(leaf)) is not None
        }
        self._moments_of = {
            name: RunningMoments(reader.shapes[name])
            for name, leaf in self.leaves.items()
            if clip is not None and isinstance(leaf, spaces.Box) and not is_image(leaf)
        }
        self._highest: dict[str, str] = {}  # by leaf: the buffer with the bounds of its channels
        for index, (name, leaf) in enumerate(self.leaves.items()):
            if is_image(leaf) and (leaf.high != 255).any():
                self._highest[name] = f"_highest_{index}"
                bounds = torch.from_numpy(leaf.high.astype(np.float32))
                self.register_buffer(self._highest[name], bounds, persistent=False)
        # Registers them with torch; a ModuleDict rejects names such as "" and "arm.angle".
        self.moments = nn.ModuleList(self._moments_of.values())

    @property
    def is_plain(self) -> bool:
        """Whether the observation is one Box of numbers."""
        leaf = self.leaves.get("") if self._is_single else None
        return isinstance(leaf, spaces.Box) and not is_image(leaf)

    @property
    def is_vector(self) -> bool:
        """Whether the observation is one space of numbers or choices, and not an image."""
        return self._is_single and not is_image(self.leaves[""])

    def forward(self, obs: Obs) -> Obs:
        if isinstance(obs, Tensor):
            return self._prepared("", obs)
        return {name: self._prepared(name, obs[name]) for name in self.leaves}

    def _prepared(self, name: str, leaf: Tensor) -> Tensor:
        if name in self._choices:
            return _one_hots(leaf, self._choices[name])
        if name in self._images:
            highest = self._highest.get(name)
            return leaf.float() / (255.0 if highest is None else getattr(self, highest))
        moments = self.moments_of(name)
        if moments is None or self.clip is None:
            return leaf.float()
        # Before the first rollout, the deviation is unknown: do not clip.
        limit = torch.where(moments.count > 0, self.clip, torch.inf)
        return moments.normalised(leaf.float()).clamp(-limit, limit)

    def moments_of(self, name: str) -> RunningMoments | None:
        """The moments of a leaf, or None if it is not normalised."""
        return self._moments_of.get(name)

    @torch.no_grad()
    def learn_moments(self, obs: Obs, world: World = ALONE) -> None:
        """Add the observations of all ranks, [N, ...] each; a non-finite leaf is skipped."""
        for name, moments in self._moments_of.items():
            leaf = obs if isinstance(obs, Tensor) else obs[name]
            moments.add(leaf.float(), world)


class RunningMoments(nn.Module):
    """Mean and variance of all values added so far."""

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

    def add(self, values: Tensor, world: World) -> None:
        """[N, *shape] of each rank; non-finite values change nothing.

        With one rank it does not synchronise with the device.
        """
        mean, variance = values.mean(dim=0), values.var(dim=0, correction=0)
        mean, variance, count = world.moments(mean, variance, len(values))
        finite = torch.isfinite(variance).all()
        held = self.mean, self.variance, self.count
        merged = merge_moments(*held, mean, variance, count)
        # In place: a fast backend holds views of these buffers.
        for own, new in zip(held, merged, strict=True):
            own.copy_(torch.where(finite, new, own))


def subspace(space: gym.Space[Any], leaves: Sequence[str], path: str = "") -> gym.Space[Any]:
    """The part of a Dict, which may hold others, with these leaves."""
    if not isinstance(space, spaces.Dict):
        return space
    parts = {}
    for name, part in space.items():
        place = f"{path}{name}"
        if any(f"{leaf}/".startswith(f"{place}/") for leaf in leaves):
            parts[name] = subspace(part, leaves, f"{place}/")
    return spaces.Dict(parts)


def is_image(space: gym.Space[Any]) -> TypeGuard[spaces.Box]:
    """Whether a Box holds bytes from 0 to 255, or those of channels with bounds of their own.

    Such channels hold symbols, as in MiniGrid: kinds from 0 to 10, colours from 0 to 5.
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or space.low.any():
        return False
    if (space.high == 255).all():
        return True
    has_channels = len(space.shape) == 3 and bool((space.high > 0).all())
    places = [(0, 1), (1, 2)] if has_channels else []  # channels last or first
    return any(not np.ptp(space.high, axis=axes).any() for axes in places) and bool(
        np.ptp(space.high)
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
            raise ObservationSpaceError(f"observation space {space} is empty; add a leaf")
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        if math.prod(space.shape or ()) == 0:
            raise ObservationSpaceError(f"observation space {space} has size 0; remove it")
        yield path, space
    else:
        at = f" at {'/'.join(map(str, path))!r}" if path else ""
        raise ObservationSpaceError(
            f"observation space {space}{at} is not supported; use Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of these"
        )


def _bounds_of(space: gym.Space[Any]) -> tuple[Any, Any] | None:
    """Bounds [low, high) of a leaf that becomes one-hot."""
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


def _network_space(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0.0, 1.0, (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.Box(0.0, 1.0, (int(space.nvec.sum()),))
    if is_image(space):
        return spaces.Box(0.0, 1.0, space.shape)
    return spaces.Box(-np.inf, np.inf, space.shape)


class _Choices(NamedTuple):
    """Those of a Discrete or MultiDiscrete space."""

    n_axes: int  # 0: Discrete
    starts: list[int]
    sizes: list[int]


def _choices_of(space: gym.Space[Any]) -> _Choices | None:
    if isinstance(space, spaces.Discrete):
        return _Choices(0, [int(space.start)], [int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        starts, sizes = space.start.flatten().tolist(), space.nvec.flatten().tolist()
        return _Choices(space.nvec.ndim, starts, sizes)
    return None


def _one_hots(leaf: Tensor, choices: _Choices) -> Tensor:
    n_axes, starts, sizes = choices
    digits = leaf.flatten(-n_axes).long() if n_axes else leaf.long().unsqueeze(-1)
    return torch.cat(
        [nn.functional.one_hot(digits[..., i] - starts[i], sizes[i]) for i in range(len(sizes))],
        dim=-1,
    ).float()


def batched(space: gym.Space[Any], observations: Sequence[Any]) -> Any:
    """Observations of single envs, batched as a vector env batches them."""
    if isinstance(observations[0], np.ndarray):
        return np.stack(observations)
    empty: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, empty)
