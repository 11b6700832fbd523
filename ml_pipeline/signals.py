"""StopSignals: Ctrl-C, SIGTERM and a closed terminal end a run in order, never amid an update."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ECHO_SECONDS = 0.5
_GRACE_SECONDS = 4.0  # SIGTERM leaves about 10 in all, and the checkpoint is to be saved after it


class Interrupted(KeyboardInterrupt):
    """A stop signal came; ``exit_code`` is what the shell expects: 130, 143 or 129."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_name = signal.Signals(signal_number).name
        self.exit_code = 128 + signal_number


class StopSignals:
    """While open, a stop signal raises ``Interrupted``.

    Within a ``patient`` block it does so at the block's end, but not later than after
    ``grace_seconds`` or at a second signal (one that comes at once is the same, told twice: to
    the process and to its group); within a ``shielded`` block never before its end.
    Elsewhere at once. Outside the main thread, where Python delivers no signals, this does
    nothing. ``on_wait`` is called when a signal is being waited with.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = _GRACE_SECONDS,
        echo_seconds: float = _ECHO_SECONDS,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._echo_seconds = echo_seconds
        self._first_at = -math.inf
        self._on_wait = on_wait
        self._before: dict[int, Any] = {}
        self._shields = 0
        self._patient = False
        self._pending: int | None = None
        self._out_of_patience = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            # Under nohup it is ignored: the terminal may close, and Windows has none of it.
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
            if hasattr(signal, "SIGALRM"):
                self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._lose_patience)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disarm()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self._raise_if_due()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """A block that is worth waiting for; what comes after it is not."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        self._raise_if_due()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One iteration: a stop signal waits for its end, or discards it before ``hold``."""
        transaction = Transaction(self)
        with self.patient():
            try:
                yield transaction
            finally:
                transaction.release()

    def _raise_if_due(self) -> None:
        waits = self._shields or (self._patient and not self._out_of_patience)
        if self._pending is not None and not waits:
            number, self._pending = self._pending, None
            self._disarm()
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._pending is None
        if not first and time.monotonic() < self._first_at + self._echo_seconds:
            return
        self._first_at = time.monotonic() if first else self._first_at
        self._pending = number
        self._out_of_patience = not (self._patient and first and hasattr(signal, "setitimer"))
        if not self._out_of_patience:
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
            self._on_wait()
        self._raise_if_due()

    def _lose_patience(self, number: int, frame: FrameType | None) -> None:
        self._out_of_patience = True
        self._raise_if_due()

    def _disarm(self) -> None:
        if self._before and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)


class Transaction:
    """Between ``hold`` and ``commit`` a stop signal waits."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._is_held = False

    def hold(self) -> None:
        if not self._is_held:
            self._is_held = True
            self._signals._shields += 1

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._signals._shields -= 1

    def commit(self) -> None:
        self.release()
        self._signals._raise_if_due()


class NoSignals:
    """Stands in for ``StopSignals`` where nothing handles signals."""

    def hold(self) -> None: ...

    def commit(self) -> None: ...

    @contextmanager
    def transaction(self) -> Iterator[NoSignals]:
        yield self

    @contextmanager
    def shielded(self) -> Iterator[None]:
        yield
