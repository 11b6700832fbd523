"""Action distributions, driven by noise that the caller draws.

The noise of a whole rollout comes from one generator, so that neither the device nor the split
of the batch changes a draw. ``outputs`` is what the policy head gives, [B, n_outputs].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.errors import UserError

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class ActionSpaceError(UserError):
    """An action space that no distribution here covers."""


class Categorical(nn.Module):
    """Discrete actions; ``outputs`` are logits."""

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__()
        self.n_outputs = int(space.n)
        self._start = int(space.start)

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Noise on the CPU for ``shape`` actions, for example [T, n_envs]."""
        return torch.rand(*shape, generator=generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        # Inverse of the cumulative distribution: one uniform number per action.
        cumulative = torch.softmax(outputs, dim=-1).cumsum(dim=-1)
        # The last sum may fall short of 1 by rounding, and no action lies beyond it.
        return (cumulative[..., :-1] <= noise.unsqueeze(-1)).sum(dim=-1)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=-1)

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(outputs, dim=-1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(dim=-1)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """The action as the env takes it."""
        return action + self._start


class DiagonalGaussian(nn.Module):
    """Box actions; ``outputs`` are means, the log standard deviation is one free vector."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.n_outputs = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.zeros(self.n_outputs))
        self._space = space

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, self.n_outputs, generator=generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + self.log_std.exp() * noise

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        z = (action - outputs) * torch.exp(-self.log_std)
        log_prob = -(0.5 * z.square() + self.log_std + _LOG_SQRT_2PI).sum(dim=-1)
        entropy = (self.log_std + _LOG_SQRT_2PI + 0.5).sum()
        return log_prob, entropy.expand(log_prob.shape)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """The action as the env takes it: clipped to its space, in its shape and dtype."""
        shaped = action.reshape(len(action), *self._space.shape)
        clipped: NDArray[Any] = np.clip(shaped, self._space.low, self._space.high)
        return clipped.astype(self._space.dtype)


def action_distribution(space: gym.Space[Any]) -> Categorical | DiagonalGaussian:
    """The distribution for an action space."""
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return DiagonalGaussian(space)
    raise ActionSpaceError(
        f"PPO needs a Discrete or a floating Box action space, this env has {space}"
    )
