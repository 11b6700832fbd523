"""Channel: plain messages through shared memory, none received twice, and waits that end."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from ml_pipeline.envs.workers import channel
from ml_pipeline.envs.workers.channel import LONG_SPIN, NO_SPIN, Board, Channel, Spin


def two_ends() -> tuple[Board, Channel, Channel]:
    """Both ends of the connection of a parent with one worker, and the parent's board."""
    ours, theirs = socket.socketpair()
    parent, worker = Channel(ours, "parent"), Channel(theirs, "worker")
    words = np.zeros((1, 8), dtype=np.int64)
    parent.use_hints(words, 0)
    worker.use_hints(words, 0)
    return Board(words), parent, worker


def test_a_plain_message_to_a_waiting_side_is_only_a_word_in_memory() -> None:
    board, parent, worker = two_ends()

    assert board.send(1) == [0], "no worker must be woken"
    assert worker.has_hint()
    assert worker.next(Spin(LONG_SPIN)) == (b"s", 1, b"")
    assert not worker.has_hint()
    worker.send(b"d", 1)
    assert board.has_plain_replies()
    assert parent.receive() == (b"d", 1, b"")


def test_a_message_wakes_a_sleeping_side_and_is_received_once() -> None:
    board, parent, worker = two_ends()
    received: list[object] = []
    listener = threading.Thread(target=lambda: received.append(worker.next(Spin(NO_SPIN))))
    listener.start()
    if board.send(1) == [1]:
        parent.send(b"s", 1)
    listener.join(5)

    assert received == [(b"s", 1, b"")]
    parent.send(b"c", 2, b"more")
    assert worker.next(Spin(LONG_SPIN)) == (b"c", 2, b"more"), "the first is not repeated"


def test_a_message_that_is_not_sent_or_received_in_time_is_a_timeout() -> None:
    _, parent, worker = two_ends()
    with pytest.raises(TimeoutError):
        parent.receive(0.01)
    with pytest.raises(TimeoutError):
        parent.send(b"c", 1, bytes(50_000_000), 0.01)
    worker.sock.close()


def n_checks(spin: Spin) -> int:
    """How often the spin checks a condition that stays False."""
    checks = []

    def never() -> bool:
        checks.append(None)
        return False

    assert not spin.until(never)
    return len(checks)


def test_a_spin_resumes_after_a_short_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_LATE_SECONDS", 60.0)  # other programs may use the core
    spin = Spin(LONG_SPIN)
    for _ in range(6):
        n_checks(spin)

    spin.slept(10.0)
    after_long_sleep = n_checks(spin)
    spin.slept(0.5 * LONG_SPIN)

    assert after_long_sleep == 1
    assert n_checks(spin) > 1


def test_a_spin_is_bounded_and_stops_after_several_failures() -> None:
    spin = Spin(LONG_SPIN)
    counts = [n_checks(spin) for _ in range(8)]

    assert sum(counts[:4]) > 4
    assert counts[4:] == [1] * 4
    assert spin.until(lambda: True)
    assert n_checks(Spin(NO_SPIN)) <= 2


def test_a_spin_pauses_while_another_program_uses_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    yields = []
    monkeypatch.setattr(channel, "yield_core", lambda: yields.append(time.sleep(2e-3)))
    monkeypatch.setattr(channel, "_SHORTEST_REST", 60.0)
    spin = Spin(LONG_SPIN)
    for _ in range(3):
        assert not spin.until(lambda: False)

    assert len(yields) == 1
