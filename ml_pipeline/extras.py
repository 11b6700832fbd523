"""Missing packages and their install commands; optional ones are imported where needed."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

from ml_pipeline.errors import UserError

# The modules of the dependencies in pyproject.toml; hydra-core brings yaml.
CORE_PACKAGES = (
    *("torch", "numpy", "cloudpickle", "gymnasium", "wandb", "hydra", "omegaconf", "yaml"),
    *("rich", "threadpoolctl", "filelock"),
)

# The packages of each extra in pyproject.toml, as they appear in import errors.
_EXTRAS = {
    "mujoco": ("mujoco",),
    "atari": ("ale", "ale_py", "atari", "cv2", "opencv"),
    "envpool": ("envpool",),
    "minigrid": ("minigrid",),
    "pettingzoo": ("pettingzoo",),
    "gameboy": ("pyboy",),
    "sweep": ("hydra_joblib_launcher", "hydra_submitit_launcher"),
    "study": ("optuna", "optuna_dashboard"),
    "postgresql": ("psycopg",),
    "plots": ("matplotlib", "plotly"),
    "look": ("moviepy", "tensorboard", "trackio"),
    "mlflow": ("mlflow",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "serve": ("httptools", "uvicorn"),
    "trading": ("pyarrow",),
    "jax": ("jax", "gymnax", "flax", "six"),
}

# Targets of the Makefile, which only a clone has.
_MAKE_TARGETS = ("box2d", "mujoco", "atari", "envpool", "jax")
_CLONE = Path(__file__).resolve().parents[1]
_IS_CLONE = (_CLONE / "Makefile").is_file()

# Installs ml_pipeline with its dependencies.
_CORE_COMMAND = "pip install " + (f"-e {shlex.quote(str(_CLONE))}" if _IS_CLONE else "ml_pipeline")


def core_fix(clone: Path = _CLONE) -> str:
    """What to do if this Python lacks the dependencies, which ``make`` has put into .venv."""
    activate = clone / ".venv" / "bin" / "activate"
    if activate.is_file() and Path(sys.prefix).resolve() != (clone / ".venv").resolve():
        return f"use the Python that has the packages: source {shlex.quote(str(activate))}"
    return f"install ml_pipeline with its packages: {_CORE_COMMAND}"


def _command(extra: str, pip: str) -> str:
    return f"make {extra}, or {pip}" if _IS_CLONE and extra in _MAKE_TARGETS else pip


# The first package whose name is a word of the import error wins.
INSTALL_COMMANDS = {
    "box2d": _command("box2d", "pip install swig && pip install --no-build-isolation box2d-py"),
    **{
        name: _command(extra, f'pip install "ml_pipeline[{extra}]"')
        for extra, names in _EXTRAS.items()
        for name in names
    },
    "pygame": 'pip install "gymnasium[classic-control]"',
    **{name: f"pip install {name}" for name in ("craftax", "brax", "jumanji", "pgx")},
    "mujoco_playground": "pip install playground",
}


class MissingExtraError(UserError, ImportError):
    """An optional package is not installed."""


def missing_extra(needed_by: str, error: Exception) -> MissingExtraError:
    """The error to raise, with the install command of the package that ``error`` names."""
    text = str(error)
    if isinstance(error, MissingExtraError):
        return MissingExtraError(f"{needed_by}: {text}")
    words = set(re.findall(r"\w+", text.lower()))
    for name, command in INSTALL_COMMANDS.items():
        if name in words:
            return MissingExtraError(f"{needed_by} needs {name}, which is not installed: {command}")
    return MissingExtraError(f"{needed_by} needs a package that is not installed: {text}")


def import_extra(module: str, *, needed_by: str) -> ModuleType:
    """Import an optional package; the error names ``needed_by`` and the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(needed_by, error) from error
