"""CNN for one image, and DictNetwork for images and vectors in one observation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.policy.contracts import Obs
from ml_pipeline.policy.networks import MLP, activation_class, check_sizes, out_features


def image_size(space: gym.Space[Any]) -> tuple[int | None, int, int, int]:
    """Where the channels are (None: nowhere), how many, height and width.

    In an image of rank 3, the shortest side is the channels; of two equal sides, the first.
    """
    shape = space.shape
    if shape is None or len(shape) not in (2, 3):
        raise ValueError(
            "observation_space must be one image (a Box of rank 2 or 3), got "
            f"{space}; for images and vectors together use network=dict"
        )
    channel_dim = None if len(shape) == 2 else shape.index(min(shape))
    if channel_dim == 1:
        raise ValueError(
            f"observation_space has its channels in the middle: {shape}; "
            "move them to the first or last dimension"
        )
    n_channels = 1 if channel_dim is None else shape[channel_dim]
    height, width = [n for i, n in enumerate(shape) if i != channel_dim]
    return channel_dim, n_channels, height, width


def channels_first(obs: Tensor, channel_dim: int | None) -> Tensor:
    """[B, channels, height, width], in the memory layout that is fast on the device."""
    if channel_dim is None:
        obs = obs.unsqueeze(1)
    elif channel_dim == 2:
        obs = obs.permute(0, 3, 1, 2)
    if obs.device.type == "cpu" or (obs.is_cuda and torch.backends.cudnn.allow_tf32):
        # CPUs and tensor cores want the channels last; float32 on a GPU is slower that way.
        obs = obs.contiguous(memory_format=torch.channels_last)
    return obs


class CNN(nn.Module):
    """Convolutions over one image, then a dense layer; the defaults are those of Nature DQN."""

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
        make_activation = activation_class(activation)
        for name, sizes in (("channels", channels), ("kernels", kernels), ("strides", strides)):
            check_sizes(name, sizes)
            if len(sizes) != len(channels):
                raise ValueError(f"{name} must have one item per layer, got {sizes}")
        check_sizes("hidden_size", [hidden_size])
        shape = observation_space.shape
        self._channel_dim, n_channels, height, width = image_size(observation_space)
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
        features: Tensor = self.layers(channels_first(obs, self._channel_dim))
        return features


class DictNetwork(nn.Module):
    """Takes any observation: a CNN per image, then an MLP over their features and all vectors."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        cnn: Mapping[str, Any] | None = None,
    ) -> None:
        """``cnn``: arguments of each ``CNN``; None means its defaults."""
        super().__init__()
        leaves = {"": observation_space}
        if isinstance(observation_space, spaces.Dict):
            leaves = dict(observation_space.items())
        self._images = [name for name, leaf in leaves.items() if _looks_like_image(leaf)]
        self.cnns = nn.ModuleList(CNN(leaves[name], **dict(cnn or {})) for name in self._images)
        joined = {name: leaf for name, leaf in leaves.items() if name not in self._images}
        for name, each in zip(self._images, self.cnns, strict=True):
            joined[name] = spaces.Box(-math.inf, math.inf, (out_features(each),))
        # The MLP sees images and vectors together: one may change what the other means.
        self.mlp = MLP(spaces.Dict(joined), hidden_sizes, activation)
        self._order = list(spaces.Dict(joined))
        self.out_features = self.mlp.out_features

    def forward(self, obs: Obs) -> Tensor:
        leaves = {"": obs} if isinstance(obs, Tensor) else dict(obs)
        for name, cnn in zip(self._images, self.cnns, strict=True):
            leaves[name] = cnn(leaves[name])
        features: Tensor = self.mlp({name: leaves[name] for name in self._order})
        return features


def _looks_like_image(space: gym.Space[Any]) -> bool:
    """Rank 3, or a plane of values between 0 and 1: preprocessing scales byte images to that."""
    shape = space.shape or ()
    is_plane = isinstance(space, spaces.Box) and len(shape) == 2 and bool((space.high == 1).all())
    return len(shape) == 3 or is_plane
