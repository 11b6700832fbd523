"""UpdateNoise: the noise of a gradient step, equal for any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ml_pipeline.ranks.batches import BatchPart


class UpdateNoise:
    """Standard normal noise from ``generator``; a rank uses its rows of that of a whole batch."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._device = device
        self.part: BatchPart | None = None  # None: the batch is whole

    def draw(self, n_rows: int, n_columns: int) -> Tensor:
        """[n_rows, n_columns], one row for each transition of the batch or of the part."""
        n_drawn = n_rows if self.part is None else self.part.size
        shape = (n_drawn, n_columns)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        return noise if self.part is None else noise[self.part.rows]
