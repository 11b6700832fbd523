"""Product: actions of several parts; and ``action_distribution``, for an action space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    ActionSettings,
    ActionSpaceError,
    Categorical,
    DiagonalGaussian,
    Distribution,
    Draw,
    MultiCategorical,
    SquashedGaussian,
    StateDependentNoise,
)


def action_distribution(
    space: gym.Space[Any], n_features: int = 0, settings: ActionSettings | None = None
) -> Distribution:
    """The distribution for an action space; without ``settings`` Box actions are Gaussian.

    ``n_features`` is the input size of the policy head.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiCategorical(space)
    box_policy = "gaussian" if settings is None else settings.box_policy
    if isinstance(space, (spaces.Tuple, spaces.Dict)) and len(space):
        if box_policy == "gsde":
            raise ActionSpaceError(
                f"agent.box_policy=gsde: needs Box actions, got {space}; use "
                "agent.box_policy=gaussian"
            )
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return Product(space, [action_distribution(part, n_features, settings) for part in parts])
    if not isinstance(space, spaces.Box) or not math.prod(space.shape):
        raise ActionSpaceError(
            f"action space {space} is not supported; use Discrete, MultiDiscrete, MultiBinary, "
            "Box, or a Tuple or Dict of these"
        )
    if settings is None:
        return DiagonalGaussian(space)
    if box_policy == "gsde":
        every, log_std = settings.gsde_every_steps, settings.log_std_init
        return StateDependentNoise(space, n_features, log_std_init=log_std, every_steps=every)
    kind = SquashedGaussian if box_policy == "squashed" else DiagonalGaussian
    return kind(space, log_std_init=settings.log_std_init)


