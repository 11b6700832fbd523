"""Action distributions, and ``action_distribution``, which picks one for an action space.

The caller draws the noise of a whole rollout with one generator. So actions depend neither on the
device nor on how a batch is split. ``outputs`` are those of the policy head, [..., n_outputs].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.errors import UserError
from ml_pipeline.policy.box_scale import BoxScale, unsuitable_bounds

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
# The logit of a masked action: far below any learned one, but finite, since 0 * inf is NaN.
FORBIDDEN = -1e8


# From a shape to random numbers.
Draw = Callable[[tuple[int, ...]], Tensor]


class ActionSpaceError(UserError):
    """No distribution supports the action space."""


class ActionSettings(Protocol):
    """The settings of ``action_distribution``; they matter for Box actions only."""

    box_policy: str  # gaussian | squashed | gsde
    log_std_init: float
    gsde_every_steps: int  # steps between new gSDE noise; 0: once per rollout


class Distribution(nn.Module, ABC):
    """Samples and scores actions, and converts them for the envs.

    ``sample`` returns actions of ``action_shape`` and ``action_dtype``; rollouts store these, and
    ``log_prob_and_entropy`` scores them. The ``to_`` methods convert them to the action space.
    """

    n_outputs: int
    mask_size = 0  # length of an action mask; 0: actions cannot be masked
    reads_features = False  # outputs end with the features: [..., n_outputs + n_features]
    has_normal_noise = True  # standard normal, else uniform in [0, 1)
    action_dtype = torch.float32

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.space = space
        self.action_shape: tuple[int, ...] = (math.prod(space.shape or ()),)

    @abstractmethod
    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        """Shape of a rollout's noise, [n_rows, n_envs, ...]; step t uses row ``noise_row(t)``."""

    def noise_row(self, t: int) -> int:
        return t

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for a rollout, on the CPU."""
        normal, uniform = (partial(draw, generator=generator) for draw in (torch.randn, torch.rand))
        return self.noise_from(normal, uniform, self.noise_shape(n_steps, n_envs))

    def noise_from(self, normal: Draw, uniform: Draw, shape: tuple[int, ...]) -> Tensor:
        """Noise of a shape of ``noise_shape``, from one of two sources."""
        return (normal if self.has_normal_noise else uniform)(shape)

    def masked(self, outputs: Tensor, mask: Tensor) -> Tensor:
        """The outputs with the logits of forbidden actions replaced."""
        return outputs.masked_fill(~mask, FORBIDDEN)

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions [..., *action_shape]; ``noise`` is one row of the rollout's noise."""

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """Deterministic actions, [..., *action_shape]: the likeliest choices, or the means."""

    @abstractmethod
    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """[...] each: log-probability of ``action``, and entropy of the distribution."""

    @abstractmethod
    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Actions [n_envs, *action_shape] in the form and dtype of the action space."""

    @abstractmethod
    def to_env_tensor(self, action: Tensor) -> Tensor:
        """``to_env`` in torch, for exported graphs; integers are int64."""

    def to_torch_env(self, action: Tensor) -> Tensor:
        """``to_env`` for tensor envs, on their device; integers are int64, the rest float32."""
        return self.to_env_tensor(action)

    def chosen(self, outputs: Tensor, noise: Tensor | None) -> NDArray[Any]:
        """Actions for the envs: drawn with ``noise``, or the most likely ones without it."""
        action = self.mode(outputs) if noise is None else self.sample(outputs, noise)
        return self.to_env(action.cpu().numpy())

    def no_actions(self) -> NDArray[Any]:
        """The actions of no env, [0, *act]: layers cannot reshape an empty batch."""
        return np.empty((0, *(self.space.shape or ())), self.space.dtype)

    def remark(self) -> str | None:
        """What a user should know about the action space, or None."""
        return None

    def by_choice(self, outputs: Tensor) -> Tensor:
        """Outputs of discrete actions as [..., n_choices, size]; shorter choices are padded."""
        raise ActionSpaceError(f"actions of {self.space} are not discrete choices")

    def leaves_a_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a mask [n_envs, mask_size] allows an action in each env, [n_envs]."""
        return np.asarray(mask.any(axis=1))


