"""NumpyDQN: acting and the gradient of DQN's loss for a plain MLP on the CPU, in NumPy.

It computes the same as ``DQNAgent``, up to rounding. At these sizes autograd and torch's dispatch
take several times as long as the arithmetic. Arguments are arrays or tensors, results are arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy import numpy_mlp, optimiser
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.distributions import FORBIDDEN, Categorical
from ml_pipeline.policy.numpy_mlp import (
    Array,
    Layer,
    Normaliser,
    Tower,
    has_hooks,
    is_mirrored,
    is_plain_linear,
)
from ml_pipeline.policy.optimiser import FlatAdam

MIRRORED: Mirrored = {
    **numpy_mlp.MIRRORED,
    **optimiser.MIRRORED,
    "ml_pipeline.algorithms.dqn.agent.dqn_loss": "27d694ff29f0",
    "ml_pipeline.algorithms.dqn.agent.ValueHead.__init__": "f865b774ce64",
    "ml_pipeline.algorithms.dqn.agent.ValueHead.quantiles": "9a7bb339a005",
    "ml_pipeline.algorithms.dqn.agent.ValueHead.forward": "fc5628d6ae49",
    "ml_pipeline.algorithms.dqn.agent.QNetwork.forward": "2680dec362c7",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent.sample_batch": "b84fae231340",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent.gradient_step": "796ade481a78",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent.plain_values": "31b0de1783ed",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent.plain_gradient": "055b4122cc07",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent._target": "0f8c9f397c3a",
    "ml_pipeline.algorithms.dqn.agent.DQNAgent._of_action": "a08ad22ebcf5",
    "ml_pipeline.policy.distributions.FORBIDDEN": "3c8f41129806",
    "ml_pipeline.policy.distributions._drawn": "cbae99a2e3ba",
    "ml_pipeline.policy.distributions.Categorical.by_choice": "90d492a1c5a6",
    "ml_pipeline.policy.distributions.Categorical.mode": "171dc9575fd1",
    "ml_pipeline.policy.distributions.Categorical.sample": "390dbe639409",
}


class _Values:
    """A network and its value head, with the given weights."""

    def __init__(self, model: Any, adam: FlatAdam, values: Tensor | None = None) -> None:
        self._trunk = Tower.without_head(model.trunk, "trunk", adam, values)
        self._advantage = Layer("head.advantage", adam, values)
        self._value = None if model.head.value is None else Layer("head.value", adam, values)

    def forward(self, x: Array) -> tuple[Array, list[Array]]:
        """Values [B, n_actions], and what ``backward`` needs."""
        passed = self._trunk.forward(x)
        values = self._advantage.forward(passed[-1])
        if self._value is not None:
            values -= np.add.reduce(values, axis=1, keepdims=True) / np.float32(values.shape[1])
            values += self._value.forward(passed[-1])
        return values, passed

    def backward(self, passed: list[Array], grad: Array) -> None:
        features, total = passed[-1], np.add.reduce(grad, axis=1, keepdims=True)
        if self._value is not None:
            self._value.write_gradient(features, total)
            grad = grad - total / np.float32(grad.shape[1])
        self._advantage.write_gradient(features, grad)
        upstream = grad @ self._advantage.weight
        if self._value is not None:
            upstream += total * self._value.weight
        self._trunk.backward(passed, upstream)


class NumpyDQN:
    """Values and gradients in NumPy; shares weights and gradients with the model."""

    @staticmethod
    def covers(model: Any, preprocess: Any, distribution: Any, config: DQNConfig) -> bool:
        """Whether the model is an MLP over one vector, with one choice and without quantiles."""
        return (
            is_mirrored(model.trunk)
            and is_plain_linear(model.head.advantage)
            and (model.head.value is None or is_plain_linear(model.head.value))
            and not has_hooks(model)
            and type(distribution) is Categorical
            and preprocess.is_vector
            and config.n_quantiles == 1
        )

    def __init__(
        self, model: Any, preprocess: Any, adam: FlatAdam, target: Tensor, config: DQNConfig
    ) -> None:
        """``target``: the flat weights of the target network."""
        self._online = _Values(model, adam)
        self._target = _Values(model, adam, target)
        self._prepared = Normaliser(preprocess)
        self._is_double = config.double
        self._n_actions = int(model.head.n_outputs)
        self._rows = np.arange(config.batch_size)

    def values(self, inputs: PolicyInput) -> Array:
        """Mean values, [B, n_actions]; very low for forbidden actions."""
        values, _ = self._online.forward(self._prepared(_array(inputs.obs)))
        return _masked(values, inputs.action_mask)

    def explore(self, inputs: PolicyInput, noise: Any, epsilon: float) -> NDArray[np.int64]:
        """The best actions, or with probability ``epsilon`` random allowed ones, [B]."""
        drawn = _array(noise)
        explores: NDArray[np.bool_] = drawn[:, 0] < epsilon
        n_exploring = np.count_nonzero(explores)
        if not n_exploring:
            return self._best(inputs)
        # The same draw as ``Categorical`` makes from equal values.
        shape, mask = (len(drawn), self._n_actions), inputs.action_mask
        allowed = np.ones(shape, np.float32) if mask is None else _array(mask).astype(np.float32)
        cumulative = allowed.cumsum(axis=1)
        threshold = drawn[:, 1] * cumulative[:, -1]
        which = (cumulative <= threshold[:, None]).sum(axis=1)
        random: NDArray[np.int64] = np.minimum(which, self._n_actions - 1)
        if n_exploring == len(drawn):
            return random
        return np.where(explores, random, self._best(inputs))

    def _best(self, inputs: PolicyInput) -> NDArray[np.int64]:
        best: NDArray[np.int64] = self.values(inputs).argmax(axis=1)
        return best

    def gradient(self, batch: ReplayBatch) -> tuple[float, float, Array]:
        """Write the gradients; returns the loss, the mean value and the TD errors [B]."""
        target = self._targets(batch)
        values, passed = self._online.forward(self._prepared(_array(batch.inputs.obs)))
        action, weight, n = _array(batch.action), _array(batch.weight), len(values)
        place = self._rows_of(values), action
        chosen = values[place]
        error = target - chosen
        clipped = np.minimum(np.maximum(error, -1.0), 1.0)
        huber = clipped * (error - 0.5 * clipped)
        grad = np.zeros((n, self._n_actions), np.float32)
        grad[place] = -clipped * weight / np.float32(n)
        self._online.backward(passed, grad)
        loss = float(huber.dot(weight)) / n
        mean = float(np.add.reduce(chosen)) / n
        return loss, mean, np.abs(error)

    def _targets(self, batch: ReplayBatch) -> Array:
        """The return after each window, [B]."""
        x = self._prepared(_array(batch.next_inputs.obs))
        values, _ = self._target.forward(x)
        scored = self._online.forward(x)[0] if self._is_double else values
        best = _masked(scored, batch.next_inputs.action_mask).argmax(axis=1)
        future = values[self._rows_of(values), best]
        target: Array = _array(batch.reward) + _array(batch.discount) * future
        return target

    def _rows_of(self, values: Array) -> NDArray[np.int64]:
        if len(self._rows) != len(values):
            self._rows = np.arange(len(values))
        return self._rows


def _masked(values: Array, mask: Any) -> Array:
    return values if mask is None else np.where(_array(mask), values, np.float32(FORBIDDEN))


def _array(values: Any) -> Any:
    return values if type(values) is np.ndarray else values.numpy()
