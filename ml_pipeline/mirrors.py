"""Mirrors: fast code runs only while the readable code that it repeats is unchanged.

A fast backend lists the functions, methods and constants that it mirrors, each with a fingerprint
of its source. ``why_not`` compares them with the code of this process. An edit of a file, a patch
at run time, and an override in a subclass or an instance are changes. Comments, docstrings,
annotations and formatting are not.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

# Dotted path of a function, method or constant -> fingerprint of its source.
Mirrored = Mapping[str, str]

_UNREADABLE = "unreadable"
_NO_GRAD = "torch.utils._contextlib"  # the module of torch.no_grad's wrapper
# Parts of the syntax tree that do not change what a function computes, or depend on the version
# of Python.
_IGNORED = ("annotation", "returns", "type_comment", "type_params", "kind", "ctx")


def why_not(mirrored: Mirrored, *objects: object) -> str | None:
    """Why fast code must not replace what it mirrors, or None if it may.

    ``objects``: the instances of this run, whose classes may override a mirrored method.
    """
    for path, recorded in mirrored.items():
        try:
            owner, name = _find_owner(path)
        except (AttributeError, ModuleNotFoundError):
            return f"{path.rpartition('.')[0]} is gone"
        found = fingerprint(path)
        if found == _UNREADABLE:
            return f"the source of {_short(path)} cannot be read"
        if found != recorded:
            return f"{_short(path)} was edited"
        for each in objects if isinstance(owner, type) else ():
            if isinstance(each, owner) and _overrides(each, owner, name):
                return f"{type(each).__name__} has its own {name}"
    return None


def fingerprint(path: str) -> str:
    """A hash of what is at a dotted path now: of a function's source, or of a constant's value."""
    owner, name = _find_owner(path)
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        return _UNREADABLE
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    if not isinstance(found, FunctionType):
        return _hash(repr(found))
    # Look through torch.no_grad(), which our own code uses; any other wrapper is a change.
    if found.__globals__.get("__name__") == _NO_GRAD and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return _fingerprint_of_code(found.__code__)


@cache
def _fingerprint_of_code(code: CodeType) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):  # made by exec, or in an interactive session
        return _UNREADABLE
    return _hash(repr(_meaning(tree)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _meaning(node: Any) -> Any:
    """A syntax tree as nested tuples, without docstrings and what ``_IGNORED`` lists."""
    if isinstance(node, list):
        return tuple(_meaning(each) for each in node)
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED}
    body = fields.get("body")
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        fields["body"] = body[1:] if isinstance(body, list) else body
    kept = {name: value for name, value in fields.items() if value not in (None, [])}
    return type(node).__name__, tuple((name, _meaning(value)) for name, value in kept.items())


def _find_owner(path: str) -> tuple[Any, str]:
    """The module or class of a dotted path, and the name in it."""
    parts = path.split(".")
    for n_parts in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:n_parts]))
        except ModuleNotFoundError:
            continue
        for name in parts[n_parts:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise ModuleNotFoundError(f"no module in {path}")


def _overrides(instance: object, owner: type, name: str) -> bool:
    own = inspect.getattr_static(type(instance), name, None)
    return own is not inspect.getattr_static(owner, name) or name in vars(instance)


def _short(path: str) -> str:
    """``Class.method``, or ``function``."""
    owner, name = _find_owner(path)
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name
