"""ppo_loss: the clipped objective of PPO, its value loss and its entropy bonus."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.records import Minibatch, Rates


class LossTerms(NamedTuple):
    """Scalars: ``total`` is differentiated, the others are logged."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor


def ppo_loss(
    log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    batch: Minibatch,
    rates: Rates,
    config: PPOConfig,
) -> LossTerms:
    """The loss of one minibatch; ``agent.loss._target_`` may name another function.

    ``log_prob``, ``entropy`` and ``value`` are those of the current networks, [B] each.
    """
    clip_range = rates.clip_range
    ratio = (log_prob - batch.log_prob).exp()
    advantage = normalised(batch.advantage) if config.normalize_advantage else batch.advantage
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    gain = torch.min(advantage * ratio, advantage * clipped)
    if config.dual_clip is not None:
        floor = torch.where(advantage < 0, advantage * config.dual_clip, -torch.inf)
        gain = torch.max(gain, floor)
    policy_loss = -gain.mean()
    squared = (value - batch.value_target).square()
    if config.clip_value_loss:
        moved = (value - batch.value).clamp(-clip_range, clip_range)
        squared = torch.max(squared, (batch.value + moved - batch.value_target).square())
    value_loss = 0.5 * squared.mean()
    mean_entropy = entropy.mean()
    total = policy_loss + config.value_coef * value_loss - rates.entropy_coef * mean_entropy
    return LossTerms(total, policy_loss, value_loss, mean_entropy)


def normalised(advantage: Tensor) -> Tensor:
    """Zero mean and unit variance over the minibatch."""
    centred = advantage - advantage.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


@torch.no_grad()
def policy_change(log_prob: Tensor, batch: Minibatch, clip_range: float) -> tuple[Tensor, Tensor]:
    """Approximate KL divergence since the rollout, and the share of clipped ratios."""
    log_ratio = log_prob - batch.log_prob
    ratio = log_ratio.exp()
    # Schulman's estimator: never negative, and less noisy than the mean log ratio.
    approx_kl = (ratio - 1.0 - log_ratio).mean()
    return approx_kl, ((ratio - 1.0).abs() > clip_range).float().mean()
