"""Trees: the observations or actions of all envs, one row per env.

A plain space is one array. ``Dict`` and ``Tuple`` spaces are a dict or tuple of trees. Spaces whose
values have no fixed shape (Text, Sequence, Graph, OneOf, custom spaces) are ``Objects``, which are
pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace

Tree = Any  # NDArray, Objects, dict[str, Tree] or tuple[Tree, ...]; each leaf is [n_envs, ...]
Allocate = Callable[[tuple[int, ...], "np.dtype[np.generic]"], "NDArray[Any]"]


class Objects(list[Any]):
    """One Python object per env; each process has its own list, so changes must be sent."""


class Choices(NamedTuple):
    """The range of integers of one leaf of a space, both ends included."""

    low: int | NDArray[np.integer]  # an array for a MultiDiscrete space
    high: int | NDArray[np.integer]
    space: AnySpace  # for the error


def make_tree(space: AnySpace, n_envs: int, allocate: Allocate) -> Tree:
    """A tree for the values of ``n_envs`` envs; calls ``allocate`` in a fixed order."""
    if isinstance(space, spaces.Dict):
        # Equal spaces may have their keys in another order, so the order must not decide addresses.
        branches = {
            name: make_tree(space.spaces[name], n_envs, allocate)
            for name in _in_order(space.spaces)
        }
        return {name: branches[name] for name in space.spaces}
    if isinstance(space, spaces.Tuple):
        return tuple(make_tree(part, n_envs, allocate) for part in space.spaces)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return allocate((n_envs, *(space.shape or ())), np.dtype(space.dtype))
    return Objects([None] * n_envs)


def _in_order(names: Iterable[str]) -> list[str]:
    """The same order in every process."""
    return sorted(names, key=str)


def write_value(view: Tree, value: Any, casts: set[str]) -> None:
    """Store one env's value through its ``view_of_row``; a wrong shape or kind is an error.

    A cast that only changes the precision (float64 to float32) is done and added to ``casts``.
    """
    if type(view) is memoryview:
        try:
            view[:] = value  # checks length and type faster than Python code could
        except (ValueError, TypeError):
            array = np.asarray(view)
            array[...] = _fitting(value, array, casts)
    elif type(view) is np.ndarray:
        view[...] = _fitting(value, view, casts)
    elif isinstance(view, dict):
        if not isinstance(value, Mapping) or not view.keys() <= value.keys():
            raise ValueError(f"expected an observation with the keys {list(view)}, got {value!r}")
        for name, branch in view.items():
            write_value(branch, value[name], casts)
    elif isinstance(view, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(view):
            raise ValueError(f"expected an observation of {len(view)} parts, got {value!r}")
        for branch, part in zip(view, value, strict=True):
            write_value(branch, part, casts)
    else:
        # A copy: an env may change an object after returning it.
        view.objects[view.row] = deepcopy(value)


class _ObjectView:
    """The place of one env's object; not a tuple, because a tuple is a tree."""

    def __init__(self, objects: Objects, row: int) -> None:
        self.objects = objects
        self.row = row


