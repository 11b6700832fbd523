"""Networks: from observations to features.

Any ``nn.Module`` can stand here by dotted path if its constructor takes ``observation_space``
(and what the config gives it), ``forward`` maps [B, *obs] to [B, out_features], and it has that
number as an attribute. Observations come as floats: a tensor, or of a Dict or Tuple observation
a dict of tensors by leaf; ``observation_space`` says the same, a Box or a flat Dict of them.

A network with a memory has ``state_size`` besides, and its ``forward`` takes a sequence: see
``Recurrent``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.agents.observations import map_obs
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Obs
from ml_pipeline.targets import instantiate

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


class MLP(nn.Module):
    """Dense layers over the flattened observation; leaves of a Dict lie side by side."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        self.activation = activation
        make_activation = _checked_activation(activation)
        _check_sizes("hidden_sizes", hidden_sizes)
        sizes = [sum(map(math.prod, _shapes(observation_space))), *hidden_sizes]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), make_activation()]
        self.layers = nn.Sequential(*layers)
        self.out_features = sizes[-1]

    def forward(self, obs: Obs) -> Tensor:
        leaves = [obs] if isinstance(obs, Tensor) else list(obs.values())
        # Not len(leaf), which would tie an exported graph to one size of batch.
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
        features: Tensor = self.layers(flat[0] if len(flat) == 1 else torch.cat(flat, dim=1))
        return features


class CNN(nn.Module):
    """Convolutions over one image, then a dense layer; the sizes of the Nature DQN by default.

    The shortest side of a rank-3 image holds its channels, the first one of two as short.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        channels: Sequence[int] = (32, 64, 64),
        kernels: Sequence[int] = (8, 4, 3),
        strides: Sequence[int] = (4, 2, 1),
        hidden_size: int = 512,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        make_activation = _checked_activation(activation)
        for name, sizes in (("channels", channels), ("kernels", kernels), ("strides", strides)):
            _check_sizes(name, sizes)
            if len(sizes) != len(channels):
                raise ValueError(f"{name} must have one item per layer, got {sizes}")
        _check_sizes("hidden_size", [hidden_size])
        shape = observation_space.shape
        if shape is None or len(shape) not in (2, 3):
            raise ValueError(
                "observation_space must be one image (a Box of rank 2 or 3), got "
                f"{observation_space}; network=dict takes images and vectors together"
            )
        self._channel_dim = None if len(shape) == 2 else shape.index(min(shape))
        if self._channel_dim == 1:
            raise ValueError(f"observation_space has its channels in the middle: {shape}")
        n_channels = 1 if self._channel_dim is None else shape[self._channel_dim]
        height, width = [n for i, n in enumerate(shape) if i != self._channel_dim]
        layers: list[nn.Module] = []
        for n_out, kernel, stride in zip(channels, kernels, strides, strict=True):
            if min(height, width) < kernel:
                raise ValueError(
                    f"kernels {list(kernels)} with strides {list(strides)} are too large for an "
                    f"image of shape {shape}; choose smaller ones"
                )
            layers += [nn.Conv2d(n_channels, n_out, kernel, stride), make_activation()]
            n_channels = n_out
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
        layers += [nn.Flatten(), nn.Linear(n_channels * height * width, hidden_size)]
        self.layers = nn.Sequential(*layers, make_activation())
        self.out_features = hidden_size

    def forward(self, obs: Tensor) -> Tensor:
        if self._channel_dim is None:
            obs = obs.unsqueeze(1)
        elif self._channel_dim == 2:
            obs = obs.permute(0, 3, 1, 2)
        if obs.is_cuda and torch.backends.cudnn.allow_tf32:
            # The matrix units want the channels last; kernels in float32 are slower that way.
            obs = obs.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.layers(obs)
        return features


class DictNetwork(nn.Module):
    """Any observation: a CNN for each image, then an MLP over their features and all else."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        cnn: Mapping[str, Any] | None = None,
    ) -> None:
        """``cnn``: arguments of ``CNN`` other than its defaults."""
        super().__init__()
        leaves = {"": observation_space}
        if isinstance(observation_space, spaces.Dict):
            leaves = dict(observation_space.items())
        self._images = [name for name, leaf in leaves.items() if _looks_like_image(leaf)]
        self.cnns = nn.ModuleList(CNN(leaves[name], **dict(cnn or {})) for name in self._images)
        joined = {name: leaf for name, leaf in leaves.items() if name not in self._images}
        for name, each in zip(self._images, self.cnns, strict=True):
            joined[name] = spaces.Box(-math.inf, math.inf, (out_features(each),))
        # One after the other, not side by side: an image may mean what a number says it means.
        self.mlp = MLP(spaces.Dict(joined), hidden_sizes, activation)
        self._order = list(spaces.Dict(joined))
        self.out_features = self.mlp.out_features

    def forward(self, obs: Obs) -> Tensor:
        leaves = {"": obs} if isinstance(obs, Tensor) else dict(obs)
        for name, cnn in zip(self._images, self.cnns, strict=True):
            leaves[name] = cnn(leaves[name])
        features: Tensor = self.mlp({name: leaves[name] for name in self._order})
        return features


