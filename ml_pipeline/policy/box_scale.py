"""BoxScale: maps actions in [-1, 1] to the bounds of a Box; and bounds that need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

# Half of the distance between two bounds, in standard deviations; and the size of a bound.
_NARROWEST, _FURTHEST = 0.2, 5.0


class BoxScale(nn.Module):
    """``forward`` scales actions [..., n_actions] on the device; the Box must be bounded."""

    _low_tensor: Tensor
    _half_tensor: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        low, high = (np.asarray(b, dtype=np.float64).flatten() for b in (space.low, space.high))
        self._low, self._half = low, 0.5 * (high - low)
        # A dimension with low == high has no density.
        self.log_volume = float(np.log(self._half[self._half > 0]).sum())
        for name, numbers in (("_low_tensor", self._low), ("_half_tensor", self._half)):
            self.register_buffer(name, torch.from_numpy(numbers).float(), persistent=False)

    def forward(self, action: Tensor) -> Tensor:
        return self._low_tensor + self._half_tensor * (action + 1.0)

    def array(self, action: NDArray[Any]) -> NDArray[Any]:
        """Scaled actions in float64, for envs in processes."""
        return self._low + self._half * (action + 1.0)

    def exact(self, action: Tensor) -> Tensor:
        """``array`` in torch on the CPU, for exported graphs."""
        low, half = (
            torch.tensor(each.tolist(), dtype=torch.float64) for each in (self._low, self._half)
        )
        return low + half * (action + 1.0)


def unsuitable_bounds(space: spaces.Box, deviation: float = 1.0) -> str | None:
    """The first bounds that do not suit actions of mean 0 and this standard deviation, or None.

    Nearly all actions would be clipped, or none would come near a bound.
    """
    low, high = (np.asarray(b, dtype=np.float64).flatten() for b in (space.low, space.high))
    is_free = high > low
    is_narrow = is_free & (high - low < 2.0 * _NARROWEST * deviation)
    furthest = np.maximum(*(np.where(np.isfinite(b), np.abs(b), 0.0) for b in (low, high)))
    is_wrong = is_narrow | (is_free & (furthest > _FURTHEST * max(deviation, 1.0)))
    if not is_wrong.any():
        return None
    first = int(is_wrong.argmax())
    return f"{low[first]:g} to {high[first]:g}"
