"""The advantages of a rollout in one Triton kernel; a loop over time in torch launches hundreds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["n_steps"])  # else Triton compiles a variant for 1
def _gae_kernel(
    reward, value, last_value, final_value, terminated, truncated, advantage,
    n_steps, n_envs, gamma, decay, B: tl.constexpr,
):  # fmt: skip
    """Each program loops backwards over time for B envs."""
    env = tl.program_id(0) * B + tl.arange(0, B)
    live = env < n_envs
    next_value = tl.load(last_value + env, mask=live, other=0.0)
    running = tl.zeros([B], tl.float32)
    for back in range(n_steps):
        at = (n_steps - 1 - back).to(tl.int64) * n_envs + env
        was_terminated = tl.load(terminated + at, mask=live, other=0) != 0
        was_truncated = tl.load(truncated + at, mask=live, other=0) != 0
        own = tl.load(value + at, mask=live, other=0.0)
        successor = tl.where(
            was_truncated, tl.load(final_value + at, mask=live, other=0.0), next_value
        )
        successor = tl.where(was_terminated, 0.0, successor)
        delta = tl.load(reward + at, mask=live, other=0.0) + gamma * successor - own
        running = delta + tl.where(was_terminated | was_truncated, 0.0, decay) * running
        tl.store(advantage + at, running, mask=live)
        next_value = own


def gae_in_one_kernel(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """The advantages of ``RolloutOutcome.estimate`` with ``gae``, in a single kernel launch."""
    n_steps, n_envs = reward.shape
    advantage = torch.empty_like(reward)
    block = 128
    _gae_kernel[(triton.cdiv(n_envs, block),)](
        reward, value, last_value, final_value, terminated, truncated, advantage,
        n_steps, n_envs, gamma, gamma * lam, B=block, num_warps=4,
    )  # fmt: skip
    return advantage
