"""StopSignals: when a stop signal raises, and that the old handlers are restored."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from ml_pipeline.signals import Interrupted, StopSignals

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


def test_two_signals_at_once_count_as_one() -> None:
    done: list[str] = []

    def work(signals: StopSignals) -> None:
        with signals.transaction():
            send(signal.SIGINT)
            send(signal.SIGTERM)  # also sent to the process group
            done.append("patience")

    with StopSignals(echo_seconds=60) as signals, pytest.raises(Interrupted, match="SIGINT"):
        work(signals)

    assert done == ["patience"]


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
