"""The torch device of a run: how to choose it, its precision and its memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from ml_pipeline.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


class DeviceError(UserError):
    """This machine does not have the requested device."""


def program_mode(wanted: str, device: torch.device) -> str:
    """``graph`` or ``eager``, from the config value ``compile``: auto, off or graph."""
    if wanted == "graph" and device.type != "cuda":
        raise DeviceError(
            f"compile=graph: device={device.type} has no CUDA graphs; use compile=auto"
        )
    return "graph" if wanted != "off" and device.type == "cuda" else "eager"


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory for the next tensors of a CPU run.

    Otherwise the tensors of each gradient step are new pages, which the kernel fills with zeros.
    This holds until the process ends, also for other code in it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(_TRIM_THRESHOLD, 256 * 2**20)
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # larger tensors are mapped, and returned at once


def map_blas_memory() -> None:
    """Compute one large matrix product in NumPy and in torch, which maps OpenBLAS's work memory.

    Until then, small products take up to 1.6 times as long on an Arm CPU.
    """
    square = torch.ones(300, 300)
    torch.mm(square, square)
    np.matmul(square.numpy(), square.numpy())


@contextmanager
def precision_of_products(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of matrix products and convolutions on a GPU for a block."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32 = precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def resolve_device(name: str) -> torch.device:
    """``auto`` takes cuda, then mps, then cpu; a device requested by name must exist."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device=mps: this torch has no MPS; use device=cpu")
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise DeviceError(f"device={name}: this torch sees no GPU; use device=cpu")
        index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise DeviceError(f"device={name}: the last of {count} GPUs is cuda:{count - 1}")
    return torch.device(name)


def held_memory(device: torch.device) -> int | None:
    """GPU memory of this process in bytes, including torch's cache; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else None


def total_memory(device: torch.device) -> int | None:
    """Memory of the device (on the CPU: of the machine) in bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


@contextmanager
def torch_threads(device: torch.device, n_threads: int = 1) -> Iterator[None]:
    """``n_threads`` of torch on the CPU during a run: a second one makes small networks slower.

    NumPy's linear algebra always gets one, so that results do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        keep_freed_memory()
    try:
        with threadpool_limits(limits=1, user_api="blas"):
            if device.type == "cpu":
                torch.set_num_threads(n_threads)  # after the limit, which may apply to torch too
                map_blas_memory()
            yield
    finally:
        torch.set_num_threads(before)
