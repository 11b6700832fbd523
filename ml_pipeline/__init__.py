"""ml_pipeline: ``from ml_pipeline import train, load, PPO, DQN, SAC``."""

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


def __getattr__(name: str) -> Any:
    # On first use: workers import this package too, and must not import torch.
    if name in ("load", "train"):
        from ml_pipeline.assembly import api

        return getattr(api, name)
    if name in ("DQN", "PPO", "SAC"):
        from ml_pipeline.assembly import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
