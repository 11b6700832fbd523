"""LazyInfos: the infos of a step, joined to arrays when they are first read.

Many envs report numbers in every step that no one reads. Workers import this module: keep torch out
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ml_pipeline.envs.kinds import Info

# Names, values as Python's floats, and their types. A plain tuple, because it is pickled during a
# step: pickling NumPy's floats themselves takes several times as long.
PackedInfo = tuple[tuple[str, ...], list[float], list[int]]

_FLOATS: tuple[type[Any], ...] = (float, np.float64, np.float32)
_INDEX = {each: index for index, each in enumerate(_FLOATS)}
_NUMBERS = frozenset([*_FLOATS, int, bool, np.int64, np.int32, np.bool_])


def packed(info: Info) -> PackedInfo | Info:
    """The info to send to another process: packed if it holds only floats."""
    try:
        kinds = [*map(_INDEX.__getitem__, map(type, info.values()))]
    except KeyError:
        return dict(info)
    return tuple(info), [*map(float, info.values())], kinds


def unpacked(info: PackedInfo | Info) -> Info:
    if isinstance(info, dict):
        return info
    return {name: _FLOATS[kind](value) for name, value, kind in zip(*info, strict=True)}


def can_wait(info: PackedInfo | Info) -> bool:
    """Whether an env cannot change the values later, and ``joined`` covers them."""
    if isinstance(info, tuple):
        return "final_obs" not in info[0]
    return _NUMBERS.issuperset(map(type, info.values())) and "final_obs" not in info


def joined(infos: Sequence[tuple[int, PackedInfo | Info]], n_envs: int) -> Info:
    """The same as Gymnasium's ``VectorEnv._add_info`` for every (index of the env, info)."""
    found: Info = {}
    for row, info in infos:
        for name, value in unpacked(info).items():
            array, mask = found.get(name), found.get(f"_{name}")
            if array is None and isinstance(value, np.bool_):  # no number to Gymnasium
                array = found[name] = np.full(n_envs, None, object)
            if array is None:
                array = found[name] = np.zeros(n_envs, type(value))
            if mask is None:
                mask = found[f"_{name}"] = np.zeros(n_envs, np.bool_)
            array[row] = value
            mask[row] = True
    return found


class LazyInfos(dict[str, Any]):
    """A dict that fills itself when it is first read; copies and pickles are plain dicts."""

    __slots__ = ("_join",)

    def __init__(self, join: Callable[[], Info]) -> None:
        super().__init__()
        self._join: Callable[[], Info] | None = join

    def _fill(self) -> None:
        if self._join is not None:
            found = self._join()
            dict.update(self, found)
            self._join = None  # only now: a stop signal may have come before

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _filled_first(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: LazyInfos, *arguments: Any, **named: Any) -> Any:
        self._fill()
        return original(self, *arguments, **named)

    return method


# Every method that reads or changes a dict. ``dict(infos)`` and ``**infos`` call ``__iter__``.
for _name in (
    *("__contains__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__", "__ior__"),
    *("__iter__", "__le__", "__len__", "__lt__", "__ne__", "__or__", "__repr__", "__reversed__"),
    *("__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(LazyInfos, _name, _filled_first(_name))
