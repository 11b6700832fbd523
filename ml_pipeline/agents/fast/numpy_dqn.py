"""NumpyDQN: acting and the gradient of DQN's loss for a plain MLP on the CPU, in NumPy.

It computes the same as ``TorchDQN``, up to rounding. At these sizes autograd and torch's dispatch
take several times as long as the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml_pipeline.agents.adam import FlatAdam
from ml_pipeline.agents.distributions import FORBIDDEN, Categorical
from ml_pipeline.agents.fast.numpy_mlp import Array, Layer, Normaliser, Tower
from ml_pipeline.agents.networks import MLP
from ml_pipeline.config.dqn import DQNConfig
from ml_pipeline.protocols import PolicyInput, ReplayBatch


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
        """Whether the model is an MLP over one Box, with one choice and without quantiles."""
        return (
            type(model.trunk) is MLP
            and model.trunk.activation in ("tanh", "relu")
            and type(distribution) is Categorical
            and preprocess.is_plain
            and config.n_quantiles == 1
        )

    def __init__(
        self, model: Any, preprocess: Any, adam: FlatAdam, target: Tensor, config: DQNConfig
    ) -> None:
        """``target``: the flat weights of the target network."""
        self._online = _Values(model, adam)
        self._target = _Values(model, adam, target)
        self._prepared = Normaliser(preprocess, config.clip_obs)
        self._is_double = config.double
        self._n_actions = int(model.head.n_outputs)

    def values(self, inputs: PolicyInput) -> Tensor:
        """Mean values, [B, n_actions]; very low for forbidden actions."""
        values, _ = self._online.forward(self._prepared(_numpy(inputs.obs)))
        return torch.from_numpy(_masked(values, inputs.action_mask))

    def explore(self, inputs: PolicyInput, noise: Tensor, epsilon: float) -> Tensor:
        """The best actions, or with probability ``epsilon`` random allowed ones, [B]."""
        drawn: Array = noise.numpy()
        explores = drawn[:, 0] < epsilon
        mask = None if inputs.action_mask is None else _numpy(inputs.action_mask)
        if explores.all():
            action = np.zeros(len(drawn), np.int64)
        else:
            action = _numpy(self.values(inputs)).argmax(axis=1)
        if explores.any():
            # The same draw as ``Categorical`` makes from equal values.
            allowed = np.ones((len(drawn), self._n_actions)) if mask is None else mask
            cumulative = allowed.astype(np.float32).cumsum(axis=1)
            threshold = drawn[:, 1] * cumulative[:, -1]
            which = (cumulative <= threshold[:, None]).sum(axis=1)
            random = np.minimum(which, self._n_actions - 1)
            action = np.where(explores, random, action)
        return torch.from_numpy(action)

    def gradient(self, batch: ReplayBatch) -> tuple[float, float, Tensor]:
        """Write the gradients; returns the loss, the mean value and the TD errors [B]."""
        target = self._targets(batch)
        values, passed = self._online.forward(self._prepared(_numpy(batch.inputs.obs)))
        rows = np.arange(len(values))
        action, weight = _numpy(batch.action), _numpy(batch.weight)
        chosen = values[rows, action]
        error = target - chosen
        size = np.abs(error)
        huber = np.where(size < 1.0, 0.5 * error * error, size - 0.5)
        grad = np.zeros_like(values)
        slope = -np.minimum(np.maximum(error, -1.0), 1.0)
        grad[rows, action] = slope * weight / np.float32(len(values))
        self._online.backward(passed, grad)
        loss = float(huber @ weight) / len(values)
        mean = float(np.add.reduce(chosen)) / len(values)
        return loss, mean, torch.from_numpy(size)

    def _targets(self, batch: ReplayBatch) -> Array:
        """The return after each window, [B]."""
        x = self._prepared(_numpy(batch.next_inputs.obs))
        values, _ = self._target.forward(x)
        scored = self._online.forward(x)[0] if self._is_double else values
        best = _masked(scored, batch.next_inputs.action_mask).argmax(axis=1)
        future = values[np.arange(len(values)), best]
        target: Array = _numpy(batch.reward) + _numpy(batch.discount) * future
        return target


def _masked(values: Array, mask: Tensor | None) -> Array:
    return values if mask is None else np.where(_numpy(mask), values, np.float32(FORBIDDEN))


def _numpy(tensor: Any) -> Any:
    return tensor.numpy()
