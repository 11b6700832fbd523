"""RankMemory: what the ranks of one machine tell each other, without sockets.

Gloo sends every tensor through sockets and threads. For a small network that takes as long as the
gradient itself. Here each rank writes its part into shared memory and waits until all parts are
there. Then it adds them in the order of the ranks, so all ranks compute the same bits.

Two ranks with 8 CartPoles each make 1.75 times as many env steps per second as with Gloo,
and 1.55 times with 256 units per layer; docs/scale.md has the measurement.
"""

from __future__ import annotations

import mmap
import os
import pickle
import platform
import secrets
import time
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.number)
Value = TypeVar("Value")

MOST_BYTES = 1 << 20  # of one part; larger sums take their time anyway
_WORD_BYTES = 4096
_N_SLOTS = 2  # a rank may write its next part while others still read this one
_TOKEN_BYTES = 16  # at the end of the words

# A wait yields the core, then sleeps, and asks at times whether the others are alive. In seconds:
_YIELD_SECONDS, _SLEEP_SECONDS, _ASK_SECONDS = 2e-3, 1e-4, 0.1

# A rank that sees the number of a part must see the part too. x86 keeps writes in order. Elsewhere
# Linux's sched_yield is a full barrier: it always enters the scheduler, which begins with one. A
# lock is not enough there: a write before it may become visible after a write behind it.
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def is_usable() -> bool:
    """Whether all ranks are processes of this machine."""
    is_one_machine = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    return is_one_machine and hasattr(os, "memfd_create")


class MemoryFile(NamedTuple):
    """A file in memory without a name: whenever its ranks are killed, nothing is left."""

    pid: int  # of the rank that made it and keeps it open
    descriptor: int
    token: bytes  # of its content: in another container, the pid may be that of another process

    def close(self) -> None:
        """In the rank that made it, after all ranks have opened it."""
        os.close(self.descriptor)

    def opened(self) -> mmap.mmap:
        """Its memory, for any rank; raises OSError if this process cannot reach it."""
        with open(f"/proc/{self.pid}/fd/{self.descriptor}", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        if memory[_WORD_BYTES - _TOKEN_BYTES : _WORD_BYTES] != self.token:
            raise OSError("the file of another process")
        return memory


def new_file(n_ranks: int) -> MemoryFile:
    """The file of ``n_ranks``, with zeros."""
    descriptor = os.memfd_create("ml_pipeline")
    try:
        # Reserves the memory: a write without room for it would kill the process.
        os.posix_fallocate(descriptor, 0, _WORD_BYTES + _N_SLOTS * n_ranks * MOST_BYTES)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(descriptor, token, _WORD_BYTES - _TOKEN_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return MemoryFile(os.getpid(), descriptor, token)


class RankMemory:
    """One rank's side; all ranks make the same calls, with arrays of the same size and type."""

    def __init__(
        self, file: MemoryFile, rank: int, pids: list[int], timeout_seconds: float
    ) -> None:
        memory = file.opened()
        self._rank = rank
        self._pids = pids
        self._timeout = timeout_seconds
        # The number of each rank's last part, and whether it has left.
        words = np.frombuffer(memory, np.int64, 2 * len(pids))
        self._words, self._has_left = words.reshape(2, len(pids))
        parts = np.frombuffer(memory, np.uint8, offset=_WORD_BYTES)
        self._parts = parts.reshape(_N_SLOTS, len(pids), MOST_BYTES)
        self._number = 0

    def parts(self, values: NDArray[Number]) -> NDArray[Number]:
        """The ``values`` of all ranks, [n_ranks, n]; valid until the next call.

        Raises RuntimeError if another rank is missing.
        """
        self._number += 1
        slot = self._parts[self._number % _N_SLOTS, :, : values.nbytes].view(values.dtype)
        slot[self._rank] = values
        _order_memory()
        self._words[self._rank] = self._number
        if not self._has_come():
            self._wait()
        _order_memory()
        return slot

    def add(self, values: NDArray[Number]) -> None:
        """Replace ``values`` by their sums over all ranks."""
        np.add.reduce(self.parts(values), axis=0, out=values)

    def objects(self, value: Value) -> list[Value] | None:
        """The values of all ranks; None if one of them is too large."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self.parts(np.array([len(data)]))[:, 0].tolist()
        if max(sizes) > MOST_BYTES:
            return None
        row = np.zeros(max(sizes), np.uint8)
        row[: len(data)] = data
        parts = self.parts(row)
        # Only processes of this user can open the file; the bytes are those of our own ranks.
        return [pickle.loads(each[:size].data) for each, size in zip(parts, sizes, strict=True)]

    def leave(self) -> None:
        """Tell ranks that wait for this one that it will not come."""
        self._has_left[self._rank] = 1

    def _has_come(self) -> bool:
        return bool(min(self._words.tolist()) >= self._number)

    def _wait(self) -> None:
        begin = now = time.monotonic()
        asks = begin + _ASK_SECONDS
        while not self._has_come():
            if now - begin < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now > asks:
                asks = now + _ASK_SECONDS
                self._check(now - begin)

    def _check(self, seconds: float) -> None:
        # A rank that has come may have finished the run already.
        late = np.flatnonzero(self._words < self._number).tolist()
        if any(self._has_left[rank] for rank in late):
            raise RuntimeError("a rank has left")
        if not all(_is_alive(self._pids[rank]) for rank in late):
            raise RuntimeError("a rank was killed")
        if late and seconds > self._timeout:
            raise RuntimeError(f"no answer for {seconds:.0f} s")


def _order_memory() -> None:
    if not _IS_X86:
        os.sched_yield()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
