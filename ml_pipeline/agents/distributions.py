"""Action distributions, driven by noise that the caller draws.

The noise of a whole rollout comes from one generator, so that neither the device nor the split
of the batch changes a draw. ``outputs`` is what the policy head gives, [..., n_outputs]; of a
distribution that ``reads_features`` the features below the head follow them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.errors import UserError

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
# Far below any logit that is learned, yet finite: infinities times zero are no numbers.
FORBIDDEN = -1e8


class ActionSpaceError(UserError):
    """An action space that no distribution here covers."""


class Distribution(nn.Module, ABC):
    """What all have in common: how an action is stored, and that some can be masked."""

    n_outputs: int
    mask_size = 0  # how many choices a mask covers; 0: it cannot be masked
    reads_features = False
    has_normal_noise = True  # else uniform between 0 and 1
    action_dtype = torch.float32

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.space = space
        self.action_shape: tuple[int, ...] = (math.prod(space.shape or ()),)

    @abstractmethod
    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        """Of the noise for a rollout; item ``noise_row(t)`` is for step t."""

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for a rollout, on the CPU."""
        draw = torch.randn if self.has_normal_noise else torch.rand
        return draw(self.noise_shape(n_steps, n_envs), generator=generator)

    def noise_row(self, t: int) -> int:
        return t

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor: ...

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor: ...

    @abstractmethod
    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Stored actions, [n_envs, *action_shape], as the envs take them."""

    @abstractmethod
    def to_env_tensor(self, action: Tensor) -> Tensor:
        """``to_env`` in torch, for a graph that leaves this house; whole numbers are int64."""

    @abstractmethod
    def to_torch_env(self, action: Tensor) -> Tensor:
        """``to_env`` for envs that are tensors: in float32, on the device of both."""

    def leaves_a_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[n_envs, mask_size] -> [n_envs]: whether every choice has something to choose."""
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

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return action + self._start

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return action + self._start

    def to_torch_env(self, action: Tensor) -> Tensor:
        return action + self._start


