"""Dotted paths and ``_target_`` entries: how a config names a class or function.

Spawned workers import this module to apply wrappers, so it imports neither Hydra nor torch.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from ml_pipeline.errors import UserError, place_of
from ml_pipeline.extras import INSTALL_COMMANDS, missing_extra
from ml_pipeline.given import MAIN, find_given
from ml_pipeline.moved import moved

# Runs that are older than the key agent.algorithm do not name theirs.
ALGORITHM_OF_OLD_RUNS = "ml_pipeline.algorithms.ppo.algorithm.PPO"


class TargetError(UserError):
    """A dotted path does not exist, or its class does not accept the given arguments."""


def import_dotted(path: str, *, key: str) -> Any:
    """The object at ``package.module.Name``; errors name the config key ``key``."""
    given = find_given(path)
    if given is not None:
        return given
    module_name, _, name = moved(path).rpartition(".")
    if module_name == MAIN:
        raise TargetError(
            f"{key}={path}: was passed from Python and cannot be imported; pass it again, as in "
            f"train(resume=RUN, {key.partition('.')[0]}={name}), or move it into a module"
        )
    if not module_name:
        raise TargetError(f"{key}={path}: this is not a dotted path; write package.module.Name")
    module = import_module(module_name, key=key, path=path)
    try:
        has_it = hasattr(module, name)
    except ImportError as error:  # the module imports it only now
        raise missing_extra(f"{key}={path}", error) from error
    if not has_it:
        near = get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TargetError(f"{key}={path}: module {module_name} has no {name!r}{hint}")
    return getattr(module, name)


def import_module(name: str, *, key: str, path: str) -> ModuleType:
    """Import module ``name``; errors start with the config entry ``key=path``."""
    name = moved(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0].lower() in INSTALL_COMMANDS:
            raise missing_extra(f"{key}={path}", error) from error
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"{key}={path}: no module named {error.name!r}; install it, "
                "run from the folder that contains it, or add that folder to PYTHONPATH"
            ) from error
        reason = f"{name} needs {error.name}, which is not installed"
        raise TargetError(f"{key}={path}: {reason}") from error
    except Exception as error:  # importing a module may raise anything
        raise TargetError(f"{key}={path}: {type(error).__name__} in {name}: {error}") from error


def import_entry(entry: Mapping[str, Any], *, key: str) -> tuple[Any, dict[str, Any]]:
    """The object at an entry's ``_target_``, and its arguments: the other keys."""
    if not isinstance(entry, Mapping) or "_target_" not in entry:
        raise TargetError(f"{key} needs a _target_, the dotted path of a class; got {entry!r}")
    target = import_dotted(str(entry["_target_"]), key=f"{key}._target_")
    return target, {name: value for name, value in entry.items() if name != "_target_"}


def check_arguments(target: Any, arguments: Mapping[str, Any], *, key: str, given: int = 0) -> None:
    """Raise an error with the full config key if an argument is unknown or missing.

    ``given`` positional arguments come from the caller, such as the env of a wrapper.
    """
    signature = _signature(target, key)
    every = list(signature.parameters.values())
    parameters = [each for each in every if each.kind is each.KEYWORD_ONLY or each in every[given:]]
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
    for parameter in parameters:
        value = arguments.get(parameter.name)
        if _takes_a_function(parameter) and isinstance(value, (str, int, float, list, Mapping)):
            raise TargetError(
                f"{key}.{parameter.name}={value}: {target.__name__} takes a function here, which a "
                f"config cannot hold; write a function that passes it, and name that in {key}"
            )


def _takes_a_function(parameter: inspect.Parameter) -> bool:
    """As far as its annotation says so; one that also takes a text is open."""
    annotation = str(parameter.annotation)
    return "Callable[" in annotation and not re.search(r"\bstr\b", annotation)


def _signature(target: Any, key: str) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{key}: {target!r} cannot be called; name a class or function"
        ) from error


def _required_first(
    parameters: Sequence[inspect.Parameter], arguments: Mapping[str, Any]
) -> str | None:
    """The name of a required first parameter, unless it has a value or takes a plain number."""
    if not parameters or parameters[0].name in arguments:
        return None
    each = parameters[0]
    is_required = each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
    is_plain = each.annotation in (int, float, bool, str, "int", "float", "bool", "str")
    return each.name if is_required and not is_plain else None


def instantiate(
    entry: Mapping[str, Any], *, key: str, offers: Mapping[str, Any], first: str | None = None
) -> Any:
    """Build an entry's object; each of ``offers`` is passed if its signature names it.

    The offer ``first`` is also passed as a required first parameter of any other name.
    """
    target, arguments = import_entry(entry, key=key)
    wanted = _signature(target, key).parameters
    if first is not None and first not in wanted:
        name = _required_first(list(wanted.values()), arguments)
        offers = offers if name is None else {**offers, name: offers[first]}
    for name in arguments:
        if name in offers and not isinstance(offers[name], (int, str, type(None))):
            raise TargetError(f"{key}.{name}={arguments[name]}: the run sets it; remove the key")
    arguments = {**{name: offers[name] for name in offers if name in wanted}, **arguments}
    check_arguments(target, arguments, key=key)
    try:
        return target(**arguments)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        # Our own errors start with the name of an argument; then the full key can be shown.
        is_named = re.split(r"\W", str(error))[0] in arguments
        place = place_of(error)
        raise TargetError(f"{key}{'.' if is_named else ': '}{error}{place}") from error
    except Exception as error:  # a user's class may raise anything
        place = place_of(error)
        raise TargetError(f"{key}: {type(error).__name__}: {error}{place}") from error
