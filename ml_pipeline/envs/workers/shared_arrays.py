"""The arrays of a vector env, one row per env, in memory that several processes can see.

The block is anonymous: no name in the file system leads to it, so nothing can be left behind
when every process is killed. Observations and actions are a "tree": one array for a plain
space, a dict or tuple of trees for ``Dict`` and ``Tuple`` spaces, and ``Objects`` for spaces
whose values have no fixed shape (Text, Sequence, Graph, OneOf, a user's own): those are pickled.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

_CACHE_LINE = 64  # bytes; every field starts on one, so that no two writers share one
HINT_WORDS = _CACHE_LINE // 8

Tree = Any  # NDArray, Objects, dict[str, Tree] or tuple[Tree, ...]; each leaf is [n_envs, ...]
Allocate = Callable[[tuple[int, ...], "np.dtype[Any]"], "NDArray[Any]"]


class Objects(list[Any]):
    """One Python object per env; each process has its own list, so they are sent by hand."""


class EnvArrays(NamedTuple):
    """What crosses between a vector env and the slices that step its envs; row i is env i."""

    action: Tree
    obs: Tree
    final_obs: Tree  # last observation of the episode that ended in this step, else stale
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    hints: NDArray[np.int64]  # [n_workers, HINT_WORDS], a cache line each; see Channel


class Layout(NamedTuple):
    """All that decides where each array lies; the same in every process."""

    observation_space: Space[Any]
    action_space: Space[Any]
    n_envs: int
    n_workers: int

    def arrays(self, allocate: Allocate = np.zeros) -> EnvArrays:
        """``allocate`` is called in the same order by every process."""
        n_envs = self.n_envs
        return EnvArrays(
            action=_tree(self.action_space, n_envs, allocate),
            obs=_tree(self.observation_space, n_envs, allocate),
            final_obs=_tree(self.observation_space, n_envs, allocate),
            reward=allocate((n_envs,), np.dtype(np.float64)),
            terminated=allocate((n_envs,), np.dtype(np.bool_)),
            truncated=allocate((n_envs,), np.dtype(np.bool_)),
            hints=allocate((self.n_workers, HINT_WORDS), np.dtype(np.int64)),
        )

    def arrays_in(self, block: SharedBlock) -> EnvArrays:
        """The arrays one behind the other in a shared block."""
        offset = 0

        def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            nonlocal offset
            view: NDArray[Any] = np.ndarray(shape, dtype, buffer=block.memory, offset=offset)
            offset += _aligned(view.nbytes)
            return view

        return self.arrays(allocate)

    def n_bytes(self) -> int:
        """The size of the block that ``arrays_in`` needs."""
        size = 0

        def measure(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            nonlocal size
            size += _aligned(int(np.prod(shape)) * dtype.itemsize)
            return np.empty(0, dtype)

        self.arrays(measure)
        return max(size, 1)


class SharedBlock:
    """Anonymous shared memory; made by one process, sent to its workers over a socket."""

    def __init__(self, memory: mmap.mmap, handle: int | str) -> None:
        self.memory = memory
        self._handle = handle  # file descriptor; on Windows a name that dies with its last user
        self.close = weakref.finalize(self, _drop_handle, handle)  # the arrays keep the memory

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        if sys.platform == "win32":
            return cls.open(f"ml_pipeline-{secrets.token_hex(16)}", size)
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ml_pipeline")
        else:
            descriptor, path = tempfile.mkstemp(prefix="ml_pipeline-")
            os.unlink(path)
        try:
            os.ftruncate(descriptor, size)
            return cls.open(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, handle: int | str, size: int) -> SharedBlock:
        if isinstance(handle, int):
            return cls(mmap.mmap(handle, size), handle)
        return cls(mmap.mmap(-1, size, tagname=handle), handle)  # type: ignore[call-arg]

    @property
    def name(self) -> str | None:
        """What leads to the block on Windows; elsewhere the descriptor is sent."""
        return self._handle if isinstance(self._handle, str) else None

    def send_descriptor(self, sock: socket.socket) -> None:
        if isinstance(self._handle, int):
            socket.send_fds(sock, [b"b"], [self._handle])

    @classmethod
    def receive(cls, sock: socket.socket, name: str | None, size: int) -> SharedBlock:
        if name is not None:
            return cls.open(name, size)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        return cls.open(descriptors[0], size)


def _drop_handle(handle: int | str) -> None:
    if isinstance(handle, int):
        os.close(handle)


def write_value(row: Tree, value: Any, casts: set[str]) -> None:
    """Store one env's value in its ``row_of`` a tree; a wrong shape or kind is an error.

    A cast that changes the precision only (float64 to float32) is done and added to ``casts``.
    """
    if type(row) is memoryview:
        try:
            row[:] = value  # refuses whatever differs in length or kind, faster than we could
        except (ValueError, TypeError):
            array = np.asarray(row)
            array[...] = _fitting(value, array, casts)
    elif type(row) is np.ndarray:
        row[...] = _fitting(value, row, casts)
    elif isinstance(row, dict):
        if not isinstance(value, Mapping) or not row.keys() <= value.keys():
            raise ValueError(f"an observation with the keys {list(row)} expected, got {value!r}")
        for name, branch in row.items():
            write_value(branch, value[name], casts)
    elif isinstance(row, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(row):
            raise ValueError(f"an observation of {len(row)} parts expected, got {value!r}")
        for branch, part in zip(row, value, strict=True):
            write_value(branch, part, casts)
    else:
        # Copied: an env may go on to change what it has handed out.
        row.objects[row.index] = deepcopy(value)


class _ObjectRow:
    """Where one env's object goes; no tuple, which would be a tree of its own."""

    def __init__(self, objects: Objects, index: int) -> None:
        self.objects = objects
        self.index = index


