"""BoxScale: maps actions in [-1, 1] to the bounds of a Box."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn


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
