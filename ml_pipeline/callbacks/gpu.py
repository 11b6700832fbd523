"""GpuReport: logs GPU utilization and the GPU memory that this process holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ml_pipeline.device import held_memory
from ml_pipeline.records import Metrics
from ml_pipeline.training.contracts import Callback, RunningLoop


class GpuReport(Callback):
    """Adds ``gpu/memory_mb`` and ``gpu/utilization`` if a run trains on a GPU.

    ``gpu/memory_mb`` is the memory that torch has reserved. torch does not free it, so this is
    also the peak so far. ``gpu/utilization`` is the share of about the last second in which the
    GPU was busy, for any process. It needs nvidia-ml-py (on ROCm: amdsmi) and is absent if the
    package is missing or cannot read it, as on MPS.

    A reading can take milliseconds, so only one row per ``every_seconds`` has these metrics.
    """

    def __init__(
        self,
        device: torch.device,
        every_seconds: float = 1.0,
        read_utilization: Callable[[torch.device], float] = torch.cuda.utilization,
    ) -> None:
        """``read_utilization`` returns percent."""
        self.device = device
        self.every_seconds = every_seconds
        self._read_utilization = read_utilization if device.type == "cuda" else None
        self._last_read = -math.inf

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
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
        except Exception:  # a missing package, an old driver and a MIG slice raise different types
            self._read_utilization = None  # it would fail again
            return None
