"""Triton kernels of ``TritonPPO``: forward and backward of a small MLP, one tile at a time.

A tile is a matrix [units, rows], and a layer is ``weight @ tile``. So weights keep torch's layout,
and sums over rows stay inside a warp. Sizes: B rows, D inputs, H and K hidden units, A outputs. All
but B are padded to powers of two of at least 16, as tensor cores require. Rows beyond the end are
not ``live``: they add nothing to any sum.

Every sum has a fixed order, so that results are reproducible.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter, which tests these kernels without a GPU, has no inline assembly.
PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b, accumulated in float32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "tf32":
        return tl.dot(a, b, input_precision="tf32")
    else:
        # Tensor cores use 11 of the 24 bits of a float32. So split each number into a high and a
        # low part, and add three of the four products; the smallest does not matter. (Triton's
        # own tf32x3 also handles infinities, which makes it slower.)
        a_high, b_high = _high_bits(a), _high_bits(b)
        total = tl.dot(a - a_high, b_high, input_precision="tf32")
        total = tl.dot(a_high, b - b_high, total, input_precision="tf32")
        return tl.dot(a_high, b_high, total, input_precision="tf32")


@triton.jit
def _high_bits(x):
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _activated(z, TANH: tl.constexpr):
    if TANH and PTX:
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
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _layer(values, place, n_in, n_out, IN: tl.constexpr, OUT: tl.constexpr):
    """Weights [OUT, IN] and biases [OUT] of a layer; in FlatAdam, biases follow weights."""
    i = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    there = (o < n_out)[:, None] & (i < n_in)[None, :]
    weight = tl.load(values + place + o[:, None] * n_in + i[None, :], mask=there, other=0.0)
    bias = tl.load(values + place + n_in * n_out + o, mask=o < n_out, other=0.0)
    return weight, bias


@triton.jit
def _prepared(obs, rows, live, moments, n_in, D: tl.constexpr):
    """Normalised observations, [D, B]; ``moments`` are mean, 1 / standard deviation, limit."""
    d = tl.arange(0, D)
    there = d < n_in
    x = tl.load(
        obs + rows[None, :] * n_in + d[:, None], mask=there[:, None] & live[None, :], other=0.0
    )
    mean = tl.load(moments + d, mask=there, other=0.0)
    scale = tl.load(moments + n_in + d, mask=there, other=0.0)
    limit = tl.load(moments + 2 * n_in)
    return _bounded((x - mean[:, None]) * scale[:, None], -limit, limit)


@triton.jit
def _log_probs(out, n_out, A: tl.constexpr):
    """Log-probabilities of the choices; about -1e30 for padding."""
    valid = (tl.arange(0, A) < n_out)[:, None]
    logits = tl.where(valid, out, -1e30)
    centred = logits - tl.max(logits, axis=0)[None, :]
    return centred - tl.log(tl.sum(tl.exp(centred), axis=0))[None, :]


@triton.jit
def sample_kernel(
    values, layout, moments, obs, noise, action, n_rows, n_in, n_h, n_k, n_out, log_std,
    B: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, DISCRETE: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The actions that ``Categorical.sample`` or ``DiagonalGaussian.sample`` would draw."""
    w1, b1 = _layer(values, tl.load(layout), n_in, n_h, D, H)
    w2, b2 = _layer(values, tl.load(layout + 1), n_h, n_k, H, K)
    w3, b3 = _layer(values, tl.load(layout + 2), n_k, n_out, K, A)
    rows = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    live = rows < n_rows
    x = _prepared(obs, rows, live, moments, n_in, D)
    h = _activated(_product(w1, x, PRECISION) + b1[:, None], TANH)
    k = _activated(_product(w2, h, PRECISION) + b2[:, None], TANH)
    out = _product(w3, k, PRECISION) + b3[:, None]
    if SKIP:
        out = tl.where(out == out, out, 0.0)
    a = tl.arange(0, A)
    if DISCRETE:
        weight = tl.exp(_log_probs(out, n_out, A))
        cumulative = tl.cumsum(weight, axis=0)
        threshold = tl.load(noise + rows, mask=live, other=0.0) * tl.sum(weight, axis=0)
        passed = (cumulative <= threshold[None, :]) & (a < n_out - 1)[:, None]
        tl.store(action + rows, tl.sum(passed.to(tl.int32), axis=0).to(tl.int64), mask=live)
    else:
        place = rows[None, :] * n_out + a[:, None]
        there = live[None, :] & (a < n_out)[:, None]
        std = tl.exp(tl.load(values + log_std + a, mask=a < n_out, other=0.0))
        drawn = tl.load(noise + place, mask=there, other=0.0)
        tl.store(action + place, out + std[:, None] * drawn, mask=there)


