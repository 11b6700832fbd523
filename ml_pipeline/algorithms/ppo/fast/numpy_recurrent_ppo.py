"""RecurrentNumpyPPO: ``NumpyPPO`` for two recurrent networks, each an LSTM or GRU over an MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.fast.numpy_ppo import NumpyPPO, as_array
from ml_pipeline.algorithms.ppo.loss import Minibatch
from ml_pipeline.policy.actor_critic import ActorCritic
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.numpy_mlp import Array
from ml_pipeline.policy.numpy_recurrent import (
    MIRRORED,
    RecurrentTowers,
    Steps,
    is_mirrored_recurrent,
)
from ml_pipeline.policy.optimiser import Optimiser
from ml_pipeline.policy.recurrent import Recurrent


class RecurrentNumpyPPO(NumpyPPO):
    """Acts step by step; scores and learns from whole sequences, [T, B, ...]."""

    also_mirrored = MIRRORED

    @staticmethod
    def _covers_trunks(actor: nn.Module, critic: nn.Module) -> bool:
        return all(map(is_mirrored_recurrent, (actor, critic))) and repr(actor.cell) == repr(
            critic.cell
        )

    def _build(self, model: ActorCritic, adam: Optimiser) -> None:
        actor, critic = cast("Recurrent", model.actor), cast("Recurrent", model.critic)
        self.towers = RecurrentTowers(actor, critic, adam)

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        x, mask = self._sequences(inputs), inputs.action_mask
        flat_mask = None if mask is None else _flat(mask)
        log_prob, value = self._scores(x, flat_mask, _flat(action))
        shape = x.start.shape
        return torch.from_numpy(log_prob.reshape(shape)), torch.from_numpy(value.reshape(shape))

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        return torch.from_numpy(self._forward(self._one_step(inputs))[1][:, 0])

    def _policy(self, inputs: PolicyInput) -> tuple[Array, Tensor | None]:
        outputs, _, kept = self._forward(self._one_step(inputs))
        return outputs, torch.from_numpy(self.towers.memory(kept))

    def _forward(self, x: Any) -> tuple[Array, Array, Any]:
        return self.towers.forward(x)

    def _backward(self, kept: Any, grad: Array, value_grad: Array) -> None:
        self.towers.backward(kept, [grad, value_grad])

    def _minibatches(self, rollout: Minibatch, parts: Sequence[Any]) -> Iterator[Minibatch]:
        """Whole sequences of some envs."""
        memory: Any = as_array(rollout.inputs.memory)
        for index in parts:

            def gathered(field: Tensor) -> Any:
                return field.numpy().take(index, axis=1)  # noqa: B023

            yield rollout.mapped(gathered, memory.take(index, axis=0))

    def _flattened(self, batch: Minibatch) -> tuple[Steps, Minibatch]:
        flat: Any = _flat
        return self._sequences(batch.inputs), batch.mapped(flat, None)

    def _sequences(self, inputs: PolicyInput) -> Steps:
        x = self.prepared(_flat(inputs.obs))
        return Steps(x, as_array(inputs.episode_start), as_array(inputs.memory))

    def _one_step(self, inputs: PolicyInput) -> Steps:
        """One step of all envs as a sequence of length 1."""
        start = as_array(inputs.episode_start)[None]
        return Steps(self.prepared(as_array(inputs.obs)), start, as_array(inputs.memory))


def _flat(sequences: Any) -> NDArray[Any]:
    """[T * B, ...] from [T, B, ...]."""
    array = as_array(sequences)
    return array.reshape(-1, *array.shape[2:])
