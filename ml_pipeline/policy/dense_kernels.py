"""Triton kernels of ``dense_chains``: dense layers with their activation, forwards and backwards.

A chain is a multilayer perceptron without a last activation. One launch runs a layer of one or two
chains ("towers") that read the same rows and have the same hidden sizes. All parameters lie in one
tensor, tower by tower, each layer's weight [n_out, n_in] before its bias. Outputs of hidden layers
and their gradients are stored with 16 bits, because reading and writing them takes most of the
time; sums are float32. Every sum has a fixed order, so results are reproducible.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter tests these kernels without a GPU. It has no inline assembly.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
LARGEST = tl.constexpr(65504.0)  # float16


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(z < 0.0, 0.0, z)  # not tl.maximum: it drops NaN
    elif PTX:  # accurate to 11 bits, as the stored result
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)


@triton.jit
def _slope(y, ACTIVATION: tl.constexpr):
    """Derivative of the activation, from its output."""
    if ACTIVATION == "relu":
        return (y > 0.0).to(tl.float32)
    else:
        return 1.0 - y * y


@triton.jit
def _stored(x, KIND: tl.constexpr):
    """x with 16 bits; a float16 that would be infinite becomes the largest one."""
    if KIND == tl.float16:
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    return x.to(KIND)


@triton.jit
def _scale(largest, SCALED: tl.constexpr):
    """A power of two that brings the largest gradient of an output near 256."""
    if SCALED:
        return tl.exp2(tl.floor(8.0 - tl.log2(tl.maximum(tl.load(largest), 1e-30))))
    else:
        return 1.0


@triton.jit
def forward_kernel(
    x, x_tower, weights, values, place, second, y, head, out, n_rows, n_in, n_units, n_out, n_out_2,
    B: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, OUTPUTS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """A hidden layer, or the OUTPUTS. The LAST hidden one also computes them, if it is narrow.

    The FIRST reads float32.
    """
    tower = tl.program_id(2)
    own = tower * second
    if OUTPUTS:
        n_units = tl.where(tower == 0, n_out, n_out_2)
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    units = tl.program_id(1) * N + tl.arange(0, N)
    live, there = (rows < n_rows)[:, None], units < n_units
    x += tower.to(tl.int64) * x_tower
    total = tl.zeros([B, N], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        seen = tl.load(
            x + rows[:, None] * n_in + k[None, :], mask=live & (k < n_in)[None, :], other=0.0
        )
        at = place + own + units[None, :] * n_in + k[:, None]
        mask = there[None, :] & (k < n_in)[:, None]
        if FIRST:
            weight = tl.load(values + at, mask=mask, other=0.0)
            total = tl.dot(seen, weight, total, input_precision="tf32")
        else:
            total = tl.dot(seen, tl.load(weights + at, mask=mask, other=0.0), total)
    bias = tl.load(values + place + own + n_units * n_in + units, mask=there, other=0.0)
    if OUTPUTS:
        at = rows[:, None] * (n_out + n_out_2) + tower * n_out + units[None, :]
        tl.store(out + at, total + bias[None, :], mask=live & there[None, :])
    else:
        found = _stored(_activated(total + bias[None, :], ACTIVATION), weights.dtype.element_ty)
        if KEEP:
            y += tower.to(tl.int64) * n_rows * n_units
            tl.store(
                y + rows[:, None] * n_units + units[None, :], found, mask=live & there[None, :]
            )
        if LAST:
            a = tl.arange(0, A)
            n_own = tl.where(tower == 0, n_out, n_out_2)
            wanted = a < n_own
            at = head + own + a[None, :] * n_units + units[:, None]
            weight = tl.load(weights + at, mask=wanted[None, :] & there[:, None], other=0.0)
            bias = tl.load(values + head + own + n_own * n_units + a, mask=wanted, other=0.0)
            at = rows[:, None] * (n_out + n_out_2) + tower * n_out + a[None, :]
            tl.store(out + at, tl.dot(found, weight) + bias[None, :], mask=live & wanted[None, :])


@triton.jit
def back_kernel(
    dz, weights, place, second, y, dx, largest, n_rows, n_units, n_in, n_out, n_out_2,
    B: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, OUTPUTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Gradient of a layer's sums, from that of the next layer; OUTPUTS: which is the last."""
    tower = tl.program_id(2)
    KIND: tl.constexpr = weights.dtype.element_ty
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    k = tl.program_id(1) * K + tl.arange(0, K)
    live, there = (rows < n_rows)[:, None], k < n_in
    if OUTPUTS:
        n_units = tl.where(tower == 0, n_out, n_out_2)
        dz += tower * n_out
        width = n_out + n_out_2
    else:
        dz += tower.to(tl.int64) * n_rows * n_units
        width = n_units
    total = tl.zeros([B, K], tl.float32)
    for start in range(0, n_units, N):
        units = start + tl.arange(0, N)
        wanted = units < n_units
        grad = tl.load(
            dz + rows[:, None] * width + units[None, :], mask=live & wanted[None, :], other=0.0
        )
        if OUTPUTS:
            grad = _stored(grad * _scale(largest, SCALED), KIND)
        at = place + tower * second + units[:, None] * n_in + k[None, :]
        weight = tl.load(weights + at, mask=wanted[:, None] & there[None, :], other=0.0)
        total = tl.dot(grad, weight, total)
    at = tower.to(tl.int64) * n_rows * n_in + rows[:, None] * n_in + k[None, :]
    passed = tl.load(y + at, mask=live & there[None, :], other=0.0).to(tl.float32)
    found = _stored(total * _slope(passed, ACTIVATION), KIND)
    tl.store(dx + at, found, mask=live & there[None, :])


