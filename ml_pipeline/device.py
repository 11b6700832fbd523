"""The torch device of a run, from the one word of the config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ml_pipeline.errors import UserError


class DeviceError(UserError):
    """The device that was asked for is not on this machine."""


def program_mode(wanted: str, device: torch.device) -> str:
    """How far work on ``device`` is compiled, by the config's word: auto, off or graph."""
    if wanted == "graph" and device.type != "cuda":
        raise DeviceError(
            f"compile=graph asked for, but {device.type} has no graphs; use compile=auto"
        )
    return "graph" if wanted != "off" and device.type == "cuda" else "eager"


@contextmanager
def precision_of_products(precision: str, device: torch.device) -> Iterator[None]:
    """Let a GPU's matrix products and convolutions be as exact as ``precision`` says."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    loose = precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = loose
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def resolve_device(name: str) -> torch.device:
    """``auto`` takes cuda, then mps, then cpu; a device that is named must be there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device=mps asked for, but this torch has no MPS; use device=cpu")
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise DeviceError(
                f"device={name} asked for, but this torch sees no GPU; use device=cpu"
            )
        index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise DeviceError(
                f"device={name} asked for, but there are {count} GPUs, from cuda:0 on"
            )
    return torch.device(name)


def held_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that this process holds, torch's cache among them; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else None


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has, on the CPU the machine; None where that is not told."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
