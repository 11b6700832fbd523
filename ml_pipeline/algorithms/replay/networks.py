"""The networks of actor-critic agents with replay: an actor, and critics of its actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from ml_pipeline.policy.actor_critic import policy_outputs
from ml_pipeline.policy.contracts import NetworkBuilder, Obs
from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.networks import MLP, out_features
from ml_pipeline.policy.recurrent import refuse_recurrent


class Actor(nn.Module):
    """A network, a linear head, and the distribution of the actions, which may have parameters."""

    def __init__(self, trunk: nn.Module, distribution: Distribution) -> None:
        super().__init__()
        self.trunk = refuse_recurrent(trunk)
        self.head = nn.Linear(out_features(trunk), distribution.n_outputs)
        self.distribution = distribution

    def forward(self, obs: Obs, action_mask: Tensor | None) -> Tensor:
        """Outputs for the distribution, [B, n_outputs]."""
        return policy_outputs(self.trunk(obs), self.head, action_mask, self.distribution)


class Critic(nn.Module):
    """The value of an action: a network over observation and action, and a linear head.

    For images and Dict observations, the action joins the features of the network instead.
    """

    def __init__(
        self, observation_space: gym.Space[Any], n_actions: int, build_network: NetworkBuilder
    ) -> None:
        super().__init__()
        shape = observation_space.shape
        self.mixer: MLP | None = None
        if isinstance(observation_space, spaces.Box) and len(shape or ()) == 1:
            size = int(np.prod(shape or ())) + n_actions
            self.trunk = build_network(spaces.Box(-np.inf, np.inf, (size,)))
        else:
            self.trunk = build_network(observation_space)
            joint = spaces.Box(-np.inf, np.inf, (out_features(self.trunk) + n_actions,))
            self.mixer = MLP(joint, hidden_sizes=(256,), activation="relu")
        self.head = nn.Linear(out_features(self.mixer or self.trunk), 1)

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        """[B]; ``obs`` is a tensor, or a dict of them."""
        if self.mixer is None:
            features = self.trunk(torch.cat([obs, action], dim=-1))
        else:
            features = self.mixer(torch.cat([self.trunk(obs), action], dim=-1))
        value: Tensor = self.head(features)
        return value.squeeze(-1)


class DiscreteCritic(nn.Module):
    """The value of every discrete action: a network over the observation, and a linear head."""

    def __init__(
        self, observation_space: gym.Space[Any], n_actions: int, build_network: NetworkBuilder
    ) -> None:
        super().__init__()
        self.trunk = build_network(observation_space)
        self.head = nn.Linear(out_features(self.trunk), n_actions)

    def forward(self, obs: Obs) -> Tensor:
        """[B, n_actions]"""
        values: Tensor = self.head(self.trunk(obs))
        return values


class Critics(nn.ModuleList):
    """Two critics; their minimum is less optimistic than either."""

    def forward(self, *inputs: Obs) -> Tensor:
        """[2, B], or [2, B, n_actions] for discrete actions."""
        return torch.stack([critic(*inputs) for critic in self])


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
