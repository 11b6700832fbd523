"""AgreedSignals: a stop signal of any rank stops all of them after the same iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ml_pipeline.ranks.rendezvous import RankError
from ml_pipeline.signals import Interrupted, Signals, Transaction


class AgreedSignals:
    """Wraps the ``signals`` of this rank; ``agree`` asks all ranks after each iteration."""

    def __init__(self, signals: Signals, agree: Callable[[], int]) -> None:
        self._signals = signals
        self._agree = agree

    @property
    def pending(self) -> int:
        return self._signals.pending

    def arrived(self) -> None:
        self._signals.arrived()

    def dismiss(self) -> None:
        self._signals.dismiss()

    def shielded(self) -> AbstractContextManager[None]:
        return self._signals.shielded()

    def whole_run(self) -> AbstractContextManager[None]:
        """One rank must not stop between two agreements: the others would wait for it."""
        return self._signals.shielded()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A stop signal waits until the ranks agree after an iteration, without a limit."""
        try:
            yield Transaction()
            number = self._agree()
        except RankError:
            self._signals.dismiss()  # torchrun ends the others when one has failed
            raise
        if number:
            self._signals.dismiss()  # this rank may get the signal later than another one
            raise Interrupted(number)
