"""Impala: residual convolutions for one image (Espeholt et al., 2018), with average pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from ml_pipeline.policy.image_networks import channels_first, image_size
from ml_pipeline.policy.networks import check_sizes


class _Residual(nn.Module):
    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(n_channels, n_channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(n_channels, n_channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class Impala(nn.Module):
    """Three stages that halve the image; then its mean over ``pooled`` x ``pooled`` parts.

    Pooling keeps the dense layer small, so that more of the network is convolutions (Trumpp et al.,
    2025). ``pooled: null`` flattens the whole image, as the paper does.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        channels: Sequence[int] = (16, 32, 32),
        hidden_size: int = 256,
        pooled: int | None = 1,
    ) -> None:
        super().__init__()
        check_sizes("channels", channels)
        check_sizes("hidden_size", [hidden_size])
        self._channel_dim, n_channels, height, width = image_size(observation_space)
        layers: list[nn.Module] = []
        for n_out in channels:
            layers += [
                nn.Conv2d(n_channels, n_out, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                _Residual(n_out),
                _Residual(n_out),
            ]
            n_channels, height, width = n_out, (height + 1) // 2, (width + 1) // 2
        layers.append(nn.ReLU())
        if pooled is not None:
            check_sizes("pooled", [pooled])
            layers.append(nn.AdaptiveAvgPool2d(pooled))
            height = width = pooled
        layers += [nn.Flatten(), nn.Linear(n_channels * height * width, hidden_size), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.out_features = hidden_size

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.layers(channels_first(obs, self._channel_dim))
        return features
