"""Channel: one end of the connection between a vector env and a worker.

Messages go over a socket. Sleeping and waking up take longer than a step of most envs. So a waiting
process first watches a word in shared memory for a while. A plain message (a step request, or
"done" with nothing to report) is only that word. It goes over the socket as well only if the other
side is asleep.
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

Message = tuple[bytes, int, bytes]  # kind, number, payload; a reply has its request's number

# Kinds of requests: step, call any other method of the slice, end.
STEP, CALL, CLOSE = b"s", b"c", b"x"
# Kinds of replies: ready to serve, done, done with a pickled result, a pickled error.
READY, DONE, RESULT, FAULT = b"h", b"d", b"r", b"f"

_HEADER = struct.Struct("<cqq")  # kind, number, length of the payload
_DOZE_SECONDS = 0.05  # a sleeping process checks the words at least this often
_MAX_FAILED_SPINS, _TRY_EVERY = 4, 32  # see Spin
_LATE_SECONDS = 1e-3  # less than a time slice of another program, more than a step of ours
_SHORTEST_REST, _LONGEST_REST = 0.01, 0.5  # seconds

# Words in a worker's row of ``EnvArrays.hints``. A side writes 2 n to send plain message n, and
# 2 n + 1 after it wrote message n to the socket. BUSY: nanoseconds that the worker has spent in its
# envs. RUNNING: index + 1 of the env whose code runs now, else 0.
_PARENT_SENT, _WORKER_SENT, _PARENT_SLEEPS, _WORKER_SLEEPS, BUSY, RUNNING = range(6)

yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))

# A plain message needs two guarantees. First, a process that sees the word also sees all earlier
# writes. Second, a full memory barrier separates writing the word from checking whether the other
# side sleeps. x86 keeps writes in order, and any lock is a full barrier there. Elsewhere Linux's
# sched_yield is one, because it locks the run queue. Otherwise every message uses the socket.
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_HAS_BARRIER = _IS_X86 or sys.platform == "linux"


class Channel:
    """Sends and receives messages, whose numbers must increase.

    A worker sends its plain messages itself; those of the parent are sent by ``Board``. The
    parent's side raises ``TimeoutError`` if a message is not sent or received within ``seconds``;
    None waits forever.
    """

    def __init__(self, sock: socket.socket, side: Literal["parent", "worker"]) -> None:
        sock.setblocking(side == "worker")
        self.sock = sock
        self._is_parent = side == "parent"
        self._hints: memoryview | None = None
        self._all_hints: NDArray[np.int64]
        self._lock = threading.Lock()  # used as a memory barrier
        self._received = 0  # number of the last message
        parent, worker = (_PARENT_SENT, _PARENT_SLEEPS), (_WORKER_SENT, _WORKER_SLEEPS)
        self._sent, self._sleeps = parent if self._is_parent else worker
        self._they_sent, self._they_sleep = worker if self._is_parent else parent

    def use_hints(self, hints: NDArray[np.int64], worker: int) -> None:
        """Use this worker's row of ``EnvArrays.hints`` from now on."""
        self._all_hints = hints
        self._hints = hints[worker].data

    def has_hint(self) -> bool:
        """Whether the other side has sent a message that was not received yet."""
        return self._hints is not None and self._hints[self._they_sent] > 2 * self._received + 1

    def running_env(self) -> int | None:
        """Index of the env that the worker runs now, or ran when it died."""
        return (
            self._hints[RUNNING] - 1 if self._hints is not None and self._hints[RUNNING] else None
        )

    def send(
        self, kind: bytes, number: int, payload: bytes = b"", seconds: float | None = None
    ) -> None:
        hints = self._hints
        if hints is not None and _HAS_BARRIER and kind == DONE:
            if not _IS_X86:
                yield_core()
            hints[self._sent] = 2 * number
            _barrier(self._lock)
            # Only the last worker to reply wakes the parent.
            words = self._all_hints[:, _WORKER_SENT]
            if not hints[self._they_sleep] or min(words.tolist()) < 2 * number:
                return
        data = _HEADER.pack(kind, number, len(payload)) + payload
        try:
            n_sent = self.sock.send(data)
        except BlockingIOError:
            n_sent = 0
        if n_sent < len(data):
            self._send_rest(memoryview(data)[n_sent:], seconds)
        if hints is not None:
            # After sending: a process that sees the word must find the message.
            hints[self._sent] = 2 * number + 1

    def _send_rest(self, rest: memoryview, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                self._wait(deadline, to_send=True)

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None if the socket repeats a message already received as a word.

        Raises ``EOFError`` if the other side is gone.
        """
        word = self._hints[self._they_sent] if self._hints is not None else 0
        if word > 2 * self._received + 1 and not word & 1:
            if not _IS_X86:
                yield_core()
            self._received = word // 2
            return DONE if self._is_parent else STEP, self._received, b""
        kind, number, length = _HEADER.unpack(self._read(_HEADER.size, seconds))
        payload = self._read(length, seconds) if length else b""
        if number <= self._received and self._hints is not None:
            return None
        self._received = number
        return kind, number, payload

    def mark_received(self, number: int) -> None:
        """``Board`` has seen this side's plain message ``number``."""
        self._received = number

    def discard(self) -> bool:
        """Drop unread data; False if the other side is gone."""
        try:
            return bool(self.sock.recv(2**16))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def sleep(self, is_asleep: bool) -> None:
        """Tell the other side whether to wake this one; call ``has_hint`` after falling asleep."""
        if self._hints is not None:
            self._hints[self._sleeps] = is_asleep
            if is_asleep:
                _barrier(self._lock)

    def next(self, spin: Spin) -> Message:
        """Wait for the next message, without a time limit."""
        while True:
            can_receive = spin.until(self.has_hint)
            if not can_receive:
                start = time.perf_counter()
                self.sleep(True)
                longest = None if self._hints is None else _DOZE_SECONDS
                can_receive = self.has_hint() or bool(ready([self.sock], longest))
                self.sleep(False)
                if can_receive:
                    spin.slept(time.perf_counter() - start)
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
                raise EOFError("the other side closed the connection")
            parts.append(part)
            n_bytes -= len(part)
        return b"".join(parts)

    def _wait(self, deadline: float | None, *, to_send: bool) -> None:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not ready([self.sock], seconds, to_send=to_send):
            raise TimeoutError


class Board:
    """The words of all workers, seen by the parent: exchanges plain messages with all at once.

    With many workers this is much faster than one message after the other.
    """

    is_usable = _HAS_BARRIER

    def __init__(self, hints: NDArray[np.int64]) -> None:
        """``hints``: see ``EnvArrays``; row i belongs to worker i."""
        self._requests, self._replies = hints[:, _PARENT_SENT], hints[:, _WORKER_SENT]
        self._we_sleep, self._they_sleep = hints[:, _PARENT_SLEEPS], hints[:, _WORKER_SLEEPS]
        self._lock = threading.Lock()  # used as a memory barrier
        self._word = 0  # of the last request

    def send(self, number: int) -> list[int]:
        """Send plain message ``number`` to every worker; returns 1 for each that must be woken."""
        if not _IS_X86:
            yield_core()
        self._word = 2 * number
        self._requests.fill(self._word)
        _barrier(self._lock)
        asleep: list[int] = self._they_sleep.tolist()
        return asleep

    def has_replies(self) -> bool:
        """Whether every worker has replied to the last message."""
        return bool(min(self._replies.tolist()) >= self._word)

    def has_plain_replies(self) -> bool:
        """Whether every worker has sent a plain reply to the last message."""
        words = self._replies.tolist()
        if words.count(self._word) < len(words):
            return False
        if not _IS_X86:
            yield_core()
        return True

    def sleep(self, is_asleep: bool) -> None:
        """Tell the workers whether the last one to reply must wake the parent."""
        self._we_sleep.fill(is_asleep)
        if is_asleep:
            _barrier(self._lock)


def _barrier(lock: threading.Lock) -> None:
    """A full memory barrier; ``lock`` is not shared with another thread."""
    if _IS_X86:
        with lock:
            return
    yield_core()


def ready(
    socks: Sequence[socket.socket], seconds: float | None, *, to_send: bool = False
) -> list[socket.socket]:
    """Those of ``socks`` that can be read (or written), or whose other end is closed."""
    if not hasattr(select, "poll"):  # Windows
        either = select.select([] if to_send else socks, socks if to_send else [], [], seconds)
        return either[1] if to_send else either[0]
    poll = select.poll()  # select() refuses descriptors above 1023
    for sock in socks:
        poll.register(sock, select.POLLOUT if to_send else select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll(None if seconds is None else 1e3 * seconds)}
    return [sock for sock in socks if sock.fileno() in found]


# Seconds; a wake-up takes about SHORT_SPIN, and a step of several slow envs less than LONG_SPIN.
NO_SPIN, SHORT_SPIN, MEDIUM_SPIN, LONG_SPIN = 0.0, 1e-4, 1e-3, 5e-3


class Spin:
    """Waits for a hint by yielding the core, for a bounded time.

    After a few failed waits, for example while a policy learns, it spins only every 32nd time,
    until one succeeds or a sleep turns out to be short. A yield that returns late means that
    another program uses the core. Then it stops spinning for a while, longer each time: the
    scheduler prefers sleeping processes.
    """

    def __init__(self, seconds: float) -> None:
        """``seconds``: the longest wait; 0 if there are more processes than cores."""
        self._longest = seconds
        self._n_failed = 0  # waits in a row
        self._rests_until = 0.0
        self._rest_seconds = _SHORTEST_REST

    def until(self, has_come: Callable[[], bool]) -> bool:
        """Wait; returns whether the hint came in time."""
        if has_come():
            return True
        now = time.perf_counter()
        if self._n_failed >= _MAX_FAILED_SPINS and self._n_failed % _TRY_EVERY:
            self._n_failed += 1
            return False
        end = now + self._longest if now >= self._rests_until else now
        while now < end:
            yield_core()
            before, now = now, time.perf_counter()
            if now - before > _LATE_SECONDS:
                self._rests_until = now + self._rest_seconds
                self._rest_seconds = min(2 * self._rest_seconds, _LONGEST_REST)
                return has_come()
            if has_come():
                self._n_failed = 0
                self._rest_seconds = max(0.99 * self._rest_seconds, _SHORTEST_REST)
                return True
        self._n_failed += 1
        return False

    def slept(self, seconds: float) -> None:
        """The hint came after a sleep; if that was short, spinning is worth it again."""
        if seconds < self._longest:
            self._n_failed = 0
