"""Sums over a moving window and recursive means, vectorised.

Row t of a result depends on rows up to t only, and its bits do not depend on what follows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_CHUNK = 16_384  # rows that stay in the processor's cache while a window slides
_BLOCK = 4_096  # steps of a recursion; all blocks advance together


def rolling_mean(x: Array, window: int) -> Array:
    """The mean of the last ``window`` values; the result has ``window - 1`` fewer rows."""
    mean = np.empty(max(len(x) - window + 1, 0))
    for start in range(0, len(mean), _CHUNK):
        part = mean[start : start + _CHUNK]
        part[:] = 0.0
        for shift in range(window):
            part += x[start + shift : start + shift + len(part)]
        part /= window
    return mean


def rolling_std(x: Array, window: int) -> Array:
    """The standard deviation (divided by ``window``) around ``rolling_mean``, in two passes."""
    mean = rolling_mean(x, window)
    variance = np.empty_like(mean)
    for start in range(0, len(mean), _CHUNK):
        part, centre = variance[start : start + _CHUNK], mean[start : start + _CHUNK]
        part[:] = 0.0
        for shift in range(window):
            part += np.square(x[start + shift : start + shift + len(part)] - centre)
        part /= window
    return np.sqrt(variance)


def recursive_mean(x: Array, *, start: float, weight: float) -> Array:
    """y[t] = (1 - weight) * y[t - 1] + weight * x[t], where ``start`` is y[-1].

    Each block starts from zero; what the blocks before it contribute is added at the end.
    """
    decay = 1.0 - weight
    n_blocks = -(-len(x) // _BLOCK)
    n_steps = min(_BLOCK, len(x))
    padded = np.zeros(n_blocks * _BLOCK)
    padded[: len(x)] = x
    y = np.ascontiguousarray(padded.reshape(n_blocks, _BLOCK)[:, :n_steps].T) * weight
    for step in range(1, n_steps):
        y[step] += decay * y[step - 1]
    before = np.empty(n_blocks)  # y of the step before each block
    value = start
    for block in range(n_blocks):
        before[block] = value
        value = y[-1, block] + decay**n_steps * value
    y += decay ** np.arange(1, n_steps + 1)[:, None] * before
    return np.ascontiguousarray(y.T).reshape(-1)[: len(x)]
