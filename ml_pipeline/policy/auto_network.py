"""auto: a CNN for one image, a DictNetwork for images among other parts, and else an MLP.

Stored runs name this function, so what it returns for a space must not change.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from torch import nn

from ml_pipeline.policy.image_networks import CNN, DictNetwork
from ml_pipeline.policy.networks import MLP

# By the shortest side of an image: kernels and strides; those of Nature DQN need 36 pixels.
_LAYERS: dict[int, dict[str, list[int]]] = {
    36: {"kernels": [8, 4, 3], "strides": [4, 2, 1]},
    16: {"kernels": [4, 3, 3], "strides": [2, 2, 1]},
    7: {"kernels": [3, 3, 3], "strides": [1, 1, 1]},
}


def auto(
    observation_space: gym.Space[Any],
    hidden_sizes: Sequence[int] | None = None,
    activation: str | None = None,
) -> nn.Module:
    """The network for a space; images have values from 0 to 1 here.

    ``hidden_sizes`` and ``activation`` as for ``choice``.
    """
    kind, arguments = choice(observation_space, hidden_sizes, activation)
    return kind(observation_space, **arguments)


def choice(
    observation_space: gym.Space[Any],
    hidden_sizes: Sequence[int] | None = None,
    activation: str | None = None,
) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the network for a space, and its arguments.

    ``hidden_sizes``: of the MLP, which follows a CNN only if they are given; None: [64, 64].
    ``activation``: None means relu in a CNN, and tanh in an MLP.
    """
    leaves = [observation_space]
    if isinstance(observation_space, spaces.Dict):
        leaves = list(observation_space.values())
    sides = [side for side in map(_side_of_image, leaves) if side is not None]
    of_mlp: dict[str, Any] = {"activation": activation or "tanh"}
    if hidden_sizes is not None:
        of_mlp["hidden_sizes"] = hidden_sizes
    fitting = [least for least in _LAYERS if min(sides, default=0) >= least]
    # DictNetwork takes every part of rank 3 for an image.
    is_mixed = any(len(leaf.shape or ()) == 3 and _side_of_image(leaf) is None for leaf in leaves)
    if not fitting or is_mixed:
        return MLP, of_mlp
    of_cnn: dict[str, Any] = {**_LAYERS[fitting[0]], "activation": activation or "relu"}
    if isinstance(observation_space, spaces.Dict) or hidden_sizes is not None:
        return DictNetwork, {**of_mlp, "cnn": {**of_cnn, "hidden_size": 256}}
    return CNN, of_cnn


def written_out(
    observation_space: gym.Space[Any], settings: Mapping[str, Any]
) -> dict[str, object]:
    """The config of the network that ``auto`` chooses, as the files of conf/network write it."""
    settings = dict(settings)
    critic = settings.pop("critic", None)
    kind, arguments = choice(observation_space, **settings)
    if "cnn" in arguments:
        of_cnn = {**_defaults(CNN), **arguments["cnn"]}
        if of_cnn["activation"] == _defaults(CNN)["activation"]:
            del of_cnn["activation"]  # conf/network/dict.yaml leaves it to CNN
        arguments = {**arguments, "cnn": of_cnn}
    target = f"{kind.__module__}.{kind.__qualname__}"
    return {"_target_": target, **_defaults(kind), **arguments, "critic": critic}


def _defaults(kind: type[nn.Module]) -> dict[str, Any]:
    """The default arguments of a network, as YAML has them."""
    found = {
        name: each.default
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is not each.empty
    }
    return {name: list(d) if isinstance(d, tuple) else d for name, d in found.items()}


def _side_of_image(space: gym.Space[Any]) -> float | None:
    """The shorter of height and width, or None if a space is not one image."""
    shape = space.shape or ()
    if not isinstance(space, spaces.Box) or len(shape) not in (2, 3):
        return None
    has_range = bool((space.low == 0).all() and (space.high == 1).all())
    channels = shape.index(min(shape)) if len(shape) == 3 else None
    if not has_range or channels == 1:
        return None
    return min((n for i, n in enumerate(shape) if i != channels), default=math.inf)
