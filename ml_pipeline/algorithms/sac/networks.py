"""The parts of SAC's networks that are its own: the temperature, and layer norm in critics."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.networks import Critics


class Temperature(nn.Module):
    """The weight of the entropy, as its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial) if initial > 0 else -math.inf))

    def forward(self) -> Tensor:
        return self.log.exp()


def add_layer_norm(critics: Critics) -> None:
    """Normalise the output of every linear layer except the heads, which give the values."""
    for critic in critics:
        for name, part in critic.named_children():
            if name != "head":
                _normalise_linear_layers(part)


def _normalise_linear_layers(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, nn.Sequential(child, nn.LayerNorm(child.out_features)))
        else:
            _normalise_linear_layers(child)
