"""SquashedPolicy: a Gaussian whose mean and deviation the network gives, squashed by tanh.

``SquashedNoise`` is its gSDE variant: noise that depends on the state and lasts several steps.
"""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.policy.distributions import (
    LOG_SQRT_2PI,
    ScaledBox,
    StateDependentNoise,
    log_tanh_slope,
)

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0


class SquashedPolicy(ScaledBox):
    """Bounded Box actions, stored in [-1, 1]; ``outputs`` are means and log deviations."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, key="agent=sac")
        (self.n_actions,) = self.action_shape
        self.n_outputs = 2 * self.n_actions

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, self.n_actions

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log deviations, [..., n_actions] each."""
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self.split(outputs)
        return torch.tanh(mean + log_std.exp() * noise)

    def sample_and_log_prob(self, outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions with gradients, and their log-probabilities in the units of the env, [...]."""
        mean, log_std = self.split(outputs)
        raw = mean + log_std.exp() * noise
        log_slope = log_tanh_slope(raw)
        log_prob = -(0.5 * noise.square() + log_std + LOG_SQRT_2PI + log_slope).sum(dim=-1)
        return torch.tanh(raw), log_prob - self.scale.log_volume

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.tanh(self.split(outputs)[0])

    def uniform(self, noise: Tensor) -> Tensor:
        """Actions spread evenly over the bounds, from standard normal noise."""
        return torch.erf(noise * math.sqrt(0.5))

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.split(outputs)
        raw = torch.atanh(action.clamp(-1.0 + 1e-6, 1.0 - 1e-6))
        _, log_prob = self.sample_and_log_prob(outputs, (raw - mean) * torch.exp(-log_std))
        return log_prob, -log_prob  # an estimate from one action: the entropy has no closed form


class SquashedNoise(SquashedPolicy):
    """gSDE: a squashed ``StateDependentNoise``; ``outputs`` are means and features.

    Rollouts keep their noise for several steps. An update scores single actions, whose noise may
    be any: it samples from their Gaussian, with the variance that the features give.
    """

    reads_features = True

    def __init__(
        self, space: spaces.Box, n_features: int, *, log_std_init: float, every_steps: int
    ) -> None:
        super().__init__(space)
        self.n_outputs = self.n_actions
        self.unsquashed = StateDependentNoise(
            space,
            n_features,
            log_std_init=log_std_init,
            every_steps=every_steps,
            learns_features=True,
        )

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return self.unsquashed.noise_shape(n_steps, n_envs)

    def noise_row(self, t: int) -> int:
        return self.unsquashed.noise_row(t)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.unsquashed.mean_and_variance(outputs)
        return mean, 0.5 * variance.log()

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return torch.tanh(self.unsquashed.sample(outputs, noise))

    def mode(self, outputs: Tensor) -> Tensor:
        return torch.tanh(self.unsquashed.mode(outputs))

    def uniform(self, noise: Tensor) -> Tensor:
        return super().uniform(noise[..., 0, :])
