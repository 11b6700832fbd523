"""Triton kernels of ``TritonPPO``: forward and backward of a small MLP, one tile at a time.

A tile is a matrix [rows, units], and a layer is ``tile @ weight.T``. So a tile stays in registers
from layer to layer, and the weights stay in shared memory. Sizes: B rows, D inputs, H and K hidden
units, A outputs. All but B are padded to powers of two of at least 16, as tensor cores require.
Rows beyond the end are not ``live``: they add nothing to any sum.

D is larger than the number of inputs: the first padded input of every row is 1. So the biases of
the two hidden layers are weights of this input, and their gradients come from the same products.

Every sum has a fixed order, so that results are reproducible.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter tests these kernels without a GPU. It has no inline assembly.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _product(total, a, b, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """total + a @ b in float32, with operand TRANSPOSED ("a", "b" or "") transposed first."""
    if PRECISION == "float32":
        # A bfloat16 has 8 significant bits and a float32 has 24, so three bfloat16 hold one
        # float32. Six of the nine products are enough: the others are about as small as the last
        # bit.
        a_1, a_2, a_3 = _parts(a)
        b_1, b_2, b_3 = _parts(b)
        total = _dot(total, a_1, b_3, PRECISION, TRANSPOSED)
        total = _dot(total, a_2, b_2, PRECISION, TRANSPOSED)
        total = _dot(total, a_3, b_1, PRECISION, TRANSPOSED)
        total = _dot(total, a_1, b_2, PRECISION, TRANSPOSED)
        total = _dot(total, a_2, b_1, PRECISION, TRANSPOSED)
        return _dot(total, a_1, b_1, PRECISION, TRANSPOSED)
    elif PRECISION == "bf16":
        return _dot(total, a.to(tl.bfloat16), b.to(tl.bfloat16), PRECISION, TRANSPOSED)
    else:
        return _dot(total, a, b, PRECISION, TRANSPOSED)


@triton.jit
def _dot(total, a, b, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    if TRANSPOSED == "a":
        a = tl.trans(a)
    elif TRANSPOSED == "b":
        b = tl.trans(b)
    if PRECISION == "tf32":
        return tl.dot(a, b, total, input_precision="tf32")
    else:
        return tl.dot(a, b, total)


@triton.jit
def _parts(x):
    """Three bfloat16 that add up to x."""
    rest = x - _cut(x)
    return _as_bfloat16(x), _as_bfloat16(rest), _as_bfloat16(rest - _cut(rest))


@triton.jit
def _cut(x):
    """x truncated to the bits of a bfloat16. Rounding would take longer."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _as_bfloat16(x):
    if PTX:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return _cut(x)  # the interpreter would multiply the bits as integers


