"""StopSignals: when a stop signal raises, discards an iteration or waits for its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ml_pipeline.signals import Interrupted, NoSignals, StopSignals, Transaction

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stop_signal_raises_at_once_with_its_exit_code(number: int, code: int) -> None:
    with StopSignals(), pytest.raises(Interrupted) as caught:
        send(number)

    assert caught.value.exit_code == code


def test_shielded_block_finishes_before_any_signal_raises() -> None:
    done: list[str] = []

    def work(signals: StopSignals) -> None:
        with signals.shielded(), signals.shielded():
            send(signal.SIGINT)
            send(signal.SIGTERM)
            done.append("all of it")
        done.append("not this")

    with StopSignals(echo_seconds=0) as signals, pytest.raises(Interrupted, match="SIGTERM"):
        work(signals)

    assert done == ["all of it"]


def test_old_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    with StopSignals():
        assert [signal.getsignal(number) for number in numbers] != before

    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def _ignored() -> Iterator[None]:
    """SIGINT and SIGHUP are ignored, as by a shell's & and by nohup."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_ignored")
def test_background_job_is_stopped_by_sigint_and_not_by_its_closed_terminal() -> None:
    with StopSignals():
        send(signal.SIGHUP)
        with pytest.raises(Interrupted, match="SIGINT"):
            send(signal.SIGINT)


def test_handlers_stay_unchanged_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [before]


def train(signals: StopSignals, iteration: Callable[[Transaction], None]) -> str:
    """Run one iteration; returns the signal that stopped it, and where."""
    where = "inside"
    try:
        with signals, signals.transaction() as transaction:
            iteration(transaction)
            where = "at the end"
    except Interrupted as stop:
        return f"{stop.signal_name} {where}"
    return "not stopped"


@pytest.mark.parametrize(
    ("numbers", "echo_seconds", "end"),
    [
        ([signal.SIGTERM], 0, "SIGTERM at the end"),
        ([signal.SIGTERM, signal.SIGINT], 0, "SIGINT inside"),
        ([signal.SIGINT, signal.SIGTERM], 60, "SIGINT at the end"),
    ],
    ids=["one", "two", "two within echo_seconds"],
)
def test_before_hold_the_second_signal_discards_the_iteration_unless_it_is_an_echo(
    numbers: list[int], echo_seconds: float, end: str
) -> None:
    waits: list[str] = []

    def iteration(transaction: Transaction) -> None:
        for number in numbers:
            send(number)
            waits.append(f"after {number}")

    signals = StopSignals(on_wait=lambda: waits.append("on_wait"), echo_seconds=echo_seconds)

    assert train(signals, iteration) == end
    assert waits[:2] == ["on_wait", f"after {numbers[0]}"]


def test_signal_before_hold_discards_the_iteration_after_the_grace_time() -> None:
    def iteration(transaction: Transaction) -> None:
        send(signal.SIGTERM)
        time.sleep(60)  # the exception ends it

    assert train(StopSignals(grace_seconds=0.01), iteration) == "SIGTERM inside"


@pytest.mark.parametrize("is_signalled_first", [True, False])
def test_after_hold_neither_a_second_signal_nor_the_grace_time_stops_the_iteration(
    is_signalled_first: bool,
) -> None:
    signals = StopSignals(grace_seconds=0.01, echo_seconds=0)

    def iteration(transaction: Transaction) -> None:
        if is_signalled_first:
            with signals.shielded():  # the grace time must not end before ``hold``
                send(signal.SIGINT)
                transaction.hold()
        else:
            transaction.hold()
            send(signal.SIGINT)
        while not signals._is_grace_over:
            time.sleep(0.001)
        send(signal.SIGTERM)

    assert train(signals, iteration) == "SIGTERM at the end"


def test_shielded_block_in_a_transaction_finishes_before_the_iteration_is_discarded() -> None:
    done: list[str] = []
    signals = StopSignals(echo_seconds=0)

    def iteration(transaction: Transaction) -> None:
        with signals.shielded():
            send(signal.SIGINT)
            send(signal.SIGTERM)
            done.append("shielded")
        done.append("after the shielded block")

    assert train(signals, iteration) == "SIGTERM inside"
    assert done == ["shielded"]


def test_after_a_held_transaction_signals_are_raised_at_once() -> None:
    with StopSignals() as signals:
        with signals.transaction() as transaction:
            transaction.hold()
        with pytest.raises(Interrupted):
            send(signal.SIGINT)


def test_after_commit_a_second_signal_stops_the_iteration_again() -> None:
    def iteration(transaction: Transaction) -> None:
        transaction.hold()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        transaction.commit()
        raise AssertionError("the pending signal was not raised")

    assert train(StopSignals(echo_seconds=0), iteration) == "SIGINT inside"


def test_no_signals_has_the_same_interface() -> None:
    signals = NoSignals()
    with signals.transaction() as transaction, signals.shielded():
        transaction.hold()
        transaction.commit()
