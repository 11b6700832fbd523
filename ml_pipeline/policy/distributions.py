"""Action distributions; ``product.action_distribution`` picks one for an action space.

The caller draws the noise of a whole rollout with one generator. So actions depend neither on the
device nor on how a batch is split. ``outputs`` are those of the policy head, [..., n_outputs].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

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

    def has_choice(self, mask: Tensor) -> Tensor:
        """``leaves_a_choice`` for tensors, [..., mask_size] -> [...]."""
        return mask.any(dim=-1)


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

    def has_choice(self, mask: Tensor) -> Tensor:
        by_choice = nn.functional.pad(mask, (0, 1))[..., self._logit_index]
        return by_choice.any(dim=-1).all(dim=-1)


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
