"""How SAC acts and values its actions.

``SquashedPolicy`` is a Gaussian whose mean and deviation the network gives, squashed by tanh;
``SquashedNoise`` is its gSDE variant, whose noise depends on the state and lasts several steps.

``BoxActions`` values one action per state, sampled from such a policy. ``DiscreteActions`` knows
every value and every probability, so its expectations are exact and need no sampling
(Christodoulou, 2019).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.agent import UpdateNoise
from ml_pipeline.algorithms.replay.networks import Critic, Critics, DiscreteCritic
from ml_pipeline.policy.contracts import NetworkBuilder, Obs
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    LOG_SQRT_2PI,
    ActionSettings,
    ActionSpaceError,
    Categorical,
    ScaledBox,
    StateDependentNoise,
    log_tanh_slope,
)

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0

# The default target entropy as a share of log(n), the entropy of an even choice between n actions.
# At 0.5 a policy is as random as an even choice between sqrt(n) actions: two actions have 89% and
# 11%. With the paper's 0.98 they would need 58% and 42%, which is too random to act well.
ENTROPY_SHARE = 0.5


class SquashedPolicy(ScaledBox):
    """Bounded Box actions, stored in [-1, 1]; ``outputs`` are means and log deviations.

    Log-probabilities are those of the stored actions, so the unit of the env's actions changes
    neither the losses nor the target entropy.
    """

    log_volume: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, key="agent=sac")
        (self.n_actions,) = self.action_shape
        self.n_outputs = 2 * self.n_actions
        # 0, except in runs of earlier versions, whose log-probabilities are in the env's units.
        self.register_buffer("log_volume", torch.zeros(()), persistent=False)

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
        """Actions with gradients, [..., n_actions], and their log-probabilities, [...]."""
        mean, log_std = self.split(outputs)
        raw = mean + log_std.exp() * noise
        log_slope = log_tanh_slope(raw)
        log_prob = -(0.5 * noise.square() + log_std + LOG_SQRT_2PI + log_slope).sum(dim=-1)
        return torch.tanh(raw), log_prob - self.log_volume

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


class SoftValue(NamedTuple):
    """The action that the actor would take, or the mean over all actions if they are discrete."""

    value: Tensor  # [B], by the lower of the two critics
    log_prob: Tensor  # [B]; its mean over all actions is the negative entropy


class BoxActions:
    """Box actions: the critics value one new action per state, sampled with gradients."""

    def __init__(self, distribution: SquashedPolicy) -> None:
        self.distribution = distribution

    def new_critic(self, space: gym.Space[Any], build_network: NetworkBuilder) -> nn.Module:
        return Critic(space, self.distribution.n_actions, build_network)

    def taken(self, critics: Critics, obs: Obs, action: Tensor) -> Tensor:
        """The values of the actions in the batch, [2, B]."""
        values: Tensor = critics(obs, action)
        return values

    def soft_value(
        self, critics: Critics, obs: Obs, outputs: Tensor, noise: UpdateNoise
    ) -> SoftValue:
        drawn = noise.draw(len(outputs), self.distribution.n_actions)
        action, log_prob = self.distribution.sample_and_log_prob(outputs, drawn)
        return SoftValue(critics(obs, action).amin(dim=0), log_prob)

    def random(self, noise: Tensor, action_mask: Tensor | None) -> Tensor:
        """Actions spread evenly over the bounds."""
        return self.distribution.uniform(noise)

    def target_entropy(self, action_mask: Tensor | None) -> float:
        return -float(self.distribution.n_actions)


class DiscreteActions:
    """Discrete actions: exact means over all allowed actions."""

    def __init__(self, distribution: Categorical) -> None:
        self.distribution = distribution

    def new_critic(self, space: gym.Space[Any], build_network: NetworkBuilder) -> nn.Module:
        return DiscreteCritic(space, self.distribution.n_outputs, build_network)

    def taken(self, critics: Critics, obs: Obs, action: Tensor) -> Tensor:
        """The values of the actions in the batch, [2, B]."""
        values: Tensor = critics(obs)
        return values.gather(-1, action.expand(len(critics), -1).unsqueeze(-1)).squeeze(-1)

    def soft_value(
        self, critics: Critics, obs: Obs, outputs: Tensor, noise: UpdateNoise
    ) -> SoftValue:
        """``outputs`` are logits; those of forbidden actions are so low that they add nothing."""
        log_probs = torch.log_softmax(outputs, dim=-1)
        probs = log_probs.exp()
        values = critics(obs).amin(dim=0)
        return SoftValue((probs * values).sum(dim=-1), (probs * log_probs).sum(dim=-1))

    def random(self, noise: Tensor, action_mask: Tensor | None) -> Tensor:
        """Allowed actions with equal probability."""
        logits = torch.zeros(len(noise), self.distribution.n_outputs, device=noise.device)
        if action_mask is not None:
            logits = logits.masked_fill(~action_mask, FORBIDDEN)
        return self.distribution.sample(logits, noise)

    def target_entropy(self, action_mask: Tensor | None) -> float | Tensor:
        if action_mask is None:
            return ENTROPY_SHARE * math.log(self.distribution.n_outputs)
        return ENTROPY_SHARE * action_mask.sum(dim=-1).log().mean()


def soft_actions(
    space: gym.Space[Any], n_features: int, settings: ActionSettings
) -> BoxActions | DiscreteActions:
    """The way to value actions of ``space``; ``n_features`` is the input size of the head."""
    if isinstance(space, spaces.Discrete):
        return DiscreteActions(Categorical(space))
    if not isinstance(space, spaces.Box) or not math.prod(space.shape):
        raise ActionSpaceError(
            f"agent=sac: action space {space} is not a Box or Discrete; use agent=ppo, or "
            "agent=dqn if it is discrete"
        )
    if settings.box_policy == "squashed":
        return BoxActions(SquashedPolicy(space))
    every, log_std = settings.gsde_every_steps, settings.log_std_init
    return BoxActions(SquashedNoise(space, n_features, log_std_init=log_std, every_steps=every))
