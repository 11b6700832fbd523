"""StopSignals: SIGINT, SIGTERM and SIGHUP end a run cleanly, never in the middle of an update.

A stop is an exception, and code that the run calls may swallow it: a compiled env often ignores
every exception. So a signal stays pending until the run itself has caught the exception.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, Protocol

_ECHO_SECONDS = 0.5
_GRACE_SECONDS = 4.0  # SIGKILL follows SIGTERM after about 10 s; saving needs the rest
_RETRY_SECONDS = 2.0  # enough for the clean-up of an exception that was not swallowed
_LAST_SECONDS = 30.0  # of raising; then the process ends without saving

STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):  # not on Windows
    STOP_SIGNALS.append(signal.SIGHUP)


def signals_to_handle() -> list[signal.Signals]:
    """``STOP_SIGNALS``, without SIGHUP where it is ignored: nohup lets the terminal close."""
    hangup = getattr(signal, "SIGHUP", None)
    return [n for n in STOP_SIGNALS if n != hangup or signal.getsignal(n) is not signal.SIG_IGN]


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived; ``exit_code`` follows the shell's rule: 130, 143 or 129."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_name = signal.Signals(signal_number).name
        self.exit_code = 128 + signal_number


Hold = Callable[[], AbstractContextManager[object]]


class Transaction:
    """One iteration: a stop signal may discard it before ``hold``, then waits for ``commit``."""

    def __init__(self, on_commit: Callable[[], None] = lambda: None) -> None:
        self.is_held = False
        self._on_commit = on_commit

    def hold(self) -> AbstractContextManager[object]:
        """From here to ``commit`` a stop signal waits; with ``with hold():``, in its block."""
        self.is_held = True
        return self

    def __enter__(self) -> None:
        """``hold`` was called; see there."""

    def __exit__(self, *error: object) -> None:
        self.commit()

    def commit(self) -> None:
        """The changes are complete; a stop signal may interrupt the rest of the block."""
        self.is_held = False
        self._on_commit()


def never_held() -> AbstractContextManager[object]:
    """The ``hold`` of an iteration that nobody interrupts."""
    return nullcontext()


class Signals(Protocol):
    """When a stop signal may interrupt a run."""

    @property
    def pending(self) -> int:
        """The number of a signal that waits, or 0."""

    def arrived(self) -> None:
        """Call where ``Interrupted`` is caught: it is not raised again."""

    def dismiss(self) -> None:
        """Ignore signals from now on, also one that waits: the run is ending already."""

    def shielded(self) -> AbstractContextManager[None]:
        """A block that always finishes: a stop signal waits for its end."""

    def whole_run(self) -> AbstractContextManager[None]:
        """The block of all iterations."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """The block of one iteration."""


class NoSignals:
    """Replaces ``StopSignals`` where signals are not handled."""

    pending = 0

    def arrived(self) -> None:
        """There are no signals to catch."""

    def dismiss(self) -> None:
        """There are no signals to ignore."""

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        yield Transaction()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        yield

    whole_run = shielded


_open: StopSignals | None = None  # the one that handles signals now


def raise_swallowed() -> None:
    """Call after code of others has run in this process: raise a stop that it has swallowed."""
    if _open is not None and _open.is_raised:
        _open.raise_if_due()


class StopSignals:
    """While open, a stop signal raises ``Interrupted``: at once, or after a block that delays it.

    ``shielded`` and ``transaction`` delay it. ``on_wait`` is called when a signal has to wait.
    A second signal within ``echo_seconds`` is ignored: often a process and its group both get it.
    It raises again every ``retry_seconds`` until a transaction, the end of the run or ``arrived``
    has caught the exception. After ``last_seconds`` the process ends at once.
    Python delivers signals to the main thread only; in other threads this does nothing.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = _GRACE_SECONDS,
        echo_seconds: float = _ECHO_SECONDS,
        retry_seconds: float = _RETRY_SECONDS,
        last_seconds: float = _LAST_SECONDS,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._echo_seconds = echo_seconds
        self._retry_seconds = retry_seconds
        self._last_seconds = last_seconds
        self._on_wait = on_wait
        self._previous_handlers: dict[int, Any] = {}
        self._n_shields = 0
        self._transaction: Transaction | None = None
        self._pending: int | None = None
        self._first_at = -math.inf
        self._is_grace_over = False
        self._raised_at: float | None = None  # the first time; None: not raised
        self._outer: StopSignals | None = None

    def __enter__(self) -> StopSignals:
        global _open
        self._outer, _open = _open, self
        if threading.current_thread() is threading.main_thread():
            handlers = dict.fromkeys(signals_to_handle(), self._handle)
            if hasattr(signal, "SIGALRM"):
                handlers[signal.SIGALRM] = self._on_alarm
            self._previous_handlers = {
                number: signal.signal(number, handler) for number, handler in handlers.items()
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _open
        _open = self._outer
        self._stop_timer()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def pending(self) -> int:
        """The number of a signal that waits, or 0."""
        return self._pending or 0

    @property
    def is_raised(self) -> bool:
        """Whether the exception was raised and has not arrived."""
        return self._raised_at is not None

    def arrived(self) -> None:
        """Call where ``Interrupted`` is caught: it is not raised again."""
        if self.is_raised:
            self._pending = self._raised_at = None
            self._stop_timer()

    def dismiss(self) -> None:
        """Ignore signals from now on, also one that waits: the run is ending already."""
        self._pending = self._raised_at = None
        self._stop_timer()
        self._n_shields += 1

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """A block that always finishes: a stop signal waits for its end."""
        self._n_shields += 1
        try:
            yield
        finally:
            self._n_shields -= 1
        self.raise_if_due()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A stop signal waits for the end of this block.

        It waits at most ``grace_seconds``, or until a second signal. Between ``Transaction.hold``
        and ``commit`` it waits without a limit.
        """
        self._transaction = Transaction(self.raise_if_due)
        try:
            yield self._transaction
            self._transaction = None
            self.raise_if_due()
        except Interrupted:
            self.arrived()
            raise
        finally:
            self._transaction = None

    @contextmanager
    def whole_run(self) -> Iterator[None]:
        """A stop signal may interrupt it: each iteration is a transaction of its own."""
        try:
            yield
        except Interrupted:
            self.arrived()
            raise

    def raise_if_due(self) -> None:
        """Raise a pending signal unless a block delays it."""
        if self._pending is None or self._must_wait():
            return
        if self._raised_at is None:
            self._raised_at = time.monotonic()
        self._start_timer(self._retry_seconds)
        raise Interrupted(self._pending)

    def _must_wait(self) -> bool:
        if self._n_shields:
            return True
        transaction = self._transaction
        return transaction is not None and (transaction.is_held or not self._is_grace_over)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self._pending is None
        if not is_first and time.monotonic() < self._first_at + self._echo_seconds:
            return
        self._first_at = time.monotonic() if is_first else self._first_at
        self._pending = number
        has_grace = self._transaction is not None and is_first and hasattr(signal, "setitimer")
        self._is_grace_over = not has_grace
        if has_grace:
            self._start_timer(self._grace_seconds)
            self._on_wait()
        self.raise_if_due()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        """The grace time is over, or the exception has not arrived."""
        self._is_grace_over = True
        is_lost = (
            self._raised_at is not None
            and self._pending is not None
            and not self._must_wait()
            and time.monotonic() > self._raised_at + self._last_seconds
        )
        if is_lost:
            self._end_process()
        self.raise_if_due()

    def _end_process(self) -> None:
        number = self._pending or 0
        print(
            f"{signal.Signals(number).name}: code that the run calls, such as a compiled env, has "
            f"ignored the stop for {self._last_seconds:g} s, so the process ends now. Work since "
            "the last checkpoint is lost; vec_env=parallel runs envs in processes of their own",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + number)

    def _start_timer(self, seconds: float) -> None:
        if self._previous_handlers and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def _stop_timer(self) -> None:
        self._start_timer(0.0)
