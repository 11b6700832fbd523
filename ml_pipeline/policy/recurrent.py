"""Recurrent: an LSTM, GRU or MinGRU over the features of any other network."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn import functional

from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import Obs
from ml_pipeline.policy.min_gru import MinGRU
from ml_pipeline.policy.networks import check_sizes, out_features
from ml_pipeline.policy.observations import map_obs
from ml_pipeline.policy.unrolled import unrolled
from ml_pipeline.targets import instantiate

_CELLS: Mapping[str, type[nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU, "mingru": MinGRU}


class Recurrent(nn.Module):
    """Encodes each observation, then runs a recurrent cell over the sequence of features."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        cell: str = "lstm",
        size: int = 64,
        encoder: Mapping[str, Any] | None = None,
    ) -> None:
        """``encoder``: a _target_ entry of a network; None means ``DictNetwork``."""
        super().__init__()
        if cell not in _CELLS:
            raise ValueError(f"cell must be {' | '.join(_CELLS)}, got {cell}")
        check_sizes("size", [size])
        self.encoder = build_encoder(encoder, observation_space)
        # FlatAdam keeps all parameters in one tensor of its own, and cuDNN warns about that.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
        self.cell: Any = _CELLS[cell](out_features(self.encoder), size)
        self.out_features = size
        self.state_size = 2 * size if cell == "lstm" else size

    def forward(self, obs: Obs, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, B, out_features] of obs [T, B, ...], and the state after the last step.

        ``state`` [B, state_size] is the recurrent state before the first step. It is reset to
        zero where ``episode_start`` [T, B] is True.
        """
        n_steps, n_envs = episode_start.shape
        encoded = self.encoder(map_obs(lambda leaf: leaf.flatten(0, 1), obs)).unflatten(
            0, (n_steps, n_envs)
        )
        if isinstance(self.cell, MinGRU):
            found: tuple[Tensor, Tensor] = self.cell(encoded, state, episode_start)
            return found
        # Only a CPU can read the starts without waiting for the work before.
        is_on_cpu = encoded.device.type == "cpu"
        run = self._in_segments if is_on_cpu else self._step_by_step
        return run(encoded, state, episode_start)

    def _in_segments(
        self, encoded: Tensor, state: Tensor, episode_start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One call of the cell covers all steps up to the next episode start in any env."""
        n_steps = len(encoded)
        starts = episode_start[1:].any(dim=1).nonzero().flatten().tolist() if n_steps > 1 else []
        bounds = [0, *(start + 1 for start in starts), n_steps]
        features = []
        for first, end in pairwise(bounds):
            # Not multiplied by 0: that would keep a NaN.
            state = state.masked_fill(episode_start[first].unsqueeze(-1), 0.0)
            segment, state = self._run(encoded[first:end], state)
            features.append(segment)
        return features[0] if len(features) == 1 else torch.cat(features), state

    def _run(self, encoded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.cell, nn.GRU):
            features, hidden = self.cell(encoded, state.unsqueeze(0))
            return features, hidden[0]
        hidden, carried = (half.contiguous().unsqueeze(0) for half in state.chunk(2, dim=-1))
        features, (hidden, carried) = self.cell(encoded, (hidden, carried))
        return features, torch.cat([hidden[0], carried[0]], dim=-1)

    def _step_by_step(
        self, encoded: Tensor, state: Tensor, episode_start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, with the starts as data: a CUDA graph can capture it."""
        cell = self.cell
        # float: bf16 would round the state in every step.
        given = functional.linear(encoded, cell.weight_ih_l0, cell.bias_ih_l0).float()
        return unrolled(given, cell.weight_hh_l0, cell.bias_hh_l0, state, episode_start)


def build_encoder(
    encoder: Mapping[str, Any] | None, observation_space: gym.Space[Any]
) -> nn.Module:
    """The network that a recurrent one runs on each observation."""
    entry = encoder or {"_target_": "ml_pipeline.policy.image_networks.DictNetwork"}
    offers = {"observation_space": observation_space}
    made: nn.Module = instantiate(
        entry, key="network.encoder", offers=offers, first="observation_space"
    )
    return made


def refuse_recurrent(network: nn.Module) -> nn.Module:
    """The network, unless it is recurrent: for agents that store no recurrent states."""
    if getattr(network, "state_size", 0):
        raise UserError(
            f"network {type(network).__name__} is recurrent, which this agent does not "
            "support; use network=mlp or network=cnn"
        )
    return network