class Categorical(Distribution):
    """Discrete actions; ``outputs`` are logits."""

    has_normal_noise = False
    action_dtype = torch.int64

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__(space)
        self.action_shape = ()
        self.n_outputs = self.mask_size = int(space.n)
        self._start = int(space.start)

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return _drawn(torch.softmax(outputs, dim=-1), noise)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(outputs, dim=-1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(dim=-1)

    def by_choice(self, outputs: Tensor) -> Tensor:
        return outputs.unsqueeze(-2)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return action + self._start

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return action + self._start


class MultiCategorical(Distribution):
    """MultiDiscrete and MultiBinary actions; ``outputs`` are the logits of all choices."""

    has_normal_noise = False
    action_dtype = torch.int64
    _logit_index: Tensor
    _start_tensor: Tensor

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        super().__init__(space)
        if isinstance(space, spaces.MultiDiscrete):
            sizes, self._start = space.nvec.flatten(), space.start.flatten()
        else:
            sizes = np.full(math.prod(space.shape), 2)
            self._start = np.zeros_like(sizes)
        self.n_outputs = self.mask_size = int(sizes.sum())
        self._first = sizes.cumsum() - sizes
        # Indices of each choice's logits, [n_choices, max size]; unused ones point to padding.
        index = np.full((len(sizes), sizes.max()), self.n_outputs)
        for row, (size, end) in enumerate(zip(sizes, sizes.cumsum(), strict=True)):
            index[row, :size] = np.arange(end - size, end)
        self.register_buffer("_logit_index", torch.from_numpy(index), persistent=False)
        start = torch.tensor(self._start.tolist())
        self.register_buffer("_start_tensor", start, persistent=False)

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, len(self._logit_index)

    def by_choice(self, outputs: Tensor) -> Tensor:
        return nn.functional.pad(outputs, (0, 1), value=FORBIDDEN)[..., self._logit_index]

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return _drawn(torch.softmax(self.by_choice(outputs), dim=-1), noise)

    def mode(self, outputs: Tensor) -> Tensor:
        return self.by_choice(outputs).argmax(dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(self.by_choice(outputs), dim=-1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_prob.sum(dim=-1), entropy.sum(dim=-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        shaped = (action + self._start).reshape(len(action), *(self.space.shape or ()))
        return shaped.astype(self.space.dtype)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        shifted = action + self._start_tensor
        return shifted.reshape(action.shape[0], *(self.space.shape or ()))

    def leaves_a_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.asarray(np.logical_or.reduceat(mask, self._first, axis=1).all(axis=1))


class BoxDistribution(Distribution):
    """Box actions: sampled and scored without bounds, clipped only for the env."""

    space: spaces.Box
    _low_tensor: Tensor
    _high_tensor: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        (self.n_outputs,) = self.action_shape
        self._is_integer = np.issubdtype(space.dtype, np.integer)
        for name, bound in (("_low_tensor", space.low), ("_high_tensor", space.high)):
            values = torch.from_numpy(np.asarray(bound, dtype=np.float32))
            self.register_buffer(name, values, persistent=False)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        shaped = action.reshape(len(action), *self.space.shape)
        # Faster than np.clip for a few numbers.
        clipped: NDArray[Any] = np.minimum(np.maximum(shaped, self.space.low), self.space.high)
        rounded = np.rint(clipped) if self._is_integer else clipped
        return rounded.astype(self.space.dtype, copy=False)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        # NumPy clips in the wider of the two dtypes, so do the same here.
        low, high = (
            torch.tensor(bound.tolist(), dtype=torch.float64)
            for bound in (self.space.low, self.space.high)
        )
        clipped = action.double().reshape(action.shape[0], *self.space.shape).clamp(low, high)
        if self._is_integer:
            return clipped.round().long()
        return clipped if self.space.dtype == np.float64 else clipped.float()

    def remark_on_bounds(self, deviation: float) -> str | None:
        """``remark`` if the first actions have mean 0 and about this standard deviation."""
        bounds = unsuitable_bounds(self.space, deviation)
        if bounds is None:
            return None
        return (
            f"actions go from {bounds}, but the first ones have mean 0 and a standard deviation of "
            f"about {deviation:.2g}; use agent.box_policy=squashed, or rescale the actions"
        )

    def to_torch_env(self, action: Tensor) -> Tensor:
        shaped = action.reshape(action.shape[0], *self.space.shape)
        clipped = shaped.clamp(self._low_tensor, self._high_tensor)
        return clipped.round().long() if self._is_integer else clipped


class ScaledBox(BoxDistribution):
    """Bounded Box actions, stored in [-1, 1] and scaled to the bounds for the env."""

    def __init__(self, space: spaces.Box, *, key: str) -> None:
        """``key``: the setting that needs bounds, for the error."""
        super().__init__(space)
        if not space.is_bounded():
            raise ActionSpaceError(
                f"{key}: action space {space} is not bounded on every side; wrap the env so that "
                "its actions are"
            )
        self.scale = BoxScale(space)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return super().to_env(self.scale.array(action))

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return super().to_env_tensor(self.scale.exact(action))

    def to_torch_env(self, action: Tensor) -> Tensor:
        return super().to_torch_env(self.scale(action))


class DiagonalGaussian(BoxDistribution):
    """Box actions; ``outputs`` are the means, the standard deviation is a free parameter."""

    def __init__(self, space: spaces.Box, *, log_std_init: float = 0.0) -> None:
        super().__init__(space)
        self.log_std = nn.Parameter(torch.full((self.n_outputs,), log_std_init))
        self._first_deviation = math.exp(log_std_init)

    def remark(self) -> str | None:
        return self.remark_on_bounds(self._first_deviation)

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, self.n_outputs

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + self.log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        z = (action - outputs) * torch.exp(-self.log_std)
        log_prob = -(0.5 * z.square() + self.log_std + LOG_SQRT_2PI).sum(dim=-1)
        entropy = (self.log_std + LOG_SQRT_2PI + 0.5).sum()
        return log_prob, entropy.expand(log_prob.shape)


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian squashed into the bounds of the Box by tanh; actions are stored unsquashed."""

    _nodes: Tensor
    _weights: Tensor

    def __init__(self, space: spaces.Box, *, log_std_init: float = 0.0) -> None:
        super().__init__(space, log_std_init=log_std_init)
        if not space.is_bounded():
            raise ActionSpaceError(
                f"agent.box_policy=squashed: action space {space} is not bounded on every side; "
                "use agent.box_policy=gaussian"
            )
        self.scale = BoxScale(space)
        # Gauss-Hermite quadrature for the mean over a normal variable. It gives three digits for
        # standard deviations up to e, and more for smaller ones. Buffers are on the device
        # already: a copy in every update would cost more than the arithmetic.
        nodes, weights = np.polynomial.hermite_e.hermegauss(48)
        for name, numbers in (("_nodes", nodes), ("_weights", weights / weights.sum())):
            self.register_buffer(name, torch.from_numpy(numbers).float(), persistent=False)

    def remark(self) -> str | None:
        return None  # it scales actions to the bounds

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = super().log_prob_and_entropy(outputs, action)
        log_slope = log_tanh_slope(action).sum(dim=-1) + self.scale.log_volume
        # The entropy has no closed form: integrate the log slope over the Gaussian.
        spread = self.log_std.exp().unsqueeze(-1) * self._nodes
        slopes = log_tanh_slope(outputs.unsqueeze(-1) + spread)
        mean_log_slope = (slopes @ self._weights).sum(dim=-1) + self.scale.log_volume
        return log_prob - log_slope, entropy + mean_log_slope

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return super().to_env(self.scale.array(np.tanh(action)))

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return super().to_env_tensor(self.scale.exact(action.tanh()))

    def to_torch_env(self, action: Tensor) -> Tensor:
        return super().to_torch_env(self.scale(action.tanh()))


class StateDependentNoise(BoxDistribution):
    """gSDE: the noise is a linear function of the features, kept for several steps.

    So actions are smooth over time, as real robots require (Raffin et al., 2020).
    """

    reads_features = True

    def __init__(
        self,
        space: spaces.Box,
        n_features: int,
        *,
        log_std_init: float,
        every_steps: int,
        learns_features: bool = False,
    ) -> None:
        """``learns_features``: whether the gradient of the noise also trains the features."""
        super().__init__(space)
        self.log_std = nn.Parameter(torch.full((n_features, self.n_outputs), log_std_init))
        self._every_steps = every_steps
        self._learns_features = learns_features

    def remark(self) -> str | None:
        return self.remark_on_bounds(1.0)  # the deviation depends on the features

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return 1 + self.noise_row(n_steps - 1), n_envs, *self.log_std.shape

    def noise_row(self, t: int) -> int:
        return t // self._every_steps if self._every_steps else 0

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, features = self._split(outputs)
        step = noise * self.log_std.exp()
        return mean + (features.unsqueeze(-2) @ step).squeeze(-2)

    def mode(self, outputs: Tensor) -> Tensor:
        return self._split(outputs)[0]

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.mean_and_variance(outputs)
        log_std = 0.5 * variance.log()
        z = (action - mean).square() / variance
        log_prob = -(0.5 * z + log_std + LOG_SQRT_2PI).sum(dim=-1)
        return log_prob, (log_std + LOG_SQRT_2PI + 0.5).sum(dim=-1)

    def mean_and_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Those of an action whose noise is not known, [..., n_outputs] each."""
        mean, features = self._split(outputs)
        return mean, features.square() @ self.log_std.exp().square() + 1e-6

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, features = outputs[..., : self.n_outputs], outputs[..., self.n_outputs :]
        return mean, features if self._learns_features else features.detach()


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


def _drawn(probs: Tensor, noise: Tensor) -> Tensor:
    """Inverse transform sampling: one uniform number per choice."""
    cumulative = probs.cumsum(dim=-1)
    # Rounding may leave the last sum below 1: scale to it, so that no masked action is sampled.
    return (
        (cumulative <= noise.unsqueeze(-1) * cumulative[..., -1:])
        .sum(dim=-1)
        .clamp(max=probs.shape[-1] - 1)
    )


def log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), without cancellation."""
    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))


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
