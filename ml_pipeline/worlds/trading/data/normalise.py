"""Normalisation of features: centre and scale of each symbol and feature, from the train period."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.worlds.trading.data.market import DataError, Market

Array = NDArray[np.float64]

CLIP = 10.0  # scales; one wild bar must not blind the network
_NORMAL_IQR = 1.3489795003921634  # distance of the quartiles of a standard normal


class Statistics(NamedTuple):
    """What turns a raw feature into a normalised one."""

    centre: Array  # [S, F]
    scale: Array  # [S, F], positive
    clip: float  # in scales; infinity for normalise=none


def fitted(market: Market, train: slice, normalise: str) -> Statistics:
    """Statistics of the bars of the train period; gaps do not count."""
    shape = market.feature.shape[1:]
    centre, scale = np.zeros(shape), np.ones(shape)
    if normalise == "none":
        return Statistics(centre, scale, np.inf)
    for index, symbol in enumerate(market.symbols):
        seen = market.feature[train, index][market.tradable[train, index]]
        if len(seen) < 2:
            raise DataError(
                f"normalise={normalise}: {symbol} has no bars in the train period; "
                "leave it out, or move the periods"
            )
        centre[index], scale[index] = _robust(seen) if normalise == "robust" else _standard(seen)
    return Statistics(centre, np.where(scale > 0, scale, 1.0), CLIP)


def _standard(seen: NDArray[np.floating]) -> tuple[Array, Array]:
    return seen.mean(axis=0), seen.std(axis=0)


def _robust(seen: NDArray[np.floating]) -> tuple[Array, Array]:
    low, middle, high = np.quantile(seen, (0.25, 0.5, 0.75), axis=0)
    return middle, (high - low) / _NORMAL_IQR


def normalised(feature: NDArray[np.floating], statistics: Statistics) -> NDArray[np.float32]:
    """float32 features; [T, S, F]."""
    scaled = np.subtract(feature, statistics.centre)
    scaled /= statistics.scale
    np.clip(scaled, -statistics.clip, statistics.clip, out=scaled)
    return np.asarray(scaled, dtype=np.float32)
