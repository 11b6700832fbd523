"""Dotted paths and ``_target_`` entries: how a config names a class of ours or of the user's.

Spawned workers import this module to apply wrappers, so it knows neither Hydra nor torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ml_pipeline.errors import UserError

# Modules and classes that moved. Older run folders and exported policies name the old paths.
_MOVED = {
    "ml_pipeline.agents.networks.CNN": "ml_pipeline.agents.image_networks.CNN",
    "ml_pipeline.agents.networks.DictNetwork": "ml_pipeline.agents.image_networks.DictNetwork",
    "ml_pipeline.agents.networks.Recurrent": "ml_pipeline.agents.recurrent.Recurrent",
    "ml_pipeline.envs.atari": "ml_pipeline.envs.wrappers.atari",
    "ml_pipeline.envs.tasks.acrobot": "ml_pipeline.envs.tensor_tasks.acrobot",
    "ml_pipeline.envs.tasks.cartpole": "ml_pipeline.envs.tensor_tasks.cartpole",
    "ml_pipeline.envs.tasks.hide_velocity": "ml_pipeline.envs.wrappers.hide_velocity",
    "ml_pipeline.envs.tasks.mountain_car_continuous": (
        "ml_pipeline.envs.tensor_tasks.mountain_car_continuous"
    ),
    "ml_pipeline.envs.tasks.pendulum": "ml_pipeline.envs.tensor_tasks.pendulum",
}


# Runs that are older than the key agent.algorithm do not name theirs.
ALGORITHM_OF_OLD_RUNS = "ml_pipeline.algorithms.ppo.PPO"


class TargetError(UserError):
    """A dotted path leads nowhere, or its class does not take the arguments given."""


def import_dotted(path: str, *, key: str) -> Any:
    """The object that ``package.module.Name`` names; ``key`` is the config key to blame."""
    module_name, _, name = moved(path).rpartition(".")
    if not module_name:
        raise TargetError(f"{key}={path} is no dotted path; write package.module.Name")
    module = import_module(module_name, key=key, path=path)
    if not hasattr(module, name):
        raise TargetError(f"{key}={path}: module {module_name} has no {name!r}")
    return getattr(module, name)


def moved(path: str) -> str:
    """Today's path of a module or class of this package that an older file names."""
    return _MOVED.get(path, path)


def import_module(name: str, *, key: str, path: str) -> ModuleType:
    """A module of the user's; what goes wrong in it is told with the config key it came by."""
    name = moved(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"{key}={path}: no module named {error.name!r}; "
                "run from the folder that holds it, or put that folder on PYTHONPATH"
            ) from error
        raise TargetError(f"{key}={path}: {name} needs {error.name}, which is missing") from error
    except Exception as error:  # a module may do anything as it is imported
        raise TargetError(f"{key}={path}: {type(error).__name__} in {name}: {error}") from error


def import_entry(entry: Mapping[str, Any], *, key: str) -> tuple[Any, dict[str, Any]]:
    """The object an entry's ``_target_`` names, and the other keys: its arguments."""
    if not isinstance(entry, Mapping) or "_target_" not in entry:
        raise TargetError(f"{key} needs a _target_, the dotted path of a class; got {entry!r}")
    target = import_dotted(str(entry["_target_"]), key=f"{key}._target_")
    return target, {name: value for name, value in entry.items() if name != "_target_"}


def check_arguments(target: Any, arguments: Mapping[str, Any], *, key: str, given: int = 0) -> None:
    """Refuse what ``target`` does not take and name what it lacks, by full config key.

    ``given`` positional arguments come from elsewhere, such as the env that a wrapper wraps.
    """
    signature = inspect.signature(target)
    parameters = list(signature.parameters.values())[given:]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters]
    for name in arguments:
        if name not in names and not open_ended:
            raise TargetError(
                f"{key}.{name} is unknown; {target.__name__} takes: {', '.join(names) or 'nothing'}"
            )
    try:
        signature.bind(*[None] * given, **arguments)
    except TypeError as error:
        raise TargetError(f"{key}: {target.__name__} cannot be called: {error}") from error


def instantiate(entry: Mapping[str, Any], *, key: str, offers: Mapping[str, Any]) -> Any:
    """Build an entry's object; what ``offers`` holds is passed on if the signature asks for it."""
    target, arguments = import_entry(entry, key=key)
    wanted = inspect.signature(target).parameters
    arguments = {**{name: offers[name] for name in offers if name in wanted}, **arguments}
    check_arguments(target, arguments, key=key)
    try:
        return target(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        # Those of ours begin with the argument's name, so that the full key can be told.
        named = str(error).partition(" ")[0] in arguments
        raise TargetError(f"{key}{'.' if named else ': '}{error}") from error
    except Exception as error:  # a user's class may do anything
        raise TargetError(f"{key}: {type(error).__name__}: {error}") from error
