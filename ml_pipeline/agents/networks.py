"""Networks: from observations to features.

Any ``nn.Module`` can stand here by dotted path if its constructor takes ``observation_space``
(and what the config gives it), ``forward`` maps [B, *obs] to [B, out_features], and it has that
number as an attribute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


class MLP(nn.Module):
    """Dense layers over a flattened Box observation."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            known = " | ".join(_ACTIVATIONS)
            raise ValueError(f"activation must be {known}, got {activation}")
        sizes_given = isinstance(hidden_sizes, Sequence) and len(hidden_sizes) > 0
        if not sizes_given or any(not isinstance(s, int) or s < 1 for s in hidden_sizes):
            raise ValueError(f"hidden_sizes must be positive layer sizes, got {hidden_sizes}")
        sizes = [math.prod(observation_space.shape or ()), *hidden_sizes]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), _ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers)
        self.out_features = sizes[-1]

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.layers(obs.reshape(len(obs), -1))
        return features


def init_orthogonal(module: nn.Module, *, gain: float, generator: torch.Generator) -> None:
    """Orthogonal weights and zero biases for every dense layer inside ``module``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