@triton.jit
def score_kernel(
    values, layout, moments, obs, action, log_prob, value, wanted, n_rows, n_in, n_h, n_k, n_out,
    log_std, log_sqrt_2pi, first_tower,
    B: tl.constexpr, D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, A: tl.constexpr,
    TANH: tl.constexpr, DISCRETE: tl.constexpr, HAS_WANTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log_prob of the actions (tower 0) and value (tower 1).

    With ``wanted``, tiles without a wanted row are skipped.
    """
    tower = first_tower + tl.program_id(1)
    n_last = tl.where(tower == 0, n_out, 1)
    w1, b1 = _layer(values, tl.load(layout + tower * 3), n_in, n_h, D, H)
    w2, b2 = _layer(values, tl.load(layout + tower * 3 + 1), n_h, n_k, H, K)
    w3, b3 = _layer(values, tl.load(layout + tower * 3 + 2), n_k, n_last, K, A)
    a = tl.arange(0, A)
    log_stds = tl.zeros([A], tl.float32)
    if not DISCRETE:
        log_stds = tl.load(values + log_std + a, mask=a < n_out, other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, B), tl.num_programs(0)):
        rows = (tile * B + tl.arange(0, B)).to(tl.int64)
        live = rows < n_rows
        asked = 1
        if HAS_WANTED:
            asked = tl.max(tl.load(wanted + rows, mask=live, other=0).to(tl.int32), axis=0)
        if asked > 0:
            x = _prepared(obs, rows, live, moments, n_in, D)
            h = _activated(_product(w1, x, PRECISION) + b1[:, None], TANH)
            k = _activated(_product(w2, h, PRECISION) + b2[:, None], TANH)
            out = _product(w3, k, PRECISION) + b3[:, None]
            if tower == 1:
                found = tl.sum(tl.where((a == 0)[:, None], out, 0.0), axis=0)
                tl.store(value + rows, found, mask=live)
            elif DISCRETE:
                taken = a[:, None] == tl.load(action + rows, mask=live, other=0)[None, :]
                chosen = tl.where(taken, _log_probs(out, n_out, A), 0.0)
                tl.store(log_prob + rows, tl.sum(chosen, axis=0), mask=live)
            else:
                there = a < n_out
                place = rows[None, :] * n_out + a[:, None]
                done = tl.load(action + place, mask=live[None, :] & there[:, None], other=0.0)
                z = tl.where(there[:, None], (done - out) * tl.exp(-log_stds)[:, None], 0.0)
                constant = tl.sum(log_stds, axis=0) + n_out * log_sqrt_2pi
                tl.store(log_prob + rows, -0.5 * tl.sum(z * z, axis=0) - constant, mask=live)


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
    w1, b1 = _layer(values, place_1, n_in, n_h, D, H)
    w2, b2 = _layer(values, place_2, n_h, n_k, H, K)
    w3, b3 = _layer(values, place_3, n_k, n_last, K, A)
    clip_range = tl.load(rates + 1)
    entropy_coef = tl.load(rates + 2)
    share = 1.0 / size
    a = tl.arange(0, A)
    valid = (a < n_out)[:, None]
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
    g_w3 = tl.zeros([A, K], tl.float32)
    g_b1 = tl.zeros([H], tl.float32)
    g_b2 = tl.zeros([K], tl.float32)
    g_b3 = tl.zeros([A], tl.float32)
    g_log_std = tl.zeros([A], tl.float32)
    # Sum over the rows only after the last tile, so that warps do not wait for each other.
    told_1 = tl.zeros([B], tl.float32)
    told_2 = tl.zeros([B], tl.float32)
    told_3 = tl.zeros([B], tl.float32)
    told_4 = tl.zeros([B], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(size, B), tl.num_programs(0)):
        i = tile * B + tl.arange(0, B)
        live = i < size
        rows = tl.load(order + minibatch * size + i, mask=live, other=0).to(tl.int64)
        x = _prepared(obs, rows, live, moments, n_in, D)
        h = _activated(_product(w1, x, PRECISION) + b1[:, None], TANH)
        k = _activated(_product(w2, h, PRECISION) + b2[:, None], TANH)
        out = _product(w3, k, PRECISION) + b3[:, None]
        grad = tl.zeros([A, B], tl.float32)
        if tower == 0:
            old = tl.load(old_log_prob + rows, mask=live, other=0.0)
            gained = (tl.load(advantage + rows, mask=live, other=0.0) - mean) * scale
            z = tl.zeros([A, B], tl.float32)
            log_probs = tl.zeros([A, B], tl.float32)
            taken = tl.zeros([A, B], tl.float32)
            if DISCRETE:
                log_probs = _log_probs(out, n_out, A)
                chosen = tl.load(action + rows, mask=live, other=0)
                taken = (a[:, None] == chosen[None, :]).to(tl.float32)
                log_prob = tl.sum(taken * log_probs, axis=0)
            else:
                done = tl.load(
                    action + rows[None, :] * n_out + a[:, None],
                    mask=live[None, :] & valid,
                    other=0.0,
                )
                z = tl.where(valid, (done - out) * tl.exp(-log_stds)[:, None], 0.0)
                constant = tl.sum(log_stds, axis=0) + n_out * log_sqrt_2pi
                log_prob = -0.5 * tl.sum(z * z, axis=0) - constant
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
            told_1 += tl.where(live, bounded, 0.0)
            told_3 += ratio - 1.0 - log_ratio
            told_4 += ((tl.abs(ratio - 1.0) > clip_range) & live).to(tl.float32)
            if DISCRETE:
                probs = tl.exp(log_probs)
                weighted = tl.where(valid & live[None, :], probs * log_probs, 0.0)
                entropy = -tl.sum(weighted, axis=0)
                told_2 += entropy
                spread = weighted + probs * entropy[None, :]
                grad = g[None, :] * (taken - probs) + (entropy_coef * share) * spread
            else:
                grad = g[None, :] * z * tl.exp(-log_stds)[:, None]
                g_log_std += tl.sum(g[None, :] * (z * z - 1.0), axis=1)
        else:
            value = tl.sum(tl.where((a == 0)[:, None], out, 0.0), axis=0)
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
            told_1 += 0.5 * square
            grad = tl.where((a == 0)[:, None], (slope * (value_coef * share))[None, :], 0.0)
        g_w3 += _product(grad, tl.trans(k), PRECISION)
        g_b3 += tl.sum(grad, axis=1)
        grad_k = _product(tl.trans(w3), grad, PRECISION) * _slope(k, TANH)
        g_w2 += _product(grad_k, tl.trans(h), PRECISION)
        g_b2 += tl.sum(grad_k, axis=1)
        grad_h = _product(tl.trans(w2), grad_k, PRECISION) * _slope(h, TANH)
        g_w1 += _product(grad_h, tl.trans(x), PRECISION)
        g_b1 += tl.sum(grad_h, axis=1)

    row = partial + tl.program_id(0).to(tl.int64) * (n_values + N_METRICS)
    _store_layer(row + place_1, g_w1, g_b1, n_in, n_h, D, H)
    _store_layer(row + place_2, g_w2, g_b2, n_h, n_k, H, K)
    _store_layer(row + place_3, g_w3, g_b3, n_k, n_last, K, A)
    if tower == 0:
        entropy_sum = tl.sum(told_2, axis=0)
        if not DISCRETE:
            is_first = (tl.program_id(0) == 0).to(tl.float32)
            tl.store(row + log_std + a, g_log_std - entropy_coef * is_first, mask=a < n_out)
            constant = tl.sum(log_stds, axis=0) + n_out * (log_sqrt_2pi + 0.5)
            entropy_sum = is_first * size * constant
        tl.store(row + n_values, -tl.sum(told_1, axis=0) * share)
        tl.store(row + n_values + 2, entropy_sum * share)
        tl.store(row + n_values + 3, tl.sum(told_3, axis=0) * share)
        tl.store(row + n_values + 4, tl.sum(told_4, axis=0) * share)
    else:
        tl.store(row + n_values + 1, tl.sum(told_1, axis=0) * share)


@triton.jit
def _store_layer(place, weight, bias, n_in, n_out, IN: tl.constexpr, OUT: tl.constexpr):
    i = tl.arange(0, IN)
    o = tl.arange(0, OUT)
    there = (o < n_out)[:, None] & (i < n_in)[None, :]
    tl.store(place + o[:, None] * n_in + i[None, :], weight, mask=there)
    tl.store(place + n_in * n_out + o, bias, mask=o < n_out)
