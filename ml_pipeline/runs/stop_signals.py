"""StopSignals: Ctrl-C, SIGTERM and a closed terminal end a run in order, never amid an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A stop signal came; ``exit_code`` is what the shell expects: 130, 143 or 129."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_name = signal.Signals(signal_number).name
        self.exit_code = 128 + signal_number


class StopSignals:
    """While open, a stop signal raises ``Interrupted``: at once, or after a ``shielded`` block.

    A second signal during a shielded block changes nothing. Outside the main thread, where
    Python delivers no signals, this does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._shields = 0
        self._pending: int | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            # Under nohup it is ignored: the terminal may close, and Windows has none of it.
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._pending is not None and not self._shields:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._shields:
            self._pending = number
        else:
            raise Interrupted(number)