class MultiCategorical(Distribution):
    """Several choices at once, each with logits of its own: MultiDiscrete and MultiBinary."""

    has_normal_noise = False
    action_dtype = torch.int64
    _place: Tensor
    _first_values: Tensor

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        super().__init__(space)
        if isinstance(space, spaces.MultiDiscrete):
            sizes, self._start = space.nvec.flatten(), space.start.flatten()
        else:
            sizes = np.full(math.prod(space.shape), 2)
            self._start = np.zeros_like(sizes)
        self.n_outputs = self.mask_size = int(sizes.sum())
        self._first = sizes.cumsum() - sizes
        # Where each choice's logits lie, [n_choices, most]; short rows end in the padding.
        place = np.full((len(sizes), sizes.max()), self.n_outputs)
        for row, (size, end) in enumerate(zip(sizes, sizes.cumsum(), strict=True)):
            place[row, :size] = np.arange(end - size, end)
        self.register_buffer("_place", torch.from_numpy(place), persistent=False)
        first_values = torch.tensor(self._start.tolist())
        self.register_buffer("_first_values", first_values, persistent=False)

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, len(self._place)

    def _logits(self, outputs: Tensor) -> Tensor:
        """[..., n_choices, most]"""
        return nn.functional.pad(outputs, (0, 1), value=FORBIDDEN)[..., self._place]

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return _drawn(torch.softmax(self._logits(outputs), dim=-1), noise)

    def mode(self, outputs: Tensor) -> Tensor:
        return self._logits(outputs).argmax(dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(self._logits(outputs), dim=-1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_prob.sum(dim=-1), entropy.sum(dim=-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        shaped = (action + self._start).reshape(len(action), *(self.space.shape or ()))
        return shaped.astype(self.space.dtype)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        start = torch.tensor(self._start.tolist())
        return (action + start).reshape(action.shape[0], *(self.space.shape or ()))

    def to_torch_env(self, action: Tensor) -> Tensor:
        shaped = action + self._first_values
        return shaped.reshape(action.shape[0], *(self.space.shape or ()))

    def leaves_a_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.asarray(np.logical_or.reduceat(mask, self._first, axis=1).all(axis=1))


class DiagonalGaussian(Distribution):
    """Box actions; ``outputs`` are means, the log standard deviation is one free vector."""

    space: spaces.Box
    lowest: Tensor
    highest: Tensor

    def __init__(self, space: spaces.Box, *, log_std_init: float = 0.0) -> None:
        super().__init__(space)
        (self.n_outputs,) = self.action_shape
        self.log_std = nn.Parameter(torch.full((self.n_outputs,), log_std_init))
        _keep_bounds(self, space)

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

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Clipped to the space, in its shape and dtype; what is scored stays unclipped."""
        shaped = action.reshape(len(action), *self.space.shape)
        clipped: NDArray[Any] = np.clip(shaped, self.space.low, self.space.high)
        if np.issubdtype(self.space.dtype, np.integer):
            clipped = np.rint(clipped)
        return clipped.astype(self.space.dtype)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        # As NumPy clips: in the wider of the two types.
        low, high = (
            torch.tensor(bound.tolist(), dtype=torch.float64)
            for bound in (self.space.low, self.space.high)
        )
        clipped = action.double().reshape(action.shape[0], *self.space.shape).clamp(low, high)
        if np.issubdtype(self.space.dtype, np.integer):
            return clipped.round().long()
        return clipped if self.space.dtype == np.float64 else clipped.float()

    def to_torch_env(self, action: Tensor) -> Tensor:
        return _within_bounds(self, action)


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian bent into the bounds of the Box by tanh; actions are stored before the bend."""

    _nodes: Tensor
    _weights: Tensor

    def __init__(self, space: spaces.Box, *, log_std_init: float = 0.0) -> None:
        super().__init__(space, log_std_init=log_std_init)
        if not space.is_bounded():
            raise ActionSpaceError(
                f"agent.box_policy=squashed needs bounds on every side, this env has {space}"
            )
        low, high = (np.asarray(b, dtype=np.float64).flatten() for b in (space.low, space.high))
        self._low, self._half = low, 0.5 * (high - low)
        # Gauss and Hermite's points and weights: a mean over a normal variable, to three digits
        # for deviations up to e, and to more for smaller ones. Buffers, so that they lie on the
        # device: a copy in every update would cost more than the arithmetic.
        nodes, weights = np.polynomial.hermite_e.hermegauss(48)
        for name, numbers in (("_nodes", nodes), ("_weights", weights / weights.sum())):
            self.register_buffer(name, torch.from_numpy(numbers).float(), persistent=False)
        # A number that cannot be chosen has no width, and no share in the density.
        self._log_volume = float(np.log(self._half[self._half > 0]).sum())

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, entropy = super().log_prob_and_entropy(outputs, action)
        bend = _log_tanh_slope(action).sum(dim=-1) + self._log_volume
        # The entropy has no closed form: the mean slope is integrated over the Gaussian.
        spread = self.log_std.exp().unsqueeze(-1) * self._nodes
        slopes = _log_tanh_slope(outputs.unsqueeze(-1) + spread)
        mean_bend = (slopes @ self._weights).sum(dim=-1) + self._log_volume
        return log_prob - bend, entropy + mean_bend

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return super().to_env(self._low + self._half * (np.tanh(action) + 1.0))

    def to_env_tensor(self, action: Tensor) -> Tensor:
        low, half = (
            torch.tensor(each.tolist(), dtype=torch.float64) for each in (self._low, self._half)
        )
        return super().to_env_tensor(low + half * (action.tanh() + 1.0))

    def to_torch_env(self, action: Tensor) -> Tensor:
        low, high = self.lowest.flatten(), self.highest.flatten()
        return super().to_torch_env(low + 0.5 * (high - low) * (action.tanh() + 1.0))


class StateDependentNoise(Distribution):
    """gSDE: the noise is a linear function of the features that is kept for several steps.

    So actions are smooth in time, which real machines like (Raffin et al., 2020).
    """

    space: spaces.Box
    reads_features = True

    def __init__(
        self, space: spaces.Box, n_features: int, *, log_std_init: float, every_steps: int
    ) -> None:
        super().__init__(space)
        (self.n_outputs,) = self.action_shape
        self.log_std = nn.Parameter(torch.full((n_features, self.n_outputs), log_std_init))
        self._every_steps = every_steps
        self._to_env = DiagonalGaussian(space).to_env
        self._to_env_tensor = DiagonalGaussian(space).to_env_tensor
        _keep_bounds(self, space)

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
        mean, features = self._split(outputs)
        variance = features.square() @ self.log_std.exp().square() + 1e-6
        log_std = 0.5 * variance.log()
        z = (action - mean).square() / variance
        log_prob = -(0.5 * z + log_std + LOG_SQRT_2PI).sum(dim=-1)
        return log_prob, (log_std + LOG_SQRT_2PI + 0.5).sum(dim=-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        return self._to_env(action)

    def to_env_tensor(self, action: Tensor) -> Tensor:
        return self._to_env_tensor(action)

    def to_torch_env(self, action: Tensor) -> Tensor:
        return _within_bounds(self, action)

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        # Detached: the features are to serve the mean, not to make noise.
        return outputs[..., : self.n_outputs], outputs[..., self.n_outputs :].detach()


def _keep_bounds(distribution: nn.Module, space: spaces.Box) -> None:
    """The bounds of the actions, which go with the distribution to its device."""
    for name, bound in (("lowest", space.low), ("highest", space.high)):
        values = torch.from_numpy(np.asarray(bound, dtype=np.float32))
        distribution.register_buffer(name, values, persistent=False)


def _within_bounds(distribution: Any, action: Tensor) -> Tensor:
    shaped = action.reshape(action.shape[0], *distribution.space.shape)
    clipped = shaped.clamp(distribution.lowest, distribution.highest)
    is_whole = np.issubdtype(distribution.space.dtype, np.integer)
    return clipped.round().long() if is_whole else clipped


def _drawn(probs: Tensor, noise: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: one uniform number per choice."""
    cumulative = probs.cumsum(dim=-1)
    # Scaled to the last sum, which rounding may leave short of 1; so nothing forbidden is drawn.
    return (
        (cumulative <= noise.unsqueeze(-1) * cumulative[..., -1:])
        .sum(dim=-1)
        .clamp(max=probs.shape[-1] - 1)
    )


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), without the cancellation."""
    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))


def action_distribution(space: gym.Space[Any], n_features: int, config: PPOConfig) -> Distribution:
    """The distribution for an action space; ``n_features`` are below the policy head."""
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiCategorical(space)
    if not isinstance(space, spaces.Box) or not math.prod(space.shape):
        raise ActionSpaceError(
            "PPO needs a Discrete, MultiDiscrete, MultiBinary or Box action space, "
            f"this env has {space}"
        )
    if config.box_policy == "gsde":
        every, log_std = config.gsde_every_steps, config.log_std_init
        return StateDependentNoise(space, n_features, log_std_init=log_std, every_steps=every)
    kind = SquashedGaussian if config.box_policy == "squashed" else DiagonalGaussian
    return kind(space, log_std_init=config.log_std_init)
