"""Networks: from observations to features. ``MLP`` is the default.

A network is an ``nn.Module`` that a config names by its dotted path:

- The constructor takes ``observation_space``, a Box or a flat Dict of Boxes, and any config keys.
- ``forward`` maps float observations [B, *obs] to features [B, out_features].
  For a Dict space, the observation is a dict of tensors.
- The attribute ``out_features`` holds the number of features.
- A recurrent network also has ``state_size``, and ``forward`` as in ``recurrent.Recurrent``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import Obs

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


class MLP(nn.Module):
    """Dense layers over the flattened observation; the leaves of a Dict are concatenated."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        layer_norm: bool = False,
    ) -> None:
        """``layer_norm``: normalise the inputs of every activation over the units of the layer."""
        super().__init__()
        self.activation = activation
        make_activation = activation_class(activation)
        check_sizes("hidden_sizes", hidden_sizes)
        leaves = [observation_space]
        if isinstance(observation_space, spaces.Dict):
            leaves = list(observation_space.values())
        sizes = [sum(math.prod(leaf.shape or ()) for leaf in leaves), *hidden_sizes]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            norm = [nn.LayerNorm(n_out)] if layer_norm else []
            layers += [nn.Linear(n_in, n_out), *norm, make_activation()]
        self.layers = nn.Sequential(*layers)
        self.out_features = sizes[-1]

    def forward(self, obs: Obs) -> Tensor:
        leaves = [obs] if isinstance(obs, Tensor) else list(obs.values())
        # Not len(leaf): it would fix the batch size of an exported graph.
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
        features: Tensor = self.layers(flat[0] if len(flat) == 1 else torch.cat(flat, dim=1))
        return features


def out_features(network: nn.Module) -> int:
    """The network's number of features; raises if it does not declare one."""
    size = getattr(network, "out_features", None)
    if not isinstance(size, (int, np.integer)):
        raise UserError(
            f"network {type(network).__name__} has no out_features; set it in the constructor "
            "to the number of features that forward returns"
        )
    return int(size)


def activation_class(name: str) -> type[nn.Module]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be {' | '.join(_ACTIVATIONS)}, got {name}")
    return _ACTIVATIONS[name]


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
    if not is_list or any(not isinstance(size, int) or size < 1 for size in sizes):
        form = "" if is_list else ", a list such as [64,64]"
        raise ValueError(f"{name} must be positive layer sizes{form}, got {sizes}")
