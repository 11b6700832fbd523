"""TransformerXL: attention over the last steps of an episode, as the memory of a policy.

Each layer sees its own inputs of the last ``window`` steps, so n layers reach n * window steps back
(Dai et al., 2019). Gates in the place of residual sums keep the first updates stable, as in GTrXL
(Parisotto et al., 2020). Distances have learned vectors (Shaw et al., 2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from ml_pipeline.policy.contracts import Obs
from ml_pipeline.policy.networks import check_sizes, out_features
from ml_pipeline.policy.observations import map_obs
from ml_pipeline.policy.recurrent import build_encoder

_OPEN = 2.0  # bias of a gate: at first it passes mostly what is on the main path
_FEWEST_QUERIES = 64  # attention to a window takes longer in smaller parts of a sequence


class TransformerXL(nn.Module):
    """Encodes each observation, then runs gated attention layers; same contract as ``Recurrent``.

    The recurrent state of an env has one row for each of the last ``window`` steps: the inputs of
    all layers in that step, and 1. Rows of steps before the episode are 0.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        size: int = 64,
        n_layers: int = 1,
        n_heads: int = 4,
        window: int = 32,
        encoder: Mapping[str, Any] | None = None,
    ) -> None:
        """``encoder``: a _target_ entry of a network; None means ``DictNetwork``."""
        super().__init__()
        for name, number in (("size", size), ("n_layers", n_layers), ("window", window)):
            check_sizes(name, [number])
        if n_heads < 1 or size % n_heads:
            raise ValueError(f"n_heads={n_heads} must divide size={size}")
        self.encoder = build_encoder(encoder, observation_space)
        self.embedding = nn.Linear(out_features(self.encoder), size)
        self.layers = nn.ModuleList([_Layer(size, n_heads, window) for _ in range(n_layers)])
        self.window = window
        self.out_features = size
        self.state_size = window * (n_layers * size + 1)

    def forward(self, obs: Obs, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, B, out_features] of obs [T, B, ...], and the state after the last step."""
        n_steps, n_envs = episode_start.shape
        encoded = self.encoder(map_obs(lambda leaf: leaf.flatten(0, 1), obs))
        x = self.embedding(encoded).view(n_steps, n_envs, -1).transpose(0, 1)
        # Not multiplied by 0: that would keep a NaN.
        state = state.masked_fill(episode_start[0].unsqueeze(-1), 0.0)
        past = state.view(n_envs, self.window, -1)
        sizes = [self.out_features] * len(self.layers) + [1]
        *inputs_before, is_filled = torch.split(past, sizes, dim=-1)
        # Which episode of the sequence each step belongs to; -1 for an empty row of the state.
        episode = (episode_start.cumsum(dim=0) - episode_start[:1].long()).T
        before = (is_filled[..., 0] > 0).long() - 1
        seen = torch.cat([before, episode], dim=1)  # of the window and the sequence
        kept = []
        for layer, held in zip(self.layers, inputs_before, strict=True):
            inputs = torch.cat([held, x], dim=1)
            kept.append(inputs[:, -self.window :])
            x = layer(inputs, seen)
        last = seen[:, -self.window :] == episode[:, -1:]
        rows = torch.cat([*kept, torch.ones_like(kept[0][..., :1])], dim=-1)
        return x.transpose(0, 1), rows.masked_fill(~last.unsqueeze(-1), 0.0).flatten(1)


class _Layer(nn.Module):
    """Attention to the window before each step, then an MLP, each behind a gate."""

    def __init__(self, size: int, n_heads: int, window: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.window = window
        self.norm = nn.LayerNorm(size)
        self.query, self.key, self.value, self.join = (nn.Linear(size, size) for _ in range(4))
        self.distances = nn.Parameter(0.02 * torch.randn(window + 1, size // n_heads))
        self.gate = _Gate(size)
        wide = nn.Linear(size, 2 * size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), wide, nn.ReLU(), nn.Linear(2 * size, size))
        self.mlp_gate = _Gate(size)

    def forward(self, inputs: Tensor, episode: Tensor) -> Tensor:
        """[B, T, size] from the inputs of the window and the sequence, [B, window + T, size]."""
        x, normed = inputs[:, self.window :], self.norm(inputs)
        queries = self._heads(self.query(normed[:, self.window :]))
        keys, values = self._heads(self.key(normed)), self._heads(self.value(normed))
        values = values.nan_to_num()  # 0 * NaN is NaN: it would reach the next episode
        n_at_once = max(self.window, _FEWEST_QUERIES)
        parts = []
        for first in range(0, x.shape[1], n_at_once):
            reach = slice(first, first + n_at_once + self.window)
            query = queries[:, :, first : first + n_at_once]
            parts.append(
                self._attended(query, keys[:, :, reach], values[:, :, reach], episode[:, reach])
            )
        attended = torch.cat(parts, dim=2).transpose(1, 2).flatten(2)
        x = self.gate(x, self.join(attended).relu())
        return self.mlp_gate(x, self.mlp(x).relu())  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.n_heads, -1).transpose(1, 2)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, episode: Tensor) -> Tensor:
        """[B, n_heads, T, size / n_heads]; the keys begin ``window`` steps before the queries."""
        end, window = key.shape[2], self.window
        step = torch.arange(end, device=key.device)
        distance = step[window:, None] - step
        is_near = (distance >= 0) & (distance <= window)
        allowed = is_near & (episode[:, window:, None] == episode[:, None, :])
        far = distance.clamp(0, window).expand(*query.shape[:2], -1, -1)
        score = query @ key.transpose(-1, -2) + (query @ self.distances.T).gather(-1, far)
        score = (score / math.sqrt(key.shape[-1])).masked_fill(~allowed.unsqueeze(1), -torch.inf)
        return score.softmax(dim=-1) @ value


class _Gate(nn.Module):
    """A GRU cell over the depth: x is the state, y the input (GTrXL)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_y = nn.Linear(size, 3 * size, bias=False)
        self.of_x = nn.Linear(size, 2 * size, bias=False)
        self.of_reset = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.full((size,), _OPEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset_y, update_y, new_y = self.of_y(y).chunk(3, dim=-1)
        reset_x, update_x = self.of_x(x).chunk(2, dim=-1)
        update = torch.sigmoid(update_y + update_x - self.bias)
        new = torch.tanh(new_y + self.of_reset(torch.sigmoid(reset_y + reset_x) * x))
        return (1.0 - update) * x + update * new