class Recurrent(nn.Module):
    """An LSTM or GRU over the features of an encoder, which may be any network without memory."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        cell: str = "lstm",
        size: int = 64,
        encoder: Mapping[str, Any] | None = None,
    ) -> None:
        """``encoder``: a _target_ entry; None is a ``DictNetwork``, which takes anything."""
        super().__init__()
        if cell not in ("lstm", "gru"):
            raise ValueError(f"cell must be lstm | gru, got {cell}")
        _check_sizes("size", [size])
        entry = encoder or {"_target_": "ml_pipeline.agents.networks.DictNetwork"}
        offers = {"observation_space": observation_space}
        self.encoder: nn.Module = instantiate(entry, key="network.encoder", offers=offers)
        # All parameters lie in one tensor (FlatAdam), which is not the one that cuDNN would choose.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
        self.cell = (nn.LSTM if cell == "lstm" else nn.GRU)(out_features(self.encoder), size)
        self.out_features = size
        self.state_size = 2 * size if cell == "lstm" else size

    def forward(self, obs: Obs, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, B, out_features] of obs [T, B, ...], and the state after the last step.

        ``state`` [B, state_size] is the one before the first step; where ``episode_start``
        [T, B] is set, it begins anew.
        """
        n_steps, n_envs = episode_start.shape
        encoded = self.encoder(map_obs(lambda leaf: leaf.flatten(0, 1), obs)).unflatten(
            0, (n_steps, n_envs)
        )
        # The cell runs through a stretch of steps at once; a new one begins where an episode does.
        begins = episode_start[1:].any(dim=1).nonzero().flatten().tolist() if n_steps > 1 else []
        bounds = [0, *(begin + 1 for begin in begins), n_steps]
        features = []
        for first, end in pairwise(bounds):
            # Not multiplied by 0, which would keep a NaN.
            state = state.masked_fill(episode_start[first].unsqueeze(-1), 0.0)
            stretch, state = self._run(encoded[first:end], state)
            features.append(stretch)
        return features[0] if len(features) == 1 else torch.cat(features), state

    def _run(self, encoded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.cell, nn.GRU):
            features, hidden = self.cell(encoded, state.unsqueeze(0))
            return features, hidden[0]
        hidden, carried = (half.contiguous().unsqueeze(0) for half in state.chunk(2, dim=-1))
        features, (hidden, carried) = self.cell(encoded, (hidden, carried))
        return features, torch.cat([hidden[0], carried[0]], dim=-1)


def init_orthogonal(module: nn.Module, *, gain: float, generator: torch.Generator) -> None:
    """Orthogonal weights and zero biases for every layer inside ``module``; 1 is a cell's gain."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.RNNBase):
            for name, parameter in layer.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter, 1.0, generator=generator)
                else:
                    nn.init.zeros_(parameter)


def out_features(network: nn.Module) -> int:
    """What the network says of itself; one line on how to mend one that says nothing."""
    size = getattr(network, "out_features", None)
    if not isinstance(size, (int, np.integer)):
        raise UserError(
            f"network {type(network).__name__} has no out_features; set it in its constructor "
            "to the size of what forward returns"
        )
    return int(size)


def _shapes(space: gym.Space[Any]) -> list[tuple[int, ...]]:
    leaves = list(space.values()) if isinstance(space, spaces.Dict) else [space]
    return [leaf.shape or () for leaf in leaves]


def _looks_like_image(space: gym.Space[Any]) -> bool:
    shape = space.shape or ()
    # Rank 3, or a plane between 0 and 1, as bytes come out of the preprocessing.
    return len(shape) == 3 or (len(shape) == 2 and bool((space.high == 1).all()))  # type: ignore[attr-defined]


def _checked_activation(activation: str) -> type[nn.Module]:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be {' | '.join(_ACTIVATIONS)}, got {activation}")
    return _ACTIVATIONS[activation]


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    given = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
    if not given or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"{name} must be positive layer sizes, got {sizes}")
