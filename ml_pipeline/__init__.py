"""ml_pipeline: ``from ml_pipeline import train, load, PPO, DQN, SAC``."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_pipeline.assembly.api import load as load
    from ml_pipeline.assembly.api import train as train
    from ml_pipeline.assembly.model import DQN as DQN
    from ml_pipeline.assembly.model import PPO as PPO
    from ml_pipeline.assembly.model import SAC as SAC

from ml_pipeline.moved import find_old_modules

__version__ = "0.2.0"

__all__ = ["DQN", "PPO", "SAC", "__version__", "load", "train"]

find_old_modules()

# Threads of torch spin while they wait for each other, by default for milliseconds. If other
# programs use the cores, that makes two threads many times slower than one. OpenMP reads this when
# torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # tens of microseconds, then sleep


def __getattr__(name: str) -> Any:
    # On first use: workers import this package too, and must not import torch.
    if name in ("load", "train"):
        from ml_pipeline.assembly import api

        return getattr(api, name)
    if name in ("DQN", "PPO", "SAC"):
        from ml_pipeline.assembly import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
