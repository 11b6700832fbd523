"""Optional packages: imported where they are used, with the line that installs them if missing."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from ml_pipeline.errors import UserError

_EXPORT = 'pip install -e ".[export]"'
_ATARI = 'make atari (or: pip install -e ".[atari]")'

# A word in an import error -> the command that brings the package.
INSTALL_COMMANDS = {
    "box2d": "make box2d (or: pip install swig && pip install --no-build-isolation box2d-py)",
    "mujoco": 'make mujoco (or: pip install -e ".[mujoco]")',
    "ale": _ATARI,
    "ale_py": _ATARI,
    "atari": _ATARI,
    "opencv": _ATARI,
    "hydra_joblib_launcher": 'pip install -e ".[sweep]"',
    "hydra_submitit_launcher": 'pip install -e ".[sweep]"',
    "optuna": 'pip install -e ".[study]"',
    "optuna_dashboard": 'pip install -e ".[study]"',
    "matplotlib": 'pip install -e ".[plots]"',
    "plotly": 'pip install -e ".[plots]"',
    "moviepy": 'pip install -e ".[look]"',
    "tensorboard": 'pip install -e ".[look]"',
    "trackio": 'pip install -e ".[look]"',
    "onnx": _EXPORT,
    "onnxruntime": _EXPORT,
    "onnxscript": _EXPORT,
    "pygame": 'pip install "gymnasium[classic-control]"',
}


class MissingExtraError(UserError, ImportError):
    """A package that only some features need is not installed."""


def missing_extra(what: str, error: Exception) -> MissingExtraError:
    """The error to raise for ``what``, with the command for the package that ``error`` names."""
    text = str(error)
    words = set(re.findall(r"\w+", text.lower()))
    for name, command in INSTALL_COMMANDS.items():
        if name in words:
            return MissingExtraError(f"{what} needs {name}, which is not installed: {command}")
    return MissingExtraError(f"{what} needs a package that is not installed: {text}")


def import_extra(module: str, *, needed_by: str) -> ModuleType:
    """Import an optional package, or say who needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(needed_by, error) from error