@triton.jit
def weights_kernel(
    dz, x, x_tower, parts, place, second, n_values, largest, n_rows, n_each, n_units, n_in, n_out,
    n_out_2, B: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    FIRST: tl.constexpr, OUTPUTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Gradient of weight and bias, summed over ``n_each`` rows per row of ``parts``."""
    tower, part = tl.program_id(2), tl.program_id(0)
    n_tiles = tl.cdiv(n_in, K)
    tile = tl.program_id(1) % n_tiles
    units = (tl.program_id(1) // n_tiles) * N + tl.arange(0, N)
    k = tile * K + tl.arange(0, K)
    if OUTPUTS:
        n_units = tl.where(tower == 0, n_out, n_out_2)
        dz += tower * n_out
        width = n_out + n_out_2
    else:
        dz += tower.to(tl.int64) * n_rows * n_units
        width = n_units
    x += tower.to(tl.int64) * x_tower
    wanted, there = units < n_units, k < n_in
    scale = _scale(largest, SCALED)
    total, sums = tl.zeros([N, K], tl.float32), tl.zeros([N], tl.float32)
    begin = part * n_each
    end = tl.minimum(begin + n_each, n_rows)
    for start in range(begin, end, B):
        rows = (start + tl.arange(0, B)).to(tl.int64)
        live = (rows < end)[:, None]
        grad = tl.load(
            dz + rows[:, None] * width + units[None, :], mask=live & wanted[None, :], other=0.0
        )
        seen = tl.load(x + rows[:, None] * n_in + k[None, :], mask=live & there[None, :], other=0.0)
        if OUTPUTS:
            grad = _stored(grad * scale, KIND)
        if FIRST:
            total = tl.dot(tl.trans(grad.to(tl.float32)), seen, total, input_precision="tf32")
        else:
            total = tl.dot(tl.trans(grad), seen, total)
        sums += tl.sum(grad.to(tl.float32), axis=0)
    parts += part.to(tl.int64) * n_values + place + tower * second
    mask = wanted[:, None] & there[None, :]
    tl.store(parts + units[:, None] * n_in + k[None, :], total / scale, mask=mask)
    tl.store(parts + n_units * n_in + units, sums / scale, mask=wanted & (tile == 0))


@triton.jit
def sum_of_parts_kernel(parts, grad, n_parts, n_values, C: tl.constexpr, R: tl.constexpr):
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    for start in range(0, n_parts, R):
        r = (start + tl.arange(0, R)).to(tl.int64)
        mask = (r < n_parts)[:, None] & (c < n_values)[None, :]
        total += tl.sum(
            tl.load(parts + r[:, None] * n_values + c[None, :], mask=mask, other=0.0), 0
        )
    tl.store(grad + c, total, mask=c < n_values)
