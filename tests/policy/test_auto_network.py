"""network=auto: the network follows the observation, and each of its keys has an effect."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from torch import nn

from ml_pipeline.assembly.agent import build_network
from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.policy.auto_network import auto, written_out
from ml_pipeline.policy.image_networks import CNN, DictNetwork
from ml_pipeline.policy.networks import MLP


def image(*shape: int) -> spaces.Box:
    """An image as networks see it: with values from 0 to 1."""
    return spaces.Box(0.0, 1.0, shape)


VECTOR = spaces.Box(-1.0, 1.0, (4,))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (VECTOR, MLP),
        (spaces.Dict({"a": VECTOR, "b": VECTOR}), MLP),
        (spaces.Box(-1.0, 1.0, (84, 84, 3)), MLP),  # not the range of an image
        *((image(side, side, 3), CNN) for side in (7, 8, 15, 16, 35, 36, 84)),
        (image(4, 84, 84), CNN),
        (image(210, 160, 3), CNN),
        (image(84, 84), CNN),
        (image(6, 6, 3), MLP),  # too small for three layers
        (image(84, 3, 84), MLP),  # a CNN cannot tell its channels
        (spaces.Dict({"camera": image(64, 64, 3), "arm": VECTOR}), DictNetwork),
        (spaces.Dict({"near": image(7, 7, 3), "far": image(64, 64, 3)}), DictNetwork),
        (spaces.Dict({"camera": image(64, 64, 3), "board": image(3, 3, 2)}), MLP),
    ],
)
def test_network_follows_the_observation(space: gym.Space, kind: type[nn.Module]) -> None:
    network = auto(space)

    assert type(network) is kind
    obs = (
        {key: torch.zeros(2, *leaf.shape) for key, leaf in space.items()}
        if isinstance(space, spaces.Dict)
        else torch.zeros(2, *space.shape)
    )
    assert network(obs).shape == (2, network.out_features)


def test_auto_is_the_default_and_equals_mlp_for_a_vector() -> None:
    torch.manual_seed(0)
    default = build_network(checked_config(compose_config([])), VECTOR)
    torch.manual_seed(0)
    mlp = build_network(checked_config(compose_config(["network=mlp"])), VECTOR)

    assert type(default) is MLP
    for ours, theirs in zip(default.parameters(), mlp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_keys_of_auto_have_an_effect() -> None:
    network = auto(image(84, 84, 4), hidden_sizes=[32], activation="elu")

    assert (type(network), network.out_features) == (DictNetwork, 32)
    assert not any(isinstance(each, (nn.ReLU, nn.Tanh)) for each in network.modules())
    assert auto(VECTOR, hidden_sizes=[32, 16]).out_features == 16


CAMERA_AND_ARM = spaces.Dict({"camera": image(84, 84, 3), "arm": VECTOR})


@pytest.mark.parametrize(
    ("space", "option"),
    [(VECTOR, "mlp"), (image(84, 84, 4), "cnn"), (CAMERA_AND_ARM, "dict")],
)
def test_choice_is_written_as_the_option_with_the_same_network(
    space: gym.Space, option: str
) -> None:
    settings = {"hidden_sizes": None, "activation": None}

    assert written_out(space, settings) == dict(
        checked_config(compose_config([f"network={option}"])).network
    )