def view_of_row(tree: Tree, row: int) -> Tree:
    """Views through which ``write_value`` stores one env's value."""
    if isinstance(tree, dict):
        return {name: view_of_row(branch, row) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(view_of_row(branch, row) for branch in tree)
    if isinstance(tree, Objects):
        return _ObjectView(tree, row)
    view = tree[row, ...]  # the dots make it a view even of a scalar
    return memoryview(view) if view.ndim == 1 else view


def read_row(tree: Tree, row: int) -> Any:
    """A copy of one env's value."""
    if isinstance(tree, dict):
        return {name: read_row(branch, row) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(read_row(branch, row) for branch in tree)
    value = tree[row]
    return value.copy() if isinstance(value, np.ndarray) else value


def as_batch(tree: Tree, *, copy: bool) -> Tree:
    """The values of all envs, batched as Gymnasium does; views unless ``copy``."""
    if isinstance(tree, np.ndarray):
        return tree.copy() if copy else tree
    if isinstance(tree, dict):
        return {name: as_batch(branch, copy=copy) for name, branch in tree.items()}
    if isinstance(tree, Objects):
        return tuple(deepcopy(tree) if copy else tree)
    return tuple(as_batch(branch, copy=copy) for branch in tree)


def objects_of(tree: Tree) -> Iterator[Objects]:
    """Every ``Objects`` leaf, in a fixed order."""
    if isinstance(tree, dict):
        tree = tuple(tree[name] for name in _in_order(tree))
    if isinstance(tree, Objects):
        yield tree
    elif isinstance(tree, tuple):
        for branch in tree:
            yield from objects_of(branch)


def take_objects(tree: Tree, rows: Sequence[int]) -> list[list[object]]:
    """The objects to send to ``put_objects`` in another process; empty if the tree has none."""
    return [[leaf[row] for row in rows] for leaf in objects_of(tree)]


def put_objects(tree: Tree, rows: Sequence[int], taken: list[list[object]]) -> None:
    for leaf, values in zip(objects_of(tree), taken, strict=True):
        for row, value in zip(rows, values, strict=True):
            leaf[row] = value


def copy_rows(source: Tree, target: Tree, rows: Sequence[int]) -> None:
    """Copy some rows into another tree of the same space."""
    if isinstance(source, dict):
        for name in source:
            copy_rows(source[name], target[name], rows)
    elif isinstance(source, tuple):
        for old, new in zip(source, target, strict=True):
            copy_rows(old, new, rows)
    elif isinstance(source, Objects):
        for row in rows:
            target[row] = source[row]
    else:
        target[rows] = source[rows]


def has_only_numbers(tree: Tree) -> bool:
    """Whether each leaf is a single number per env."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, tuple):
        return all(has_only_numbers(branch) for branch in tree)
    return isinstance(tree, np.ndarray) and tree.ndim == 1


def is_finite(tree: Tree) -> bool:
    """Whether all numbers of a tree or of a view are finite; objects count as finite."""
    if isinstance(tree, dict):
        return all(is_finite(branch) for branch in tree.values())
    if isinstance(tree, memoryview):
        tree = np.asarray(tree)
    if isinstance(tree, np.ndarray):
        return tree.dtype.kind not in "fc" or bool(np.isfinite(tree).all())
    return isinstance(tree, (_ObjectView, Objects)) or all(is_finite(branch) for branch in tree)


def _fitting(value: object, view: NDArray[np.generic], casts: set[str]) -> NDArray[np.generic]:
    """``value`` as an array that can be stored in ``view`` without changing its meaning."""
    array = np.asarray(value)
    if array.shape != view.shape:
        raise ValueError(
            f"the env returned an observation of shape {array.shape}, "
            f"but its observation space has shape {view.shape}"
        )
    if array.dtype != view.dtype:
        check_cast(array, view.dtype, "an observation")
        is_array = isinstance(value, (np.ndarray, np.generic))
        if is_array and array.dtype.kind == view.dtype.kind == "f":
            casts.add(
                f"an env returned an observation of dtype {array.dtype}, but its space has dtype "
                f"{view.dtype}: cast it in the env to save time and avoid this warning"
            )
    return array


def check_cast(array: NDArray[Any], dtype: np.dtype[np.generic], what: str) -> None:
    """Refuse a cast that changes more than the precision of floats."""
    kinds = array.dtype.kind, dtype.kind
    fact = f"got {what} of dtype {array.dtype}, but the space has dtype {dtype}"
    if kinds[0] not in "biufc":
        raise TypeError(f"got {what} of dtype {array.dtype}, which is not a number: {array}")
    if kinds[0] not in "biu" and not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise TypeError(fact)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if kinds[0] in "biu":
        is_same = np.array_equal(cast, array)
    else:
        is_same = np.array_equal(np.isfinite(cast), np.isfinite(array))
    if not is_same:
        raise ValueError(f"{fact}, which cannot hold {array.tolist()}")


def choices_of(space: AnySpace) -> Tree:
    """A tree for ``write_all``: ``Choices`` for each discrete leaf, None for others."""
    if isinstance(space, spaces.Dict):
        return {name: choices_of(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [choices_of(part) for part in space.spaces]
    if isinstance(space, spaces.Discrete):
        return Choices(int(space.start), int(space.start + space.n) - 1, space)
    if isinstance(space, spaces.MultiDiscrete):
        return Choices(space.start, space.start + space.nvec - 1, space)
    return Choices(0, 1, space) if isinstance(space, spaces.MultiBinary) else None


def write_all(tree: Tree, values: Any, choices: Tree) -> bool:
    """Store a batch of actions; a wrong shape, type or choice is an error.

    Returns whether the envs can read their actions from the tree. If not, they must be given the
    actions themselves: objects, lists, or arrays whose dtype the space cannot represent exactly.
    """
    if type(tree) is np.ndarray:
        array = values if type(values) is np.ndarray else np.asarray(values)
        if array.shape != tree.shape:
            raise ValueError(f"actions must have shape {tree.shape}, got {array.shape}")
        if choices is not None:
            _check_choices(array, choices)
        if array.dtype != tree.dtype:
            check_cast(array, tree.dtype, "actions")
        tree[...] = array
        is_exact = array.dtype == tree.dtype or np.can_cast(array.dtype, tree.dtype)
        return is_exact and not isinstance(values, (list, tuple))
    if isinstance(tree, dict):
        stored = [write_all(tree[name], values[name], choices[name]) for name in tree]
        return all(stored)
    if isinstance(tree, tuple):
        stored = [write_all(*parts) for parts in zip(tree, values, choices, strict=True)]
        return all(stored)
    values = list(values)
    if len(values) != len(tree):
        raise ValueError(f"expected actions for {len(tree)} envs, got {len(values)}")
    return False


def _check_choices(actions: NDArray[Any], choices: Choices) -> None:
    """Refuse actions outside the space: many envs do not check them."""
    low, high, space = choices
    if actions.dtype.kind not in "iub":
        raise TypeError(f"actions in {space} must be integers, got dtype {actions.dtype}")
    if actions.ndim == 1:
        numbers = actions.tolist()  # faster than NumPy for a few numbers
        if low <= min(numbers) and max(numbers) <= high:
            return
    wrong = (actions < low) | (actions > high)
    if wrong.any():
        env = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"action {actions[env]} of env {env} is not in {space}")


def scalars_of(tree: Tree, rows: Sequence[int]) -> NDArray[np.generic] | None:
    """The rows as one view if each is a single number and they are adjacent, else None."""
    if not isinstance(tree, np.ndarray) or tree.ndim > 1 or not rows:
        return None
    view = tree[rows[0] : rows[-1] + 1]
    return view if len(view) == len(rows) else None
