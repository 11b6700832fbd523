"""Classes and functions that a program passed to ``train`` as objects; a config names them by text.

An object that another process can import is named by its dotted path. One of the main script, a
notebook cell or a function is named ``__main__.NAME``; this process keeps it, workers receive it
by cloudpickle, and a later process must pass it again.

Spawned workers import this module, so it imports no torch.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAIN = "__main__"

_given: dict[str, Any] = {}


def name_of(given: Any) -> str:
    """The name of a class or function in a config; keeps it if it cannot be imported by name."""
    module, qualified = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if (
        module not in (None, MAIN)
        and getattr(sys.modules.get(module), str(qualified), None) is given
    ):
        return f"{module}.{qualified}"
    for name, known in _given.items():
        if known is given:
            return name
    base = _base_name(given)
    name = f"{MAIN}.{base}"
    # A class that is defined again replaces the old one; two lambdas are two things.
    if not hasattr(given, "__name__") or base == "lambda":
        number = 2
        while name in _given:
            name, number = f"{MAIN}.{base}_{number}", number + 1
    _given[name] = given
    return name


def _base_name(given: Any) -> str:
    while isinstance(given, functools.partial):
        given = given.func
    name = getattr(given, "__name__", type(given).__name__)
    return re.sub(r"\W", "", str(name)) or "given"


def find_given(path: str) -> Any:
    """The object of this name: one that was passed, or one of the main script; otherwise None."""
    if path in _given:
        return _given[path]
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(MAIN), name, None) if module == MAIN else None


def keep(objects: Sequence[tuple[str, Any]]) -> None:
    """Let a worker find the objects that were sent to it."""
    _given.update(objects)


def objects_in(value: object) -> tuple[tuple[str, Any], ...]:
    """The objects that a part of a config names, for a worker."""
    if isinstance(value, Mapping):
        return tuple(pair for part in value.values() for pair in objects_in(part))
    if isinstance(value, (list, tuple)):
        return tuple(pair for part in value for pair in objects_in(part))
    if isinstance(value, str) and value.startswith(f"{MAIN}."):
        found = find_given(value)
        return () if found is None else ((value, found),)
    return ()
