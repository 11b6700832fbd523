"""The arrays of a vector env, one row per env, in memory that several processes can see.

The block is anonymous: no name in the file system leads to it, so nothing can be left behind
when every process is killed. Observations and actions are a "tree": one array for a plain
space, a dict or tuple of trees for ``Dict`` and ``Tuple`` spaces.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.errors import UserError

_ALIGNMENT = 64  # bytes; a cache line, so that no two fields share one

Tree = Any  # NDArray, or dict[str, Tree], or tuple[Tree, ...]; each leaf is [n_envs, ...]
Allocate = Callable[[tuple[int, ...], "np.dtype[Any]"], "NDArray[Any]"]


class SpaceError(UserError):
    """A space whose values have no fixed shape cannot be laid out in arrays."""


class EnvArrays(NamedTuple):
    """What crosses between a vector env and the slices that step its envs; row i is env i."""

    action: Tree
    obs: Tree
    final_obs: Tree  # last observation of the episode that ended in this step, else stale
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


def env_arrays(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    n_envs: int,
    allocate: Allocate = np.zeros,
) -> EnvArrays:
    """Arrays for ``n_envs`` envs; ``allocate`` is called in the same order by every process."""
    return EnvArrays(
        action=_tree(action_space, n_envs, allocate),
        obs=_tree(observation_space, n_envs, allocate),
        final_obs=_tree(observation_space, n_envs, allocate),
        reward=allocate((n_envs,), np.dtype(np.float64)),
        terminated=allocate((n_envs,), np.dtype(np.bool_)),
        truncated=allocate((n_envs,), np.dtype(np.bool_)),
    )


def shared_env_arrays(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    n_envs: int,
    block: SharedBlock,
) -> EnvArrays:
    """The same arrays as ``env_arrays``, laid out one behind the other in a shared block."""
    offset = 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        nonlocal offset
        view: NDArray[Any] = np.ndarray(shape, dtype, buffer=block.memory, offset=offset)
        offset += _aligned(view.nbytes)
        return view

    return env_arrays(observation_space, action_space, n_envs, allocate)


def block_size(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], n_envs: int
) -> int:
    """Bytes that ``shared_env_arrays`` needs."""
    size = 0

    def measure(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        nonlocal size
        size += _aligned(int(np.prod(shape)) * dtype.itemsize)
        return np.empty(0, dtype)

    env_arrays(observation_space, action_space, n_envs, measure)
    return size


class SharedBlock:
    """Anonymous shared memory; made by one process, sent to its children over a Connection."""

    def __init__(self, memory: mmap.mmap, handle: int | str) -> None:
        self.memory = memory
        self._handle = handle  # file descriptor; on Windows a name that dies with its last user

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        if sys.platform == "win32":
            name = f"ml_pipeline-{secrets.token_hex(16)}"
            return cls(mmap.mmap(-1, size, tagname=name), name)
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ml_pipeline")
        else:
            descriptor, path = tempfile.mkstemp(prefix="ml_pipeline-")
            os.unlink(path)
        os.ftruncate(descriptor, size)
        return cls(mmap.mmap(descriptor, size), descriptor)

    def send(self, connection: Connection, pid: int) -> None:
        """Let the process ``pid`` at the other end ``receive`` this block."""
        handle = self._handle
        connection.send((len(self.memory), handle if isinstance(handle, str) else None))
        if isinstance(handle, int):
            reduction.send_handle(connection, handle, pid)

    @classmethod
    def receive(cls, connection: Connection) -> SharedBlock:
        size, name = connection.recv()
        if sys.platform == "win32":
            return cls(mmap.mmap(-1, size, tagname=name), name)
        descriptor = reduction.recv_handle(connection)
        return cls(mmap.mmap(descriptor, size), descriptor)

    def close(self) -> None:
        """Drop the descriptor; the memory goes when the last array over it does."""
        if isinstance(self._handle, int) and self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def write_row(tree: Tree, row: int, value: Any) -> None:
    """Store one env's value; a wrong shape or an unsafe cast is an error, never a broadcast."""
    if isinstance(tree, dict):
        for name, branch in tree.items():
            write_row(branch, row, value[name])
    elif isinstance(tree, tuple):
        for branch, part in zip(tree, value, strict=True):
            write_row(branch, row, part)
    else:
        array = np.asarray(value)
        if array.shape != tree.shape[1:]:
            raise ValueError(
                f"the env gave an observation of shape {array.shape}, "
                f"but its observation space says {tree.shape[1:]}"
            )
        np.copyto(tree[row, ...], array, casting="same_kind")


def read_row(tree: Tree, row: int) -> Any:
    """One env's value, in memory of its own."""
    if isinstance(tree, dict):
        return {name: read_row(branch, row) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(read_row(branch, row) for branch in tree)
    value = tree[row]
    return value.copy() if isinstance(value, np.ndarray) else value


def copy_tree(tree: Tree) -> Tree:
    """All rows, in memory of their own."""
    if isinstance(tree, dict):
        return {name: copy_tree(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(copy_tree(branch) for branch in tree)
    return tree.copy()


def write_all(tree: Tree, values: Any) -> None:
    """Store the values of all envs at once; shapes must match, nothing is broadcast."""
    if isinstance(tree, dict):
        for name, branch in tree.items():
            write_all(branch, values[name])
    elif isinstance(tree, tuple):
        for branch, part in zip(tree, values, strict=True):
            write_all(branch, part)
    else:
        array = np.asarray(values)
        if array.shape != tree.shape:
            raise ValueError(f"actions of shape {array.shape} given, {tree.shape} expected")
        np.copyto(tree, array, casting="same_kind")


def _tree(space: spaces.Space[Any], n_envs: int, allocate: Allocate) -> Tree:
    if isinstance(space, spaces.Dict):
        return {name: _tree(part, n_envs, allocate) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_tree(part, n_envs, allocate) for part in space.spaces)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return allocate((n_envs, *(space.shape or ())), np.dtype(space.dtype))
    raise SpaceError(f"{type(space).__name__} spaces have no fixed shape and are not supported")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
