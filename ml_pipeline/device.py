"""The torch device of a run, from the one word of the config."""

from __future__ import annotations

import torch

from ml_pipeline.errors import UserError


class DeviceError(UserError):
    """The device that was asked for is not on this machine."""


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
