"""Tower: an MLP on the CPU in NumPy, with the weights and gradients of the torch module."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.observations import Preprocess
from ml_pipeline.policy.optimiser import FlatParameters

Array = NDArray[np.float32]

# OpenBLAS takes twice as long for a few rows times a large transposed matrix as for the transposed
# product: 98 and 50 microseconds for 8 rows and 256 x 256 weights.
_FEW_ROWS, _WIDE = 32, 2**16

# What ``Tower`` and ``Normaliser`` repeat.
MIRRORED: Mirrored = {
    "ml_pipeline.policy.networks._ACTIVATIONS": "6fb51b64ffd8",
    "ml_pipeline.policy.networks.MLP.__init__": "75d83bcb29c8",
    "ml_pipeline.policy.networks.MLP.forward": "b5dcb0c3f503",
    "ml_pipeline.policy.observations.Preprocess.forward": "8d79f94e61d7",
    "ml_pipeline.policy.observations.Preprocess._prepared": "dad55202b3fc",
    "ml_pipeline.policy.observations._one_hots": "b0ffdeefbfe6",
    "ml_pipeline.policy.observations.RunningMoments.normalised": "d3c53a9f569b",
}


def is_mirrored(trunk: nn.Module) -> bool:
    """Whether ``Tower`` covers a network: an MLP of tanh or relu, to which nothing was added."""
    if type(trunk) is not MLP or trunk.activation not in ("tanh", "relu"):
        return False
    activation = nn.Tanh if trunk.activation == "tanh" else nn.ReLU
    layers = list(trunk.layers)
    kinds = [type(each) for each in layers]
    are_plain = all(is_plain_linear(each) for each in layers[::2])
    return are_plain and kinds == [nn.Linear, activation] * (len(kinds) // 2)


def is_plain_linear(layer: nn.Module | None) -> bool:
    """Whether ``Layer`` covers a layer: dense, with a bias, and trained."""
    return (
        type(layer) is nn.Linear
        and layer.bias is not None
        and all(each.requires_grad for each in layer.parameters())
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a user's hook wants to see or change what a module computes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(each, name) for each in module.modules() for name in hooks)


class Layer:
    """Weights of a dense layer and room for their gradients, as views of torch tensors."""

    def __init__(self, name: str, adam: FlatParameters, values: Tensor | None = None) -> None:
        """``values``: use these weights, which are laid out as those of ``adam``."""
        arrays = []
        for each in ("weight", "bias"):
            own, grad = adam.views[f"{name}.{each}"]
            if values is not None:
                start = adam.place(f"{name}.{each}")
                own = values[start : start + own.numel()].view_as(own)
            arrays += [own.numpy(), grad.numpy()]
        self.weight, self.weight_grad, self.bias, self.bias_grad = arrays  # weight: [out, in]

    def forward(self, x: Array) -> Array:
        z: Array
        if len(x) <= _FEW_ROWS and self.weight.size >= _WIDE:
            z = np.ascontiguousarray((self.weight @ x.T).T)
        else:
            z = x @ self.weight.T
        z += self.bias
        return z

    def backward(self, grad: Array) -> Array:
        """The gradient of the input, from ``grad``, that of the output."""
        # BLAS takes four times as long as ``*`` for a product of two vectors.
        upstream: Array = grad * self.weight if len(self.weight) == 1 else grad @ self.weight
        return upstream

    def write_gradient(self, x: Array, grad: Array) -> None:
        """``grad`` is the gradient of the output for the input ``x``."""
        np.matmul(grad.T, x, out=self.weight_grad)
        np.add.reduce(grad, axis=0, out=self.bias_grad)


class Tower:
    """The layers of an MLP, and its head if it has one."""

    def __init__(self, layers: list[Layer], *, is_tanh: bool, has_head: bool) -> None:
        self.layers = layers
        self._tanh = is_tanh
        self._has_head = has_head

    @classmethod
    def with_head(cls, trunk: MLP, trunk_name: str, head_name: str, adam: FlatParameters) -> Tower:
        layers = [Layer(name, adam) for name in [*_layer_names(trunk, trunk_name), head_name]]
        return cls(layers, is_tanh=trunk.activation == "tanh", has_head=True)

    @classmethod
    def without_head(
        cls, trunk: MLP, trunk_name: str, adam: FlatParameters, values: Tensor | None = None
    ) -> Tower:
        layers = [Layer(name, adam, values) for name in _layer_names(trunk, trunk_name)]
        return cls(layers, is_tanh=trunk.activation == "tanh", has_head=False)

    def forward(self, x: Array) -> list[Array]:
        """The input of each layer, and the output of the last."""
        passed = [x]
        for layer in self.layers[:-1] if self._has_head else self.layers:
            z = layer.forward(passed[-1])
            passed.append(np.tanh(z, out=z) if self._tanh else np.maximum(z, 0.0, out=z))
        if self._has_head:
            passed.append(self.layers[-1].forward(passed[-1]))
        return passed

    def backward(self, passed: list[Array], grad: Array) -> None:
        """Write the gradients of all layers; ``grad`` is the gradient of the output."""
        if not self._has_head:
            grad = grad * self._slope(passed[-1])
        for depth in range(len(self.layers) - 1, -1, -1):
            layer, x = self.layers[depth], passed[depth]
            layer.write_gradient(x, grad)
            if depth:
                grad = layer.backward(grad)
                grad *= self._slope(x)

    def _slope(self, activated: Array) -> Any:
        if not self._tanh:
            return activated > 0
        slope = activated * activated
        return np.subtract(1.0, slope, out=slope)


def _layer_names(trunk: MLP, trunk_name: str) -> list[str]:
    places = [i for i, each in enumerate(trunk.layers) if isinstance(each, nn.Linear)]
    return [f"{trunk_name}.layers.{place}" for place in places]


class _Choices:
    """One-hot vectors of choices of these sizes, one after the other."""

    def __init__(self, sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        self._n_columns = int(sizes.sum())
        self._shift = sizes.cumsum() - sizes - starts  # from a choice to its column

    @classmethod
    def of(cls, space: gym.Space[Any]) -> _Choices | None:
        """Those of a Discrete or MultiDiscrete space, or None."""
        if isinstance(space, spaces.Discrete):
            return cls(np.array([space.n]), np.array([space.start]))
        if isinstance(space, spaces.MultiDiscrete):
            return cls(space.nvec.flatten(), space.start.flatten())
        return None

    def one_hot(self, obs: Any) -> Array:
        """[B, n_columns] from choices [B, ...]."""
        columns = obs.reshape(len(obs), -1) + self._shift
        if columns.min(initial=0) < 0:  # NumPy would count from the end
            raise IndexError("an observation is below the first choice of its space")
        vectors = np.zeros((len(obs), self._n_columns), np.float32)
        vectors[np.arange(len(obs))[:, None], columns] = 1.0
        return vectors


class Normaliser:
    """``Preprocess`` for one space of numbers or choices, in NumPy."""

    def __init__(self, preprocess: Preprocess) -> None:
        self._choices = _Choices.of(preprocess.leaves[""])
        moments = preprocess.moments_of("")
        self._preprocess = preprocess
        self._moments = None
        if moments is not None:
            self._moments = moments.mean.numpy(), moments.variance.numpy(), moments.count.numpy()

    def __call__(self, obs: Any) -> Array:
        if self._choices is not None:
            return self._choices.one_hot(obs)
        flat: Array = obs.reshape(len(obs), -1).astype(np.float32, copy=False)
        if self._moments is None:
            return flat
        mean, variance, count = self._moments
        normalised: Array = (flat - mean.ravel()) / np.sqrt(variance.ravel() + np.float32(1e-8))
        if not count:  # before the first rollout the deviation is unknown: do not clip
            return normalised
        # Faster than np.clip for a few numbers.
        clip = np.float32(self._preprocess.clip)
        np.maximum(normalised, -clip, out=normalised)
        np.minimum(normalised, clip, out=normalised)
        return normalised
