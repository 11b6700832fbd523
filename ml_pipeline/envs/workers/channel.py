"""Channel: one end of the line between a vector env and a worker.

A message goes over a socket. But going to sleep and being woken cost more than most envs take
for a step, so a waiting process first watches a word in shared memory for a while, and a plain
message (step! done.) is no more than that word; it is sent over the socket, too, only where the
other side has gone to sleep.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Message = tuple[bytes, int, bytes]  # kind, sequence number, payload; a reply has its request's

_HEADER = struct.Struct("<cqq")  # kind, sequence number, length of the payload
_DOZE_SECONDS = 0.05  # a sleeping process looks at the words this often, whatever happens
_SPINS_IN_VAIN, _TRY_EVERY = 4, 32  # see Spin
_LATE_SECONDS = 1e-3  # less than a time slice of another program, more than a step of ours
_SHORTEST_REST, _LONGEST_REST = 0.01, 0.5  # seconds

# Words in a worker's line of ``EnvArrays.hints``. A side has said 2 n once its plain message
# number n counts, and 2 n + 1 once message number n can be had from the socket.
_PARENT_SAID, _WORKER_SAID, _PARENT_SLEEPS, _WORKER_SLEEPS, BUSY = range(5)

yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))

# A plain message needs that what was written before the word is seen by whoever sees the word,
# and a full memory barrier between saying it and looking whether the other side sleeps. An x86
# keeps writes in order, and there any lock is a full barrier. Elsewhere Linux's sched_yield is
# one, which takes the run queue of the core through it. With neither, all goes by the socket.
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_HAS_BARRIER = _IS_X86 or sys.platform == "linux"


class Channel:
    """Messages of one side to the other, numbered upwards.

    On the parent's side, which never blocks, a message that does not go or come within so many
    ``seconds`` is a ``TimeoutError``; None waits for ever.
    """

    def __init__(
        self, sock: socket.socket, side: Literal["parent", "worker"], *, plain: tuple[bytes, bytes]
    ) -> None:
        """``plain``: the kinds of a plain request and of a plain reply."""
        sock.setblocking(side == "worker")
        self.sock = sock
        self._plain_out, self._plain_in = plain if side == "parent" else plain[::-1]
        self._is_parent = side == "parent"
        self._hints: memoryview | None = None
        self._all_hints: NDArray[np.int64]
        self._lock = threading.Lock()  # for the barrier in it
        self._heard = 0  # number of the last message that was received
        words = (_PARENT_SAID, _PARENT_SLEEPS), (_WORKER_SAID, _WORKER_SLEEPS)
        (self._said, self._sleeps), (self._theirs, self._they_sleep) = (
            words if self._is_parent else words[::-1]
        )

    def use_hints(self, hints: NDArray[np.int64], worker: int) -> None:
        """Say and look in this worker's line of ``EnvArrays.hints`` from now on."""
        self._all_hints = hints
        self._hints = memoryview(hints[worker])

    def has_hint(self) -> bool:
        """Whether the other side has said something that was not received yet."""
        return self._hints is not None and self._hints[self._theirs] > 2 * self._heard + 1

    def send(
        self, kind: bytes, number: int, payload: bytes = b"", seconds: float | None = None
    ) -> None:
        hints = self._hints
        if hints is not None and _HAS_BARRIER and kind == self._plain_out and not payload:
            if not _IS_X86:
                yield_core()
            hints[self._said] = 2 * number
            self._barrier()
            if not hints[self._they_sleep] or not self._must_wake(number):
                return
        data = _HEADER.pack(kind, number, len(payload)) + payload
        try:
            n_sent = self.sock.send(data)
        except BlockingIOError:
            n_sent = 0
        if n_sent < len(data):
            self._send_rest(memoryview(data)[n_sent:], seconds)
        if hints is not None:
            # After the message: who sees the hint finds the message there.
            hints[self._said] = 2 * number + 1

    def _barrier(self) -> None:
        if _IS_X86:
            with self._lock:
                return
        yield_core()

    def _must_wake(self, number: int) -> bool:
        """A parent waits for the plain answers of all workers, so the last of them wakes it."""
        return self._is_parent or min(self._all_hints[:, _WORKER_SAID].tolist()) >= 2 * number

    def _send_rest(self, rest: memoryview, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                self._wait(deadline, to_send=True)

    def receive(self, seconds: float | None = None) -> Message | None:
        """What a hint has told of, or else what the socket has; None for old news.

        ``EOFError`` if the other side is gone.
        """
        said = self._hints[self._theirs] if self._hints is not None else 0
        if said > 2 * self._heard + 1 and not said & 1:
            if not _IS_X86:
                yield_core()
            self._heard = said // 2
            return self._plain_in, self._heard, b""
        kind, number, length = _HEADER.unpack(self._read(_HEADER.size, seconds))
        payload = self._read(length, seconds) if length else b""
        if number <= self._heard and self._hints is not None:
            return None  # the word in shared memory was seen before
        self._heard = number
        return kind, number, payload

    def discard(self) -> bool:
        """Drop what has come, unread; False if nothing more will."""
        try:
            return bool(self.sock.recv(2**16))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def sleep(self, is_asleep: bool) -> None:
        """Say whether this side must be woken by a message; look for a hint after saying so."""
        if self._hints is not None:
            self._hints[self._sleeps] = is_asleep
            self._barrier()

    def next(self, spin: Spin) -> Message:
        """The next message, however long it takes."""
        while True:
            can_receive = spin.until(self.has_hint)
            if not can_receive:
                self.sleep(True)
                longest = None if self._hints is None else _DOZE_SECONDS
                can_receive = self.has_hint() or bool(ready([self.sock], longest))
                self.sleep(False)
            if can_receive:
                message = self.receive()
                if message is not None:
                    return message

    def _read(self, n_bytes: int, seconds: float | None) -> bytes:
        deadline = None if seconds is None else time.monotonic() + seconds
        parts = []
        while n_bytes:
            try:
                part = self.sock.recv(n_bytes)
            except BlockingIOError:
                self._wait(deadline, to_send=False)
                continue
            if not part:
                raise EOFError("the other side has closed its end")
            parts.append(part)
            n_bytes -= len(part)
        return b"".join(parts)

    def _wait(self, deadline: float | None, *, to_send: bool) -> None:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not ready([self.sock], seconds, to_send=to_send):
            raise TimeoutError


def ready(
    socks: Sequence[socket.socket], seconds: float | None, *, to_send: bool = False
) -> list[socket.socket]:
    """Those of ``socks`` that can be read, or written, or have come to their end."""
    if not hasattr(select, "poll"):  # Windows
        either = select.select([] if to_send else socks, socks if to_send else [], [], seconds)
        return either[1] if to_send else either[0]
    poll = select.poll()  # select() refuses descriptors above 1023
    for sock in socks:
        poll.register(sock, select.POLLOUT if to_send else select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll(None if seconds is None else 1e3 * seconds)}
    return [sock for sock in socks if sock.fileno() in found]


NO_SPIN, SHORT_SPIN, LONG_SPIN = 0.0, 1e-4, 1e-3  # seconds; a wake-up takes about SHORT_SPIN


class Spin:
    """Waits for a hint by yielding the core, for a bounded time.

    Where hints come late, as while a policy learns, it gives up at once after a few waits in
    vain, but for a try now and then; one that succeeds sets it going again. Where a yield comes
    back late, another program has taken the core, and would do so again: it then rests for a
    while, longer each time. One who sleeps is let in sooner than one who yields.
    """

    def __init__(self, seconds: float) -> None:
        """0 where more processes could spin than there are cores."""
        self._longest = seconds
        self._in_vain = 0  # waits one after the other
        self._rests_until = 0.0
        self._rest_seconds = _SHORTEST_REST

    def until(self, came: Callable[[], bool]) -> bool:
        """Whether it ``came`` in time."""
        if came():
            return True
        now = time.perf_counter()
        if self._in_vain >= _SPINS_IN_VAIN and self._in_vain % _TRY_EVERY:
            self._in_vain += 1
            return False
        end = now + self._longest if now >= self._rests_until else now
        while now < end:
            yield_core()
            before, now = now, time.perf_counter()
            if now - before > _LATE_SECONDS:
                self._rests_until = now + self._rest_seconds
                self._rest_seconds = min(2 * self._rest_seconds, _LONGEST_REST)
                return came()
            if came():
                self._in_vain = 0
                self._rest_seconds = max(0.99 * self._rest_seconds, _SHORTEST_REST)
                return True
        self._in_vain += 1
        return False
