"""MinGRU: a recurrent cell whose steps are computed all at once (Feng et al., 2024).

Its gates read the input only, not the state, so a step is h' = (1 - z) * h + z * candidate. Such
steps can be joined in pairs, the pairs in pairs, and so on: T steps need log2(T) rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ml_pipeline.policy.fast_steps import fast_linear_steps


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
        states: Tensor = all_linear_steps(kept, torch.cat([state.unsqueeze(0), new]), False)
        return states[1:], states[-1]


def linear_steps(kept: Tensor, new: Tensor, backwards: bool) -> Tensor:
    """h[0] = new[0] and h[t + 1] = new[t + 1] + kept[t] * h[t], for all T steps at once.

    ``kept`` is [T, ...] and ``new`` [T + 1, ...]. Where ``kept`` is 0, not even a NaN passes.
    ``backwards``: from the last row, h[T] = new[T], to the first.
    """
    if backwards:
        return linear_steps(kept.flip(0), new.flip(0), False).flip(0)
    joined, distance = new.clone(memory_format=torch.contiguous_format), 1
    # Row t has joined ``distance`` rows up to t, and ``kept`` is what passes over that distance.
    while distance < len(joined):
        passed = torch.where(kept == 0.0, 0.0, kept * joined[:-distance])
        joined[distance:] += passed
        kept = kept[distance:] * kept[:-distance]
        distance *= 2
    return joined


# One operation for torch's compiler, which would else fuse each round with all before it.
@torch.library.custom_op(
    "ml_pipeline::all_linear_steps",
    mutates_args=(),
    schema="(Tensor kept, Tensor new, bool backwards) -> Tensor",
)
def all_linear_steps(kept: Tensor, new: Tensor, backwards: bool) -> Tensor:
    """``linear_steps``; on a GPU as one kernel."""
    found = fast_linear_steps(kept, new, backwards)
    return linear_steps(kept, new, backwards) if found is None else found


@all_linear_steps.register_fake
def _(kept: Tensor, new: Tensor, backwards: bool) -> Tensor:
    return new.new_empty(new.shape)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    kept, _, ctx.backwards = inputs
    ctx.save_for_backward(kept, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    kept, states = ctx.saved_tensors
    new_grad: Tensor = all_linear_steps(kept, grad, not ctx.backwards)
    kept_grad = new_grad[:-1] * states[1:] if ctx.backwards else new_grad[1:] * states[:-1]
    return kept_grad, new_grad, None


all_linear_steps.register_autograd(_backward, setup_context=_keep)
