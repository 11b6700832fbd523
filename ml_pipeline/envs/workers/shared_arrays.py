"""EnvArrays: the arrays of a vector env, one row per env, in shared memory.

The memory is anonymous: it has no name in the file system, so nothing is left behind even if every
process is killed.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import sys
import tempfile
import weakref
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.envs.workers.trees import Allocate, Tree, make_tree

_CACHE_LINE = 64  # bytes; each array starts a new one, so that no two writers share one
HINT_WORDS = _CACHE_LINE // 8


class EnvArrays(NamedTuple):
    """The data that a vector env and its slices exchange; row i belongs to env i."""

    action: Tree
    obs: Tree
    final_obs: Tree  # last observation of an episode that ended in this step; else outdated
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    hints: NDArray[np.int64]  # [n_workers, HINT_WORDS], one cache line per worker; see Channel


class Layout(NamedTuple):
    """Decides the address of each array; must be equal in every process."""

    observation_space: AnySpace
    action_space: AnySpace
    n_envs: int
    n_workers: int

    def arrays(self, allocate: Allocate = np.zeros) -> EnvArrays:
        """Calls ``allocate`` in a fixed order."""
        n_envs = self.n_envs
        return EnvArrays(
            action=make_tree(self.action_space, n_envs, allocate),
            obs=make_tree(self.observation_space, n_envs, allocate),
            final_obs=make_tree(self.observation_space, n_envs, allocate),
            reward=allocate((n_envs,), np.dtype(np.float64)),
            terminated=allocate((n_envs,), np.dtype(np.bool_)),
            truncated=allocate((n_envs,), np.dtype(np.bool_)),
            hints=allocate((self.n_workers, HINT_WORDS), np.dtype(np.int64)),
        )

    def arrays_in(self, block: SharedBlock) -> EnvArrays:
        """The arrays, one after the other in a shared block."""
        offset = 0

        def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[Any]:
            nonlocal offset
            view: NDArray[Any] = np.ndarray(shape, dtype, buffer=block.memory, offset=offset)
            offset += _aligned(view.nbytes)
            return view

        return self.arrays(allocate)

    def n_bytes(self) -> int:
        """The size of the block that ``arrays_in`` needs."""
        size = 0

        def measure(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[Any]:
            nonlocal size
            size += _aligned(int(np.prod(shape)) * dtype.itemsize)
            return np.empty(0, dtype)

        self.arrays(measure)
        return max(size, 1)


class SharedBlock:
    """Anonymous shared memory; one process creates it and sends it to its workers."""

    def __init__(self, memory: mmap.mmap, handle: int | str) -> None:
        self.memory = memory
        self._handle = handle  # a descriptor; on Windows a name that exists while a process uses it
        # The memory itself is freed only when no array uses it any more.
        self.close = weakref.finalize(self, _drop_handle, handle)

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
        if sys.platform == "win32":
            return cls(mmap.mmap(-1, size, tagname=str(handle)), handle)
        return cls(mmap.mmap(int(handle), size), handle)

    @property
    def name(self) -> str | None:
        """The name of the block on Windows; elsewhere None, and the descriptor is sent."""
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


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _CACHE_LINE) * _CACHE_LINE
