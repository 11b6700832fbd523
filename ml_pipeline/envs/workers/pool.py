"""WorkerPool: the workers of a vector env; sends requests to all and waits for all replies.

Every wait has a deadline and detects dead workers. A reply has the number of its request. So a
late reply, after an error or an interrupt, is never mistaken for another one.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from typing import Any, TypeVar

import cloudpickle

from ml_pipeline.envs.workers.channel import CALL, DONE, NO_SPIN, RESULT, STEP, Board, Spin, ready
from ml_pipeline.envs.workers.errors import (
    AnswerPendingError,
    WorkerError,
    WorkerStartError,
    env_names,
)
from ml_pipeline.envs.workers.handle import (
    CHECK_SECONDS,
    CLOSE_SECONDS,
    StartMethod,
    WorkerHandle,
    end_workers,
)
from ml_pipeline.envs.workers.shared_arrays import SharedBlock

Result = TypeVar("Result")

_START_SECONDS = 60.0  # the shortest deadline of a new process, which has to import first


class WorkerPool:
    """Workers that receive the same request at the same time."""

    def __init__(self, start_method: StartMethod, answer_seconds: float | None) -> None:
        """A worker that does not answer for ``answer_seconds`` is killed; None waits forever."""
        self.start_method = start_method
        self.answer_seconds = answer_seconds
        self.workers: list[WorkerHandle] = []
        self.spin = Spin(NO_SPIN)
        self.board: Board | None = None  # once the workers share words
        self._is_plain_step = False  # whether the last request was a step sent by the board
        self._owner = os.getpid()
        self._folder = _current_folder()
        self._number = 0  # of the last request; workers that are asked together share it
        # Runs at garbage collection, or at exit before multiprocessing ends daemonic children.
        self._finalizer = util.Finalize(self, end_workers, (self.workers,), exitpriority=10)

    def start(self, rows_of_workers: Sequence[list[int]]) -> list[WorkerHandle]:
        """Start workers and wait until they have finished their imports."""
        if multiprocessing.current_process().daemon:
            raise WorkerStartError(
                "a daemonic process cannot start workers; use SerialEnv (vec_env=serial), or start "
                "this process with daemon=False"
            )
        if self.start_method != "fork" and sys.platform != "win32":
            # Otherwise the first spawn starts it, which unblocks the stop signals too early.
            resource_tracker.ensure_running()
        if self.start_method == "forkserver":
            # Start it before stop signals are blocked: its other children would inherit the block.
            importlib.import_module("multiprocessing.forkserver").ensure_running()
        new: list[WorkerHandle] = []
        try:
            for rows in rows_of_workers:
                new.append(self._start_one(rows, f"{len(new) + 1} of {len(rows_of_workers)}"))
            seconds = self.answer_seconds
            self._collect(new, None if seconds is None else max(seconds, _START_SECONDS))
        except BaseException as error:
            end_workers(new, 0.0)
            if isinstance(error, WorkerError) and not isinstance(error, WorkerStartError):
                raise WorkerStartError(f"{error}; it had not started yet") from error
            raise
        return new

    def _start_one(self, rows: list[int], which: str) -> WorkerHandle:
        try:
            with _in_folder(self._folder):
                return WorkerHandle(rows, self.start_method)
        except OSError as error:  # out of memory, processes or files
            raise WorkerStartError(
                f"worker {which} cannot be started: {error}; lower n_workers, or use SerialEnv "
                "(vec_env=serial)"
            ) from error

    def ask(
        self, workers: Sequence[WorkerHandle], method: str, arguments: Sequence[tuple[object, ...]]
    ) -> list[Any]:
        """Call a method of each worker's slice with its own arguments; results in order."""
        self.request(workers, method, arguments)
        return self.results(workers)

    def request(
        self,
        workers: Sequence[WorkerHandle],
        method: str,
        arguments: Sequence[tuple[object, ...]],
        block: SharedBlock | None = None,
    ) -> None:
        self.settle(workers)
        payloads = [cloudpickle.dumps((method, each)) for each in arguments]
        number = self.next_number()
        for worker, payload in zip(workers, payloads, strict=True):
            worker.send(CALL, number, payload, self.answer_seconds)
            if block is not None:
                worker.send_block(block, self.answer_seconds)

    def send_step(self, payloads: Sequence[bytes] | None) -> None:
        """Ask every worker for a step; ``payloads``: its actions, if they are not in the arrays."""
        number, seconds, workers = self.next_number(), self.answer_seconds, self.workers
        board = self.board if payloads is None and Board.is_usable else None
        for worker in workers:
            if worker.lost is not None:
                board = None
        if board is None:
            for worker, payload in zip(workers, payloads or [b""] * len(workers), strict=True):
                worker.send(STEP, number, payload, seconds)
            return
        asleep, now = board.send(number), time.monotonic()
        for worker in workers:
            worker.number, worker.asked_at, worker.reply = number, now, None
        self._is_plain_step = True
        for worker in itertools.compress(workers, asleep):
            worker.send(STEP, number, b"", seconds)

    def is_own(self) -> bool:
        """False in a forked copy of the process that made the pool."""
        return os.getpid() == self._owner

    def next_number(self) -> int:
        self._is_plain_step = False
        self._number += 1
        return self._number

    def settle(self, workers: Sequence[WorkerHandle]) -> None:
        """Wait for replies that an error or interrupt left pending, and drop them.

        Call this before writing anything that these workers may still read.
        """
        for worker in workers:
            if worker.reply is None and worker.lost is None:
                self._collect(workers, self.answer_seconds, raise_faults=False)

    def results(
        self,
        workers: Sequence[WorkerHandle],
        *,
        timeout: float | None = None,
        raise_losses: bool = True,
    ) -> list[Any]:
        """The result of each worker, in order; None for a lost one. Empty if none has a result.

        Raises the first fault at once, and the first loss if ``raise_losses``. Raises
        ``AnswerPendingError`` after ``timeout``; then this can be called again.
        """
        seconds = self.answer_seconds
        if self._is_plain_step and self.board is not None:
            if self.spin.until(self.board.has_replies) and self.board.has_plain_replies():
                self._take_plain_replies()
                return []
        else:
            for worker in workers:
                if worker.is_awaited and self.spin.until(worker.channel.has_hint):
                    worker.receive(seconds)
        start = time.perf_counter()
        self._collect(workers, seconds, timeout=timeout, raise_losses=raise_losses)
        self.spin.slept(time.perf_counter() - start)
        results = []
        for worker in workers:
            kind, _, payload = worker.reply or (DONE, 0, b"")
            results.append(worker.unpickled(payload) if kind == RESULT else None)
        return results

    def _take_plain_replies(self) -> None:
        reply = DONE, self._number, b""
        for worker in self.workers:
            worker.reply = reply
            worker.channel.mark_received(self._number)

    def _collect(
        self,
        workers: Sequence[WorkerHandle],
        seconds: float | None,
        *,
        timeout: float | None = None,
        raise_faults: bool = True,
        raise_losses: bool = True,
    ) -> None:
        """Wait until every worker has answered or is lost: no answer for ``seconds`` is a loss."""
        start = time.monotonic()
        while True:
            if raise_faults:
                _raise_first(workers, raise_losses)
            waiting = [worker for worker in workers if worker.is_awaited]
            if not waiting:
                return
            now = time.monotonic()
            longest = CHECK_SECONDS
            if seconds is not None:
                longest = min(longest, waiting[0].asked_at + seconds - now)
            if timeout is not None:
                longest = min(longest, start + timeout - now)
            self._sleep(waiting, max(longest, 0.0), seconds)
            now = time.monotonic()
            for worker in waiting:
                if seconds is not None and worker.is_awaited and now > worker.asked_at + seconds:
                    worker.give_up(seconds)
            late = [row for worker in waiting if worker.is_awaited for row in worker.rows]
            if timeout is not None and late and now >= start + timeout:
                names = env_names(sorted(late))
                raise AnswerPendingError(
                    f"no answer from {names} within {timeout} s; it may still come, so wait again"
                )

    def _sleep(
        self, waiting: Sequence[WorkerHandle], longest: float, seconds: float | None
    ) -> None:
        """Sleep until a worker answers, at most ``longest`` seconds, and read the answers."""
        if self.board is not None:
            self.board.sleep(True)
        if all(worker.channel.has_hint() for worker in waiting):
            longest = 0.0
        readable = ready([worker.channel.sock for worker in waiting], longest)
        if self.board is not None:
            self.board.sleep(False)
        for worker in waiting:
            if worker.channel.has_hint() or worker.channel.sock in readable:
                worker.receive(seconds)
            elif not readable:
                worker.check_alive()

    def end(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the workers close their envs, then kill those that need longer."""
        end_workers(self.workers, seconds)
        self._finalizer.cancel()


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None


@contextlib.contextmanager
def _in_folder(folder: str | None) -> Iterator[None]:
    """All workers start where the first ones did, even if an env of this process has moved."""
    here = _current_folder()
    if folder is None or here == folder:
        yield
        return
    os.chdir(folder)
    try:
        yield
    finally:
        if here is not None:
            os.chdir(here)


def call_in_worker(
    work: Callable[[], Result], *, start_method: StartMethod, seconds: float | None
) -> Result:
    """The result of ``work()`` in a new worker; a crash or a hang there is a ``WorkerError``."""
    pool = WorkerPool(start_method, seconds)
    try:
        pool.workers += pool.start([[0]])
        result: Result = pool.ask(pool.workers, "run", [(work,)])[0]
        return result
    finally:
        pool.end()


def _raise_first(workers: Sequence[WorkerHandle], raise_losses: bool) -> None:
    lost = None
    for worker in workers:
        lost = lost or worker.lost
        fault = worker.fault()
        if fault is not None:
            raise fault
    if raise_losses and lost is not None:
        raise lost
