"""Explains out-of-memory errors in one line; each algorithm says what it needs."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ml_pipeline.device import held_memory, total_memory
from ml_pipeline.errors import UserError
from ml_pipeline.policy.observations import ObservationReader

# Not every library has an exception class for it. In this order: CUDA, HIP and MPS; the CPU; one
# tensor that is too large for Metal; cuBLAS; sizes that no machine has.
_WORDS = (
    "out of memory",
    "DefaultCPUAllocator",
    "Invalid buffer size",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",
    "array is too big",
    "Maximum allowed dimension exceeded",
)

NETWORK_ADVICE = (
    "the network alone does not fit, or other programs use the memory; use a smaller network or "
    "another device"
)


class DeviceMemoryError(UserError):
    """The device or the machine has too little memory."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether torch or NumPy could not allocate memory, on any device."""
    if isinstance(error, UserError):  # already explained
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_candidate = isinstance(error, (RuntimeError, ValueError))
    return is_candidate and any(words in str(error) for words in _WORDS)


@contextmanager
def memory_explained(device: torch.device | str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into one line: the fact, then ``advice()``."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        # A kept error, as in a sweep, would keep all tensors of its frames alive.
        traceback.clear_frames(error.__traceback__)
        asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
        size = f" (tried to allocate {asked[1]})" if asked else ""
        raise DeviceMemoryError(f"out of memory on {device}{size}: {advice()}") from error


def obs_bytes(reader: ObservationReader) -> int:
    """Bytes of one observation, as it is stored."""
    return sum(
        math.prod(shape) * reader.dtypes[name].itemsize for name, shape in reader.shapes.items()
    )


def memory_of(device: torch.device) -> str:
    """The memory of a device, as the middle of a sentence; empty if unknown."""
    total, held = total_memory(device), held_memory(device)
    if total is None:
        return ""
    part = "" if held is None else f", of which this process held {shown_bytes(held)}"
    return f"; {device} has {shown_bytes(total)}{part}"


def shown_bytes(n_bytes: float) -> str:
    """2_500_000 -> "2.5 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"
