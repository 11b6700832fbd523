"""Robust policy optimisation (Rahman and Xue, 2022): the policy's mean is perturbed in the update.

    python train_ppo.py agent.loss._target_=ml_pipeline.algorithms.ppo.ideas.rpo.rpo_loss

The noise keeps the policy from becoming certain too early. It is added to the means of a Gaussian.
For a choice it is added to the logits, which the paper does not try.
"""

from __future__ import annotations

from ml_pipeline import counter_random
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Current, LossTerms, Minibatch, Rates, ppo_loss


def rpo_loss(
    now: Current, batch: Minibatch, rates: Rates, config: PPOConfig, *, alpha: float = 0.5
) -> LossTerms:
    """``ppo_loss`` with uniform noise from -``alpha`` to ``alpha`` on the policy's outputs."""
    n_outputs = now.model.distribution.n_outputs  # those of gSDE are followed by the features
    shifted = now.outputs.clone()
    noise = 2.0 * counter_random.rand(now.key, shifted[..., :n_outputs].shape) - 1.0
    shifted[..., :n_outputs] += alpha * noise
    return ppo_loss(now.with_outputs(shifted, batch.action), batch, rates, config)
