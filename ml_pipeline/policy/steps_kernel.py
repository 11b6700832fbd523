"""The steps of a MinGRU in one Triton kernel, which reads and writes every number once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["n_steps"])  # else Triton compiles a variant for 1
def _linear_steps_kernel(
    kept, new, states, n_steps, n_columns, BACKWARDS: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Each program loops over time for B columns: units of envs."""
    column = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = column < n_columns
    row, first = column, column
    if BACKWARDS:
        first += n_steps.to(tl.int64) * n_columns
        row = first - n_columns
    state = tl.load(new + first, mask=live, other=0.0)
    tl.store(states + first, state, mask=live)
    for _ in range(n_steps):
        place = row
        if not BACKWARDS:
            place += n_columns
        passed = tl.load(kept + row, mask=live, other=0.0)
        state = tl.where(passed == 0.0, 0.0, passed * state)
        state += tl.load(new + place, mask=live, other=0.0)
        tl.store(states + place, state, mask=live)
        if BACKWARDS:
            row -= n_columns
        else:
            row += n_columns


def linear_steps_in_one_kernel(kept: Tensor, new: Tensor, backwards: bool) -> Tensor:
    """``linear_steps`` of float32, in a single kernel launch."""
    kept, new = kept.contiguous(), new.contiguous()
    states = torch.empty_like(new)
    n_columns, block = new[0].numel(), 256
    _linear_steps_kernel[(triton.cdiv(n_columns, block),)](
        kept, new, states, len(kept), n_columns, BACKWARDS=backwards, B=block, num_warps=4
    )
    return states