@triton.jit
def _next_product(total, tile, weight, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``_product`` for a tile that comes from another product.

    Of every 8 units, a thread holds 2t and 2t + 1 of a result, but a tf32 operand needs t and
    t + 4. Reordering the units of both operands keeps the sum and moves no number between threads.
    """
    if PRECISION == "tf32":
        ROWS: tl.constexpr = tile.shape[0]
        UNITS: tl.constexpr = tile.shape[1]
        EIGHTS: tl.constexpr = UNITS // 8
        tile = tile.reshape(ROWS, EIGHTS, 4, 2).permute(0, 1, 3, 2).reshape(ROWS, UNITS)
        if TRANSPOSED == "b":
            OUT: tl.constexpr = weight.shape[0]
            weight = weight.reshape(OUT, EIGHTS, 4, 2).permute(0, 1, 3, 2).reshape(OUT, UNITS)
        else:
            IN: tl.constexpr = weight.shape[1]
            weight = weight.reshape(EIGHTS, 4, 2, IN).permute(0, 2, 1, 3).reshape(UNITS, IN)
    return _product(total, tile, weight, PRECISION, TRANSPOSED)


@triton.jit
def _plus_sum_over_rows(total, a, b, PRECISION: tl.constexpr):
    """total + a.T @ b, [units of a, units of b]."""
    if PRECISION == "float32":
        # Tensor cores round sums towards 0, which would cost digits over many tiles. So add the
        # tiles outside.
        return total + _product(tl.zeros(total.shape, tl.float32), a, b, PRECISION, "a")
    else:
        return _product(total, a, b, PRECISION, "a")


@triton.jit
def _activated(z, TANH: tl.constexpr, PRECISION: tl.constexpr):
    if TANH and PTX and PRECISION == "float32":
        # 1 - 2 / (exp(2z) + 1), to about 1e-7. The compiler's own exp and division handle special
        # cases that do not occur here, and take twice as long.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .f32 t;
                mul.f32 t, $1, 0f4038AA3B;
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 t, t;
                fma.rn.f32 $0, t, 0fC0000000, 0f3F800000;
            }
            """,
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif TANH and PTX:
        # Accurate to 11 bits, as tf32 is.
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    elif TANH:
        return 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
    else:
        return tl.where(z < 0.0, 0.0, z)  # not tl.maximum: it drops NaN


@triton.jit
def _slope(h, TANH: tl.constexpr):
    """Derivative of the activation, from its output."""
    if TANH:
        return 1.0 - h * h
    else:
        return (h > 0).to(tl.float32)


@triton.jit
def _bounded(x, low, high):
    """x clipped to [low, high]; NaN stays NaN."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weights(values, place, n_in, n_out, IN: tl.constexpr, OUT: tl.constexpr):
    i = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    there = (o < n_out)[:, None] & (i < n_in)[None, :]
    return tl.load(values + place + o[:, None] * n_in + i[None, :], mask=there, other=0.0)


@triton.jit
def _biases(values, place, n_in, n_out, OUT: tl.constexpr):
    """In FlatAdam, biases follow weights."""
    o = tl.arange(0, OUT)
    return tl.load(values + place + n_in * n_out + o, mask=o < n_out, other=0.0)


@triton.jit
def _layers(
    values, place_1, place_2, place_3, n_in, n_h, n_k, n_out,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Weights and output biases. Hidden biases are the weights of the input that is 1."""
    is_one = (tl.arange(0, D) == n_in)[None, :]
    w1 = _weights(values, place_1, n_in, n_h, D, H)
    w1 = tl.where(is_one, _biases(values, place_1, n_in, n_h, H)[:, None], w1)
    w2 = _weights(values, place_2, n_h, n_k, H, K)
    b2_as_weight = tl.where(is_one, _biases(values, place_2, n_h, n_k, K)[:, None], 0.0)
    w3 = _weights(values, place_3, n_k, n_out, K, A)
    return w1, w2, b2_as_weight, w3, _biases(values, place_3, n_k, n_out, A)


@triton.jit
def _forward(
    x, w1, w2, b2_as_weight, w3, b3,
    B: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both hidden layers and the outputs."""
    h = _product(tl.zeros([B, H], tl.float32), x, w1, PRECISION, "b")
    h = _activated(h, TANH, PRECISION)
    k = _product(tl.zeros([B, K], tl.float32), x, b2_as_weight, PRECISION, "b")
    k = _activated(_next_product(k, h, w2, PRECISION, "b"), TANH, PRECISION)
    out = _next_product(tl.zeros([B, A], tl.float32), k, w3, PRECISION, "b")
    return h, k, out + b3[None, :]


@triton.jit
def _prepared(obs, rows, live, moments, n_in, D: tl.constexpr):
    """Normalised observations and a 1, [B, D]; ``moments``: mean, 1 / standard deviation, limit."""
    d = tl.arange(0, D)
    there = d < n_in
    x = tl.load(
        obs + rows[:, None] * n_in + d[None, :], mask=live[:, None] & there[None, :], other=0.0
    )
    mean = tl.load(moments + d, mask=there, other=0.0)
    scale = tl.load(moments + n_in + d, mask=there, other=0.0)
    limit = tl.load(moments + 2 * n_in)
    x = _bounded((x - mean[None, :]) * scale[None, :], -limit, limit)
    return tl.where((d == n_in)[None, :], 1.0, x)


@triton.jit
def _log_probs(out, n_out, A: tl.constexpr):
    """Log-probabilities of the choices, about -1e30 for padding; and the probabilities."""
    valid = (tl.arange(0, A) < n_out)[None, :]
    logits = tl.where(valid, out, -1e30)
    centred = logits - tl.max(logits, axis=1)[:, None]
    weight = tl.exp(centred)
    total = tl.sum(weight, axis=1)
    return centred - tl.log(total)[:, None], weight * (1.0 / total)[:, None]


@triton.jit
def sample_kernel(
    values, layout, moments, obs, noise, action, n_rows, n_in, n_h, n_k, n_out, log_std,
    B: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, DISCRETE: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The actions that ``Categorical.sample`` or ``DiagonalGaussian.sample`` would draw."""
    w1, w2, b2_as_weight, w3, b3 = _layers(
        values, tl.load(layout), tl.load(layout + 1), tl.load(layout + 2), n_in, n_h, n_k, n_out,
        D, H, K, A,
    )  # fmt: skip
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    live = rows < n_rows
    x = _prepared(obs, rows, live, moments, n_in, D)
    _h, _k, out = _forward(x, w1, w2, b2_as_weight, w3, b3, B, H, K, A, TANH, PRECISION)
    if SKIP:
        out = tl.where(out == out, out, 0.0)
    a = tl.arange(0, A)
    if DISCRETE:
        _log, probs = _log_probs(out, n_out, A)
        threshold = tl.load(noise + rows, mask=live, other=0.0) * tl.sum(probs, axis=1)
        passed = (tl.cumsum(probs, axis=1) <= threshold[:, None]) & (a < n_out - 1)[None, :]
        tl.store(action + rows, tl.sum(passed.to(tl.int32), axis=1).to(tl.int64), mask=live)
    else:
        place = rows[:, None] * n_out + a[None, :]
        there = live[:, None] & (a < n_out)[None, :]
        std = tl.exp(tl.load(values + log_std + a, mask=a < n_out, other=0.0))
        drawn = tl.load(noise + place, mask=there, other=0.0)
        tl.store(action + place, out + std[None, :] * drawn, mask=there)


@triton.jit(do_not_specialize=["first_tower", "wanted_stride"])  # one variant, not three
def score_kernel(
    values, layout, moments, obs, action, log_prob, value, wanted, n_rows, n_in, n_h, n_k, n_out,
    log_std, log_sqrt_2pi, first_tower, wanted_stride,
    B: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, DISCRETE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log_prob of the actions (tower 0) and value (tower 1).

    Tiles without a wanted row are skipped. With a stride of 0, one flag counts for all rows.
    """
    tower = first_tower + tl.program_id(1)
    places = layout + tower * 3
    n_last = tl.where(tower == 0, n_out, 1)
    w1, w2, b2_as_weight, w3, b3 = _layers(
        values, tl.load(places), tl.load(places + 1), tl.load(places + 2), n_in, n_h, n_k, n_last,
        D, H, K, A,
    )  # fmt: skip
    a = tl.arange(0, A)
    log_stds = tl.zeros([A], tl.float32)
    if not DISCRETE:
        log_stds = tl.load(values + log_std + a, mask=a < n_out, other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, B), tl.num_programs(0)):
        rows = (tile * B + tl.arange(0, B)).to(tl.int64)
        live = rows < n_rows
        flags = tl.load(wanted + rows * wanted_stride, mask=live, other=0)
        if tl.max(flags.to(tl.int32), axis=0) > 0:
            x = _prepared(obs, rows, live, moments, n_in, D)
            _h, _k, out = _forward(x, w1, w2, b2_as_weight, w3, b3, B, H, K, A, TANH, PRECISION)
            if tower == 1:
                found = tl.sum(tl.where((a == 0)[None, :], out, 0.0), axis=1)
                tl.store(value + rows, found, mask=live)
            elif DISCRETE:
                taken = a[None, :] == tl.load(action + rows, mask=live, other=0)[:, None]
                log_probs, _probs = _log_probs(out, n_out, A)
                chosen = tl.where(taken, log_probs, 0.0)
                tl.store(log_prob + rows, tl.sum(chosen, axis=1), mask=live)
            else:
                there = a < n_out
                place = rows[:, None] * n_out + a[None, :]
                done = tl.load(action + place, mask=live[:, None] & there[None, :], other=0.0)
                z = tl.where(there[None, :], (done - out) * tl.exp(-log_stds)[None, :], 0.0)
                constant = tl.sum(log_stds, axis=0) + n_out * log_sqrt_2pi
                tl.store(log_prob + rows, -0.5 * tl.sum(z * z, axis=1) - constant, mask=live)


@triton.jit
def advantage_kernel(advantage, order, parts, size, B: tl.constexpr, N_PARTS: tl.constexpr):
    """Count, mean and sum of squared deviations of one part of one minibatch's advantages."""
    minibatch, part = tl.program_id(0), tl.program_id(1)
    length = tl.cdiv(size, N_PARTS)
    begin = part * length
    end = tl.minimum(begin + length, size)
    count, mean, square = 0.0, 0.0, 0.0
    for start in range(begin, end, B):
        i = start + tl.arange(0, B)
        live = i < end
        rows = tl.load(order + minibatch * size + i, mask=live, other=0)
        given = tl.load(advantage + rows, mask=live, other=0.0)
        n = tl.sum(live.to(tl.float32), axis=0)
        own_mean = tl.sum(given, axis=0) / n
        centred = tl.where(live, given - own_mean, 0.0)
        shift = own_mean - mean
        total = count + n
        square += tl.sum(centred * centred, axis=0) + shift * shift * count * n / total
        mean += shift * n / total
        count = total
    place = parts + (minibatch * N_PARTS + part) * 3
    tl.store(place, count)
    tl.store(place + 1, mean)
    tl.store(place + 2, square)


@triton.jit(do_not_specialize=["minibatch"])  # else Triton compiles several variants
def gradient_kernel(
    values, layout, moments, obs, action, old_log_prob, old_value, advantage, target, order, parts,
    rates, partial, minibatch, size, n_values, n_in, n_h, n_k, n_out, log_std, log_sqrt_2pi,
    value_coef, dual_clip,
    B: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, DISCRETE: tl.constexpr, NORMALIZE: tl.constexpr, DUAL: tl.constexpr,
    CLIP_VALUE: tl.constexpr, N_PARTS: tl.constexpr, N_METRICS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write this program's part of gradient and metrics to its row of ``partial``."""
    tower = tl.program_id(1)
    n_last = tl.where(tower == 0, n_out, 1)
    place_1 = tl.load(layout + tower * 3)
    place_2 = tl.load(layout + tower * 3 + 1)
    place_3 = tl.load(layout + tower * 3 + 2)
    w1, w2, b2_as_weight, w3, b3 = _layers(
        values, place_1, place_2, place_3, n_in, n_h, n_k, n_last, D, H, K, A
    )
    clip_range = tl.load(rates + 1)
    entropy_coef = tl.load(rates + 2)
    share = 1.0 / size
    a = tl.arange(0, A)
    valid = (a < n_out)[None, :]
    log_stds = tl.zeros([A], tl.float32)
    if not DISCRETE:
        log_stds = tl.load(values + log_std + a, mask=a < n_out, other=0.0)
    mean, scale = 0.0, 1.0
    if NORMALIZE:
        p = tl.arange(0, N_PARTS)
        at = parts + (minibatch * N_PARTS + p) * 3
        counts_of, means, squares = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        mean = tl.sum(counts_of * means, axis=0) * share
        shift = means - mean
        variance = tl.sum(squares + counts_of * shift * shift, axis=0) * share
        scale = 1.0 / (tl.sqrt(variance) + 1e-8)

    g_w1 = tl.zeros([H, D], tl.float32)
    g_w2 = tl.zeros([K, H], tl.float32)
    g_w3 = tl.zeros([K, A], tl.float32)  # transposed
    g_b2 = tl.zeros([K, D], tl.float32)
    g_b3 = tl.zeros([B, A], tl.float32)
    g_log_std = tl.zeros([B, A], tl.float32)
    # Sum over the rows only after the last tile, so that warps do not wait for each other.
    loss_sum = tl.zeros([B], tl.float32)
    entropies = tl.zeros([B], tl.float32)
    kl_sum = tl.zeros([B], tl.float32)
    n_clipped = tl.zeros([B], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(size, B), tl.num_programs(0)):
        i = tile * B + tl.arange(0, B)
        live = i < size
        rows = tl.load(order + minibatch * size + i, mask=live, other=0).to(tl.int64)
        x = _prepared(obs, rows, live, moments, n_in, D)
        h, k, out = _forward(x, w1, w2, b2_as_weight, w3, b3, B, H, K, A, TANH, PRECISION)
        grad = tl.zeros([B, A], tl.float32)
        if tower == 0:
            old = tl.load(old_log_prob + rows, mask=live, other=0.0)
            gained = (tl.load(advantage + rows, mask=live, other=0.0) - mean) * scale
            if DISCRETE:
                log_probs, probs = _log_probs(out, n_out, A)
                chosen = tl.load(action + rows, mask=live, other=0)
                taken = (a[None, :] == chosen[:, None]).to(tl.float32)
                log_prob = tl.sum(taken * log_probs, axis=1)
            else:
                done = tl.load(
                    action + rows[:, None] * n_out + a[None, :],
                    mask=live[:, None] & valid,
                    other=0.0,
                )
                z = tl.where(valid, (done - out) * tl.exp(-log_stds)[None, :], 0.0)
                constant = tl.sum(log_stds, axis=0) + n_out * log_sqrt_2pi
                log_prob = -0.5 * tl.sum(z * z, axis=1) - constant
            log_ratio = tl.where(live, log_prob - old, 0.0)
            ratio = tl.exp(log_ratio)
            gain = gained * ratio
            bounded = gained * _bounded(ratio, 1.0 - clip_range, 1.0 + clip_range)
            counts = gain <= bounded
            bounded = tl.where(counts, gain, bounded)
            if DUAL:
                floor = tl.where(gained < 0, gained * dual_clip, float("-inf"))
                counts = counts & (bounded >= floor)
                bounded = tl.where(bounded < floor, floor, bounded)
            g = tl.where(counts & live, gain, 0.0) * -share
            loss_sum += tl.where(live, bounded, 0.0)
            kl_sum += ratio - 1.0 - log_ratio
            n_clipped += ((tl.abs(ratio - 1.0) > clip_range) & live).to(tl.float32)
            if DISCRETE:
                weighted = tl.where(valid & live[:, None], probs * log_probs, 0.0)
                entropy = -tl.sum(weighted, axis=1)
                entropies += entropy
                spread = weighted + probs * entropy[:, None]
                grad = g[:, None] * (taken - probs) + (entropy_coef * share) * spread
            else:
                grad = g[:, None] * z * tl.exp(-log_stds)[None, :]
                g_log_std += g[:, None] * (z * z - 1.0)
        else:
            value = tl.sum(tl.where((a == 0)[None, :], out, 0.0), axis=1)
            wanted = tl.load(target + rows, mask=live, other=0.0)
            error = tl.where(live, value - wanted, 0.0)
            square = error * error
            slope = error
            if CLIP_VALUE:
                before = tl.load(old_value + rows, mask=live, other=0.0)
                moved = value - before
                held = _bounded(moved, -clip_range, clip_range)
                other = tl.where(live, before + held - wanted, 0.0)
                slope = tl.where(other * other > square, tl.where(moved == held, other, 0.0), error)
                square = tl.where(other * other <= square, square, other * other)
            loss_sum += 0.5 * square
            grad = tl.where((a == 0)[None, :], (slope * (value_coef * share))[:, None], 0.0)
        g_b3 += grad
        g_w3 = _plus_sum_over_rows(g_w3, k, grad, PRECISION)
        grad_k = tl.zeros([B, K], tl.float32)
        grad_k = _next_product(grad_k, grad, w3, PRECISION, "")
        grad_k *= _slope(k, TANH)
        g_w2 = _plus_sum_over_rows(g_w2, grad_k, h, PRECISION)
        g_b2 = _plus_sum_over_rows(g_b2, grad_k, x, PRECISION)
        grad_h = tl.zeros([B, H], tl.float32)
        grad_h = _next_product(grad_h, grad_k, w2, PRECISION, "")
        grad_h *= _slope(h, TANH)
        g_w1 = _plus_sum_over_rows(g_w1, grad_h, x, PRECISION)

    row = partial + tl.program_id(0).to(tl.int64) * (n_values + N_METRICS)
    is_one = (tl.arange(0, D) == n_in)[None, :]
    g_b1 = tl.sum(tl.where(is_one, g_w1, 0.0), axis=1)
    g_b2 = tl.sum(tl.where(is_one, g_b2, 0.0), axis=1)
    _store_layer(row + place_1, g_w1, g_b1, n_in, n_h, D, H)
    _store_layer(row + place_2, g_w2, g_b2, n_h, n_k, H, K)
    _store_layer(row + place_3, tl.trans(g_w3), tl.sum(g_b3, axis=0), n_k, n_last, K, A)
    if tower == 0:
        entropy_sum = tl.sum(entropies, axis=0)
        if not DISCRETE:
            is_first = (tl.program_id(0) == 0).to(tl.float32)
            found = tl.sum(g_log_std, axis=0) - entropy_coef * is_first
            tl.store(row + log_std + a, found, mask=a < n_out)
            constant = tl.sum(log_stds, axis=0) + n_out * (log_sqrt_2pi + 0.5)
            entropy_sum = is_first * size * constant
        tl.store(row + n_values, -tl.sum(loss_sum, axis=0) * share)
        tl.store(row + n_values + 2, entropy_sum * share)
        tl.store(row + n_values + 3, tl.sum(kl_sum, axis=0) * share)
        tl.store(row + n_values + 4, tl.sum(n_clipped, axis=0) * share)
    else:
        tl.store(row + n_values + 1, tl.sum(loss_sum, axis=0) * share)


@triton.jit
def _store_layer(place, weight, bias, n_in, n_out, IN: tl.constexpr, OUT: tl.constexpr):
    i = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    there = (o < n_out)[:, None] & (i < n_in)[None, :]
    tl.store(place + o[:, None] * n_in + i[None, :], weight, mask=there)
    tl.store(place + n_in * n_out + o, bias, mask=o < n_out)
