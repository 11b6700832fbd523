"""Minibatch, Rates and UpdateResult: what a gradient step of PPO reads and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

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
