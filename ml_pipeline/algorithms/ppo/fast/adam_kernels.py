"""Triton kernels that sum the partial gradients and take Adam's step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_rows"])  # else Triton compiles a variant for 1
def sum_kernel(partial, grad, told, squares, n_rows, n_values, n_columns,
                R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Add up the rows of ``partial``: gradient, metrics, and squares for the gradient norm."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    for start in range(0, n_rows, R):
        r = start + tl.arange(0, R)
        there = (r < n_rows)[:, None] & (c < n_columns)[None, :]
        part = tl.load(
            partial + r.to(tl.int64)[:, None] * n_columns + c[None, :], mask=there, other=0.0
        )
        total += tl.sum(part, axis=0)
    is_value = c < n_values
    tl.store(grad + c, total, mask=is_value)
    tl.store(told + c - n_values, total, mask=(c >= n_values) & (c < n_columns))
    tl.store(squares + tl.program_id(0), tl.sum(tl.where(is_value, total * total, 0.0), axis=0))


@triton.jit(do_not_specialize=["minibatch"])
def adam_kernel(
    values, grad, mean, square, n_steps, squares, told, rates, metrics, minibatch,
    n_values, n_squares, value_coef, max_grad_norm, eps, log2_beta_1, log2_beta_2, rest_1, rest_2,
    C: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """``FlatAdam.step``; also writes the ``UpdateResult`` of the minibatch as a row."""
    s = tl.arange(0, S)
    norm = tl.sqrt(tl.sum(tl.load(squares + s, mask=s < n_squares, other=0.0), axis=0))
    learning_rate = tl.load(rates)
    loss = tl.load(told) + value_coef * tl.load(told + 1) - tl.load(rates + 2) * tl.load(told + 2)
    # x - x is 0 only if x is finite.
    taken = tl.where((norm + loss) - (norm + loss) == 0.0, 1.0, 0.0)
    steps = tl.load(n_steps + minibatch) + taken
    c = tl.program_id(0) * C + tl.arange(0, C)
    there = c < n_values
    scale = tl.minimum(max_grad_norm / (norm + 1e-6), 1.0)
    g = tl.load(grad + c, mask=there, other=0.0) * scale
    m = tl.load(mean + c, mask=there, other=0.0)
    v = tl.load(square + c, mask=there, other=0.0)
    old = tl.load(values + c, mask=there, other=0.0)
    m += (g - m) * rest_1
    v += (g * g - v) * rest_2
    step = learning_rate / (1.0 - tl.exp2(steps * log2_beta_1))
    deviation = tl.sqrt(v / (1.0 - tl.exp2(steps * log2_beta_2))) + eps
    there = there.to(tl.float32) * taken > 0.0
    tl.store(mean + c, m, mask=there)
    tl.store(square + c, v, mask=there)
    tl.store(values + c, old - step * m / deviation, mask=there)
    if tl.program_id(0) == 0:
        i = tl.arange(0, M)
        row = tl.where(i == 5, norm, tl.where(i == 6, taken, tl.load(told + i)))
        tl.store(metrics + minibatch * 7 + i, row, mask=i < 7)
        tl.store(n_steps + minibatch + 1, steps)
