"""How SAC values the actions that its actor would take: ``BoxActions`` and ``DiscreteActions``.

For a Box it samples one action per state. Of discrete actions it knows every value and every
probability, so expectations are exact and need no sampling (Christodoulou, 2019).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.networks import Critic, Critics, DiscreteCritic
from ml_pipeline.algorithms.replay.update_noise import UpdateNoise
from ml_pipeline.algorithms.sac.squashed import SquashedNoise, SquashedPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Obs
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    ActionSettings,
    ActionSpaceError,
    Categorical,
)

# The default target entropy as a share of log(n), the entropy of an even choice between n actions.
# At 0.5 a policy is as random as an even choice between sqrt(n) actions: two actions have 89% and
# 11%. With the paper's 0.98 they would need 58% and 42%, which is too random to act well.
ENTROPY_SHARE = 0.5


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
            f"agent=sac: action space {space} is not a Box or Discrete; use agent=dqn"
        )
    if settings.box_policy == "squashed":
        return BoxActions(SquashedPolicy(space))
    every, log_std = settings.gsde_every_steps, settings.log_std_init
    return BoxActions(SquashedNoise(space, n_features, log_std_init=log_std, every_steps=every))