def row_of(tree: Tree, index: int) -> Tree:
    """Where ``write_value`` stores one env's value: views of row ``index``."""
    if isinstance(tree, dict):
        return {name: row_of(branch, index) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(row_of(branch, index) for branch in tree)
    if isinstance(tree, Objects):
        return _ObjectRow(tree, index)
    row = tree[index, ...]  # the dots make it a view, of a scalar too
    return memoryview(row) if row.ndim == 1 else row


def read_row(tree: Tree, index: int) -> Any:
    """One env's value, in memory of its own."""
    if isinstance(tree, dict):
        return {name: read_row(branch, index) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(read_row(branch, index) for branch in tree)
    value = tree[index]
    return value.copy() if isinstance(value, np.ndarray) else value


def hand_out(tree: Tree, *, copy: bool) -> Tree:
    """All rows as Gymnasium batches them; in memory of their own if ``copy``."""
    if isinstance(tree, np.ndarray):
        return tree.copy() if copy else tree
    if isinstance(tree, dict):
        return {name: hand_out(branch, copy=copy) for name, branch in tree.items()}
    if isinstance(tree, Objects):
        return tuple(deepcopy(tree) if copy else tree)
    return tuple(hand_out(branch, copy=copy) for branch in tree)


class Choices(NamedTuple):
    """The whole numbers that one leaf of a space has, both ends included."""

    low: Any  # int, or an array for a MultiDiscrete space
    high: Any
    space: Space[Any]  # for the error


def choices_of(space: Space[Any]) -> Tree:
    """A tree for ``write_all``: ``Choices`` where a space is discrete, None elsewhere."""
    if isinstance(space, spaces.Dict):
        return {name: choices_of(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [choices_of(part) for part in space.spaces]
    if isinstance(space, spaces.Discrete):
        return Choices(int(space.start), int(space.start + space.n) - 1, space)
    if isinstance(space, spaces.MultiDiscrete):
        return Choices(space.start, space.start + space.nvec - 1, space)
    return Choices(0, 1, space) if isinstance(space, spaces.MultiBinary) else None


def write_all(tree: Tree, values: Any, choices: Tree) -> None:
    """Store a batch of actions; what does not fit is an error, nothing is broadcast."""
    if type(tree) is np.ndarray:
        array = values if type(values) is np.ndarray else np.asarray(values)
        if array.shape != tree.shape:
            raise ValueError(f"actions of shape {array.shape} given, {tree.shape} expected")
        if choices is not None:
            _check_choices(array, choices)
        if array.dtype != tree.dtype:  # by value: one that came from a worker is another object
            _check_cast(array, tree.dtype, "actions")
        tree[...] = array
    elif isinstance(tree, dict):
        for name, branch in tree.items():
            write_all(branch, values[name], choices[name])
    elif isinstance(tree, tuple):
        for branch, value, choice in zip(tree, values, choices, strict=True):
            write_all(branch, value, choice)
    else:
        values = list(values)
        if len(values) != len(tree):
            raise ValueError(f"actions for {len(values)} envs given, {len(tree)} expected")
        tree[:] = values


def _check_choices(actions: NDArray[Any], choices: Choices) -> None:
    """Refuse a choice that the space does not have: what an env makes of it is anyone's guess."""
    low, high, space = choices
    if actions.dtype.kind not in "iub":
        raise TypeError(f"actions in {space} are whole numbers, got dtype {actions.dtype}")
    if actions.ndim == 1:
        numbers = actions.tolist()  # for a few numbers faster than NumPy's reductions
        if low <= min(numbers) and max(numbers) <= high:
            return
    wrong = (actions < low) | (actions > high)
    if wrong.any():
        env = int(np.argwhere(wrong)[0][0])
        raise ValueError(f"action {actions[env]} of env {env} is not in {space}")


def scalars_of(tree: Tree, rows: Sequence[int]) -> NDArray[Any] | None:
    """The rows as one view, where each is a single number and they lie side by side."""
    if not isinstance(tree, np.ndarray) or tree.ndim > 1 or not rows:
        return None
    view = tree[rows[0] : rows[-1] + 1]
    return view if len(view) == len(rows) else None


def objects_of(tree: Tree) -> Iterator[Objects]:
    """Every leaf that must be sent by hand, in a fixed order."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, Objects):
        yield tree
    elif isinstance(tree, tuple):
        for branch in tree:
            yield from objects_of(branch)


def take_objects(tree: Tree, rows: Sequence[int]) -> list[list[Any]]:
    """What ``put_objects`` takes in another process; empty where all is in shared memory."""
    return [[leaf[row] for row in rows] for leaf in objects_of(tree)]


def put_objects(tree: Tree, rows: Sequence[int], taken: list[list[Any]]) -> None:
    for leaf, values in zip(objects_of(tree), taken, strict=True):
        for row, value in zip(rows, values, strict=True):
            leaf[row] = value


def copy_rows(source: Tree, target: Tree, rows: Sequence[int]) -> None:
    """Copy some rows of a tree into a tree of the same spaces."""
    if isinstance(source, dict):
        source, target = tuple(source.values()), tuple(target.values())
    if isinstance(source, tuple):
        for old, new in zip(source, target, strict=True):
            copy_rows(old, new, rows)
    elif isinstance(source, Objects):
        for row in rows:
            target[row] = source[row]
    else:
        target[rows] = source[rows]


def is_finite(row: Tree) -> bool:
    """Whether all numbers of a tree or a row are; objects count as finite."""
    if isinstance(row, dict):
        return all(is_finite(branch) for branch in row.values())
    if isinstance(row, memoryview):
        row = np.asarray(row)
    if isinstance(row, np.ndarray):
        return row.dtype.kind not in "fc" or bool(np.isfinite(row).all())
    return isinstance(row, (_ObjectRow, Objects)) or all(is_finite(branch) for branch in row)


def _fitting(value: Any, row: NDArray[Any], casts: set[str]) -> NDArray[Any]:
    """``value`` as an array that can be stored in ``row`` without a change of meaning."""
    array = np.asarray(value)
    if array.shape != row.shape:
        raise ValueError(
            f"the env gave an observation of shape {array.shape}, "
            f"but its observation space says {row.shape}"
        )
    if array.dtype != row.dtype:
        _check_cast(array, row.dtype, "an observation")
        if (
            isinstance(value, (np.ndarray, np.generic))
            and array.dtype.kind == row.dtype.kind == "f"
        ):
            casts.add(
                f"an env gave an observation of dtype {array.dtype}, its space says {row.dtype}: "
                "cast; make the two agree to save the time and this warning"
            )
    return array


def _check_cast(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    """Refuse a cast that changes more than the precision of floats."""
    kinds = array.dtype.kind, dtype.kind
    fact = f"{what} of dtype {array.dtype} given, where the space says {dtype}"
    if kinds[0] not in "biufc":
        raise TypeError(f"{what} of dtype {array.dtype} given, which is no number: {array}")
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


def _tree(space: Space[Any], n_envs: int, allocate: Allocate) -> Tree:
    if isinstance(space, spaces.Dict):
        return {name: _tree(part, n_envs, allocate) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree(part, n_envs, allocate) for part in space.spaces)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return allocate((n_envs, *(space.shape or ())), np.dtype(space.dtype))
    return Objects([None] * n_envs)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _CACHE_LINE) * _CACHE_LINE
