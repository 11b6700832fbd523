"""MinGRU: a recurrent cell whose steps are computed all at once (Feng et al., 2024).

Its gates read the input only, not the state, so a step is h' = (1 - z) * h + z * candidate. Such
steps can be joined in pairs, the pairs in pairs, and so on: T steps need log2(T) rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MinGRU(nn.Module):
    """One layer over sequences; arXiv:2410.01201, without its variant in log space."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.gate_and_candidate = nn.Linear(input_size, 2 * hidden_size)

    def forward(self, x: Tensor, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """All states [T, B, hidden_size] of x [T, B, input_size], and the last one.

        ``state`` [B, hidden_size] is that before the first step. No state passes from one episode
        to the next: ``episode_start`` is [T, B].
        """
        # float: bf16 would round the state in every step.
        gate, candidate = self.gate_and_candidate(x).float().chunk(2, dim=-1)
        start = episode_start.unsqueeze(-1)
        kept = torch.sigmoid(-gate).masked_fill(start, 0.0)
        new = torch.sigmoid(gate) * candidate
        if len(new) == 1:  # acting
            # Not multiplied by 0: that would keep a NaN.
            next_state = new[0] + kept[0] * state.masked_fill(start[0], 0.0)
            return next_state.unsqueeze(0), next_state
        before_and_new = torch.cat([state.unsqueeze(0), new])
        states: Tensor = _Steps.apply(kept, before_and_new)  # type: ignore[no-untyped-call]
        return states[1:], states[-1]


class _Steps(torch.autograd.Function):
    """``linear_steps`` with its gradient, which is made of the same steps backwards."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, new: Tensor) -> Tensor:
        states = linear_steps(kept, new)
        ctx.save_for_backward(kept, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        kept, states = ctx.saved_tensors
        grad = linear_steps(kept.flip(0), grads[0].flip(0)).flip(0)
        return grad[1:] * states[:-1], grad


def linear_steps(kept: Tensor, new: Tensor) -> Tensor:
    """h[0] = new[0] and h[t + 1] = new[t + 1] + kept[t] * h[t], for all T steps at once.

    ``kept`` is [T, ...] and ``new`` [T + 1, ...]. Where ``kept`` is 0, not even a NaN passes.
    """
    joined, distance = new.clone(), 1
    # Row t has joined ``distance`` rows up to t, and ``kept`` is what passes over that distance.
    while distance < len(joined):
        passed = torch.where(kept == 0.0, 0.0, kept * joined[:-distance])
        joined[distance:] += passed
        kept = kept[distance:] * kept[:-distance]
        distance *= 2
    return joined
