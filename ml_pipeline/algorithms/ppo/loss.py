"""ppo_loss: the clipped objective of PPO, its value loss and its entropy bonus.

Also what a gradient step reads and returns: ``Minibatch``, ``Current``, ``Rates``, ``LossTerms``
and ``UpdateResult``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.policy.actor_critic import ActorCritic, Passed
from ml_pipeline.policy.contracts import PolicyInput


class Minibatch(NamedTuple):
    """Transitions for one gradient step of an on-policy agent.

    For a recurrent policy each field has the shape [T, B, ...]: whole sequences.
    """

    inputs: PolicyInput
    action: Tensor  # [B, *act]
    log_prob: Tensor  # [B], at sampling time
    value: Tensor  # [B], at sampling time
    advantage: Tensor  # [B], not normalised
    value_target: Tensor  # [B]

    def mapped(self, function: Callable[[Tensor], Tensor], memory: Tensor | None) -> Minibatch:
        """Apply ``function`` to every field with a step axis; ``memory`` has none."""
        inputs = self.inputs.mapped(function, memory)
        return Minibatch(inputs, *(function(field) for field in self[1:]))

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        obs, *rest = self.inputs
        leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
        return [*leaves, *(each for each in rest if each is not None), *self[1:]]

    def take(self, index: Tensor) -> Minibatch:
        """The transitions, or for a recurrent policy the sequences, at ``index``."""
        memory = self.inputs.memory
        if memory is None:
            return self.mapped(lambda field: field[index], None)
        return self.mapped(lambda field: field[:, index], memory[index])


class Rates(NamedTuple):
    """The annealed settings at their current values.

    On a device they are views of one tensor, which a captured graph reads in every replay.
    """

    learning_rate: Any
    clip_range: Any
    entropy_coef: Any


class UpdateResult(NamedTuple):
    """Metrics of one gradient step; ``epoch`` returns one row per step instead.

    0-d tensors, or plain numbers if the gradient step has waited for the result anyway.
    """

    policy_loss: Any
    value_loss: Any
    entropy: Any
    approx_kl: Any
    clip_fraction: Any
    grad_norm: Any
    finite: Any  # 0 if loss or gradient was not finite; such a step changes nothing
    extra: Mapping[str, Any] = {}  # ``LossTerms.extra``


COLUMNS = UpdateResult._fields[:-1]  # of an epoch's table, after those of ``extra``


class Current(NamedTuple):
    """What the current networks say about a minibatch, with gradients; recurrent: [T, B, ...]."""

    log_prob: Tensor  # [B], of the minibatch's actions
    entropy: Tensor  # [B]
    value: Tensor  # [B]
    outputs: Tensor  # [B, n_outputs], for the distribution: logits, or means of a Gaussian
    features: Tensor  # [B, n], the output of the actor's network
    value_features: Tensor  # [B, n], that of the critic's network
    model: ActorCritic
    run: Callable[[PolicyInput], Passed]  # the networks, in the precision of the run
    key: Tensor  # for ``counter_random``: another number in every step and on every rank

    def on(self, batch: Minibatch) -> Current:
        """The same networks on another minibatch, for example a mirrored one."""
        return current(self.model, self.run, batch, self.key)

    def with_outputs(self, outputs: Tensor, action: Tensor) -> Current:
        """As if the policy had returned ``outputs``."""
        log_prob, entropy = self.model.distribution.log_prob_and_entropy(outputs, action)
        return self._replace(log_prob=log_prob, entropy=entropy, outputs=outputs)


def current(
    model: ActorCritic, run: Callable[[PolicyInput], Passed], batch: Minibatch, key: Tensor
) -> Current:
    """Run both networks on a minibatch."""
    passed = run(batch.inputs)
    outputs = passed.outputs.float()
    scores = model.distribution.log_prob_and_entropy(outputs, batch.action)
    features = passed.features, passed.value_features
    return Current(*scores, passed.value.float(), outputs, *features, model, run, key)


class LossTerms(NamedTuple):
    """Scalars: ``total`` is differentiated, the others are logged."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    extra: Mapping[str, Tensor] = {}  # more metrics by name, the same in every call


def ppo_loss(now: Current, batch: Minibatch, rates: Rates, config: PPOConfig) -> LossTerms:
    """The loss of one minibatch; ``agent.loss._target_`` may name another function."""
    log_prob, entropy, value, *_ = now
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
    """Zero mean and unit variance over the minibatch; a single advantage is left as it is."""
    if advantage.numel() == 1:
        return advantage
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
