"""GpuReport: how busy the GPU is, and what this process holds of its memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ml_pipeline.device import held_memory
from ml_pipeline.protocols import Callback, Metrics, Trainer


class GpuReport(Callback):
    """Adds ``gpu/memory_mb`` and ``gpu/utilization`` where a run trains on a GPU.

    ``gpu/memory_mb`` is what this process holds. torch keeps what it once took, so it is also the
    most that was in use so far. ``gpu/utilization`` is the share of the last moment, a second at
    most, in which the GPU had something to do, for whatever process. It needs nvidia-ml-py (on
    ROCm: amdsmi) and is left out where that is missing or cannot tell, as on MPS.

    A reading takes up to milliseconds, so the rows in between have neither metric.
    """

    def __init__(
        self,
        device: torch.device,
        every_seconds: float = 1.0,
        read_utilization: Callable[[torch.device], float] = torch.cuda.utilization,
    ) -> None:
        """``read_utilization`` gives percent."""
        self.device = device
        self.every_seconds = every_seconds
        self._read_utilization = read_utilization if device.type == "cuda" else None
        self._last_read = -math.inf

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        if self.device.type == "cpu":
            return
        now = time.monotonic()
        if now - self._last_read < self.every_seconds:
            return
        self._last_read = now
        held = held_memory(self.device)
        if held is not None:
            metrics["gpu/memory_mb"] = held / 1e6
        utilization = self._utilization()
        if utilization is not None:
            metrics["gpu/utilization"] = utilization

    def _utilization(self) -> float | None:
        if self._read_utilization is None:
            return None
        try:
            return self._read_utilization(self.device) / 100.0
        except Exception:  # a missing package, a driver without it, a slice of a GPU: each its own
            self._read_utilization = None  # it will not be there the next time, either
            return None
