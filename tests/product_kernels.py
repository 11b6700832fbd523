"""A Triton kernel that multiplies two matrices as the kernels of PPO do."""

from __future__ import annotations

import triton
import triton.language as tl

from ml_pipeline.algorithms.ppo.fast.triton_kernels import _product


@triton.jit
def product_kernel(a, b, out, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    zero = tl.zeros([N, N], tl.float32)
    total = _product(zero, tl.load(a + place), tl.load(b + place), "float32", TRANSPOSED)
    tl.store(out + place, total)