class Product(Distribution):
    """Tuple and Dict actions: their parts are independent, and each has its own distribution.

    Outputs, noise, masks and stored actions are those of all parts, one after the other. The
    ``to_`` methods return a tuple or a dict. float32 holds the index of a choice exactly.
    """

    space: spaces.Tuple[Any] | spaces.Dict
    _is_normal: Tensor

    def __init__(
        self, space: spaces.Tuple[Any] | spaces.Dict, parts: Sequence[Distribution]
    ) -> None:
        super().__init__(space)
        self.parts = nn.ModuleList(parts)
        self._outputs = _places([(part.n_outputs,) for part in parts])
        self._masks = _places([(part.mask_size,) for part in parts])
        self._actions = _places([part.action_shape for part in parts])
        noise_shapes = [part.noise_shape(1, 1)[2:] for part in parts]
        self._noises = _places(noise_shapes)
        self.n_outputs = sum(part.n_outputs for part in parts)
        self.mask_size = sum(part.mask_size for part in parts)
        self.action_shape = (sum(math.prod(part.action_shape) for part in parts),)
        has_floats = any(part.action_dtype == torch.float32 for part in parts)
        self.action_dtype = torch.float32 if has_floats else torch.int64
        is_normal = [
            part._is_normal
            if isinstance(part, Product)
            else torch.full((math.prod(shape),), part.has_normal_noise)
            for part, shape in zip(parts, noise_shapes, strict=True)
        ]
        self.register_buffer("_is_normal", torch.cat(is_normal), persistent=False)
        self.has_normal_noise = bool(self._is_normal.any())
        self._is_all_normal = bool(self._is_normal.all())

    def _each(self) -> Iterable[Distribution]:
        return cast("Iterable[Distribution]", self.parts)

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, len(self._is_normal)

    def noise_from(self, normal: Draw, uniform: Draw, shape: tuple[int, ...]) -> Tensor:
        if not self.has_normal_noise:
            return uniform(shape)
        if self._is_all_normal:
            return normal(shape)
        noise = uniform(shape)
        return torch.where(self._is_normal.to(noise.device), normal(shape), noise)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return self._joined(
            part.sample(outputs[..., own], noise[..., place])
            for part, own, place in zip(self._each(), self._outputs, self._noises, strict=True)
        )

    def mode(self, outputs: Tensor) -> Tensor:
        return self._joined(
            part.mode(outputs[..., own])
            for part, own in zip(self._each(), self._outputs, strict=True)
        )

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        scores = [
            part.log_prob_and_entropy(outputs[..., own], each)
            for part, own, each in zip(
                self._each(), self._outputs, self._split(action), strict=True
            )
        ]
        log_prob, entropy = scores[0]
        for another, more in scores[1:]:
            log_prob, entropy = log_prob + another, entropy + more
        return log_prob, entropy

    def masked(self, outputs: Tensor, mask: Tensor) -> Tensor:
        each = [
            part.masked(outputs[..., own], mask[..., place])
            if part.mask_size
            else outputs[..., own]
            for part, own, place in zip(self._each(), self._outputs, self._masks, strict=True)
        ]
        return torch.cat(each, dim=-1)

    def by_choice(self, outputs: Tensor) -> Tensor:
        each = zip(self._each(), self._outputs, strict=True)
        rows = [part.by_choice(outputs[..., own]) for part, own in each]
        size = max(row.shape[-1] for row in rows)
        padded = [nn.functional.pad(r, (0, size - r.shape[-1]), value=FORBIDDEN) for r in rows]
        return torch.cat(padded, dim=-2)

    def leaves_a_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        allowed = [
            part.leaves_a_choice(mask[:, place])
            for part, place in zip(self._each(), self._masks, strict=True)
            if part.mask_size
        ]
        return np.asarray(np.logical_and.reduce(allowed))

    def has_choice(self, mask: Tensor) -> Tensor:
        allowed = [
            part.has_choice(mask[..., place])
            for part, place in zip(self._each(), self._masks, strict=True)
            if part.mask_size
        ]
        return torch.stack(allowed).all(dim=0)

    def to_env(self, action: NDArray[Any]) -> Any:
        own = self._split(torch.from_numpy(action))
        each = zip(self._each(), own, strict=True)
        return self._tree(part.to_env(own.numpy()) for part, own in each)

    def to_env_tensor(self, action: Tensor) -> Any:
        each = zip(self._each(), self._split(action), strict=True)
        return self._tree(part.to_env_tensor(own) for part, own in each)

    def to_torch_env(self, action: Tensor) -> Any:
        each = zip(self._each(), self._split(action), strict=True)
        return self._tree(part.to_torch_env(own) for part, own in each)

    def no_actions(self) -> Any:
        return self._tree(part.no_actions() for part in self._each())

    def remark(self) -> str | None:
        names = self.space.spaces if isinstance(self.space, spaces.Dict) else range(len(self.parts))
        remarks = [(name, part.remark()) for name, part in zip(names, self._each(), strict=True)]
        found = [f"part {name!r}: {remark}" for name, remark in remarks if remark is not None]
        return "; ".join(found) or None

    def _split(self, action: Tensor) -> list[Tensor]:
        """The stored actions of each part."""
        each = zip(self._each(), self._actions, strict=True)
        return [action[..., place].to(part.action_dtype) for part, place in each]

    def _joined(self, actions: Iterable[Tensor]) -> Tensor:
        each = zip(self._each(), actions, strict=True)
        rows = [own if part.action_shape else own.unsqueeze(-1) for part, own in each]
        return torch.cat([own.to(self.action_dtype) for own in rows], dim=-1)

    def _tree(self, values: Iterable[Any]) -> Any:
        if isinstance(self.space, spaces.Dict):
            return dict(zip(self.space.spaces, values, strict=True))
        return tuple(values)


def _places(shapes: Iterable[tuple[int, ...]]) -> list[int | slice]:
    """Where parts of these shapes, () or (n,), are in a joined row."""
    places: list[int | slice] = []
    first = 0
    for shape in shapes:
        end = first + math.prod(shape)
        places.append(slice(first, end) if shape else first)
        first = end
    return places
