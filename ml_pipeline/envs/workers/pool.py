"""WorkerPool: the worker processes of a vector env, asked together and waited for together.

Every wait has a deadline and sees a death. A reply bears the number of its request, so an
answer that comes late, after an error or an interrupt, is never taken for another's.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker, util
from typing import Any, Literal

import cloudpickle

from ml_pipeline.envs.workers.channel import NO_SPIN, Channel, Message, Spin, ready
from ml_pipeline.envs.workers.shared_arrays import SharedBlock
from ml_pipeline.envs.workers.worker import (
    CALL,
    CLOSE,
    DONE,
    FAULT,
    PLAIN,
    RESULT,
    STOP_SIGNALS,
    WorkerError,
    blamed,
    worker_main,
)

StartMethod = Literal["spawn", "fork", "forkserver"]

_START_SECONDS = 60.0  # for a new process to import what it needs; never less than this
CLOSE_SECONDS = 2.0  # a worker that has not closed its envs by then is ended by force
_LOOK_SECONDS = 0.1  # a waiting pool looks this often whether the workers live


class WorkerTimeoutError(WorkerError, multiprocessing.TimeoutError, TimeoutError):
    """A worker has not answered in time."""


class AnswerPendingError(WorkerTimeoutError):
    """The caller's own patience is at its end; the answer is still under way."""


class WorkerStartError(WorkerError):
    """This process cannot start workers; its envs can still run in it, by ``SerialEnv``."""


class Worker:
    """The parent's view of one worker: its process, its line, and what it has answered."""

    def __init__(self, rows: list[int], start_method: StartMethod) -> None:
        self.rows = rows  # the envs that it runs
        self.reply: Message | None = None  # to the last request; None while it is owed
        self.lost: WorkerError | None = None  # why there will be no reply, now or later
        self.number = 0  # of the last request
        self.asked_at = time.monotonic()
        self._owner = os.getpid()
        self._started = False
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, "parent", plain=PLAIN)
        # A forked child holds a copy of every line that is open here now.
        inherited = [*_parent_ends, ours] if start_method == "fork" else []
        parent = None if start_method == "forkserver" else os.getpid()
        at_once = threading.current_thread() is threading.main_thread()
        # Named always: a launcher may have left another start method behind as the default.
        context: Any = multiprocessing.get_context(start_method)
        self.process = context.Process(
            target=worker_main,
            args=(theirs, inherited, parent, at_once),
            name=f"env worker {rows[0]}",
            daemon=True,
        )
        try:
            with _stop_signals_blocked(), _own_default(context):
                self.process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        _parent_ends.add(ours)

    @property
    def is_awaited(self) -> bool:
        return self.reply is None and self.lost is None

    def is_own(self) -> bool:
        return os.getpid() == self._owner

    def send(self, kind: bytes, number: int, payload: bytes, seconds: float | None) -> None:
        """Ask for something; a worker that cannot be asked is lost."""
        if self.lost is None:
            self.number = number
            self.asked_at = time.monotonic()
            try:
                self.channel.send(kind, number, payload, seconds)
            except TimeoutError:
                self.lost = self._end(f"has not taken a request within {seconds} s")
            except OSError:  # the other end is closed, or this one
                self.lost = self._death()
            except BaseException:
                if payload:  # else it went as a whole or not at all
                    self.lost = self._end("was interrupted in the middle of a request")
                raise
        # Awaited from here on, and not from an interrupt before: it might never be answered.
        self.reply = None

    def send_block(self, block: SharedBlock, seconds: float | None) -> None:
        """Must follow a ``bind`` request at once."""
        while self.lost is None:
            try:
                block.send_descriptor(self.channel.sock)
                return
            except BlockingIOError:  # it has not read the request yet
                if not ready([self.channel.sock], seconds, to_send=True):
                    self.lost = self._end(f"has not taken a request within {seconds} s")
            except OSError:  # it has died
                self.lost = self._death()

    def receive(self, seconds: float | None) -> None:
        """Take the reply, which has begun to come; an answer to an older request is dropped."""
        try:
            message = self.channel.receive(seconds)
            self._started = True
            if message is not None and message[1] == self.number:
                self.reply = message
        except (EOFError, ConnectionError):
            self.lost = self._death()
        except TimeoutError:
            self.lost = self._end("has stopped in the middle of an answer")
        except BaseException:
            if self.reply is None:
                self.lost = self._end("was interrupted in the middle of an answer")
            raise

    def unpickled(self, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except Exception as error:  # whatever a user's __setstate__ raises
            raise blamed(
                f"what {env_names(self.rows)} gave cannot be unpickled here: "
                f"{type(error).__name__}: {error}",
                error,
            ) from error

    def fault(self) -> WorkerError | None:
        """The error in the reply, if it is one."""
        if self.reply is None or self.reply[0] != FAULT:
            return None
        message, cause = pickle.loads(self.reply[2])
        try:
            return blamed(message, pickle.loads(cause) if cause else None)
        except Exception:  # whatever a user's __setstate__ raises: the message still tells it all
            return WorkerError(message)

    def look(self) -> None:
        """Notice a death that the line does not tell, as when an env's own child holds it open."""
        alive = self.process.is_alive()
        if not alive and not ready([self.channel.sock], 0.0):  # its last words count
            self.lost = self._death()

    def give_up(self, seconds: float | None) -> None:
        advice = "; raise step_timeout (vec_env.step_timeout_seconds) if its envs may need longer"
        self.lost = self._end(f"has not answered within {seconds} s", advice)

    def _death(self) -> WorkerError:
        self.process.join(1.0)
        code = self.process.exitcode
        how = "has closed its line"
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
        elif code is not None:
            how = f"ended with exit code {code}"
        self.process.kill()
        if not self._started:
            how += (
                " while it started; if it says nothing above: a script that starts workers must "
                "do so under if __name__ == '__main__':"
            )
        return WorkerError(f"the worker of {env_names(self.rows)} {how}")

    def _end(self, why: str, advice: str = "") -> WorkerTimeoutError:
        """Its late answer could reach nobody, so it is killed."""
        self.process.kill()
        return WorkerTimeoutError(
            f"the worker of {env_names(self.rows)} {why} and was ended{advice}"
        )


class WorkerPool:
    """Workers that are asked together and waited for together."""

    def __init__(self, start_method: StartMethod, answer_seconds: float | None) -> None:
        """A worker that is silent for ``answer_seconds`` is ended; None waits for ever."""
        self.start_method = start_method
        self.answer_seconds = answer_seconds
        self.workers: list[Worker] = []
        self.spin = Spin(NO_SPIN)
        self._owner = os.getpid()
        self._number = 0  # of the last request; all who are asked together get the same
        # At garbage collection; at exit before multiprocessing ends its daemonic children itself.
        self._finalizer = util.Finalize(self, end_workers, (self.workers,), exitpriority=10)

    def start(self, rows_of_workers: Sequence[list[int]]) -> list[Worker]:
        """Start workers and wait until they have imported all they need."""
        if multiprocessing.current_process().daemon:
            raise WorkerStartError(
                "this process is daemonic, and those may not start workers; use SerialEnv "
                "(vec_env=serial), or start this process with daemon=False"
            )
        if self.start_method != "fork" and sys.platform != "win32":
            # The first spawn would start it, and it would lift the block of signals on its way.
            resource_tracker.ensure_running()
        if self.start_method == "forkserver":
            # Before the block, too: its other children would inherit it.
            importlib.import_module("multiprocessing.forkserver").ensure_running()
        new: list[Worker] = []
        try:
            for rows in rows_of_workers:
                new.append(self._started(rows, f"{len(new) + 1} of {len(rows_of_workers)}"))
            seconds = self.answer_seconds
            self._collect(new, None if seconds is None else max(seconds, _START_SECONDS))
        except BaseException:
            end_workers(new, 0.0)
            raise
        return new

    def _started(self, rows: list[int], which: str) -> Worker:
        try:
            return Worker(rows, self.start_method)
        except OSError as error:  # no memory, too many processes or files
            raise WorkerStartError(
                f"worker {which} cannot be started: {error}; use fewer (n_workers), or SerialEnv "
                "(vec_env=serial)"
            ) from error

    def ask(
        self, workers: Sequence[Worker], method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Call a method of each worker's slice with arguments of its own; results in order."""
        self.request(workers, method, arguments)
        return self.results(workers)

    def request(
        self,
        workers: Sequence[Worker],
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        block: SharedBlock | None = None,
    ) -> None:
        self.settle(workers)
        payloads = [cloudpickle.dumps((method, each)) for each in arguments]
        number = self.next_number()
        for worker, payload in zip(workers, payloads, strict=True):
            worker.send(CALL, number, payload, self.answer_seconds)
            if block is not None:
                worker.send_block(block, self.answer_seconds)

    def is_own(self) -> bool:
        """False in a forked copy of the process that made the pool."""
        return os.getpid() == self._owner

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def settle(self, workers: Sequence[Worker]) -> None:
        """Wait for answers that an error or an interrupt has left under way, and drop them.

        Called before anything is written that these workers may still be reading.
        """
        for worker in workers:
            if worker.reply is None and worker.lost is None:
                self._collect(workers, self.answer_seconds, raise_first=False)

    def results(
        self,
        workers: Sequence[Worker],
        *,
        patience: float | None = None,
        raise_losses: bool = True,
    ) -> list[Any]:
        """What each worker answers, in their order; None from one that is lost.

        The first fault is raised at once, and so is a loss if ``raise_losses``. After
        ``patience`` comes ``WorkerTimeoutError``, and the results can be asked for again.
        """
        seconds = self.answer_seconds
        nothing_told = True
        for worker in workers:
            if worker.is_awaited and self.spin.until(worker.channel.has_hint):
                worker.receive(seconds)
            nothing_told &= worker.reply is not None and worker.reply[0] == DONE
        if nothing_told:
            return [None] * len(workers)
        self._collect(workers, seconds, patience=patience, raise_losses=raise_losses)
        results = []
        for worker in workers:
            kind, _, payload = worker.reply or (DONE, 0, b"")
            results.append(worker.unpickled(payload) if kind == RESULT else None)
        return results

    def _collect(
        self,
        workers: Sequence[Worker],
        seconds: float | None,
        *,
        patience: float | None = None,
        raise_first: bool = True,
        raise_losses: bool = True,
    ) -> None:
        """Wait until no worker is awaited any more; who is silent for ``seconds`` is ended."""
        start = time.monotonic()
        while True:
            if raise_first:
                _raise_first(workers, raise_losses)
            waiting = [worker for worker in workers if worker.is_awaited]
            if not waiting:
                return
            now = time.monotonic()
            longest = _LOOK_SECONDS
            if seconds is not None:
                longest = min(longest, waiting[0].asked_at + seconds - now)
            if patience is not None:
                longest = min(longest, start + patience - now)
            self._sleep(waiting, max(longest, 0.0), seconds)
            now = time.monotonic()
            for worker in waiting:
                if seconds is not None and worker.is_awaited and now > worker.asked_at + seconds:
                    worker.give_up(seconds)
            late = [row for worker in waiting if worker.is_awaited for row in worker.rows]
            if patience is not None and late and now >= start + patience:
                names = env_names(sorted(late))
                raise AnswerPendingError(
                    f"no answer of {names} within {patience} s; it may still come"
                )

    def _sleep(self, watched: Sequence[Worker], longest: float, seconds: float | None) -> None:
        """Wait for an answer of one of them, for a while."""
        for worker in watched:
            worker.channel.sleep(True)
        if all(worker.channel.has_hint() for worker in watched):
            longest = 0.0
        readable = ready([worker.channel.sock for worker in watched], longest)
        for worker in watched:
            worker.channel.sleep(False)
            if worker.channel.has_hint() or worker.channel.sock in readable:
                worker.receive(seconds)
            elif not readable:
                worker.look()

    def end(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the workers close their envs, for as many ``seconds``; then kill what is left."""
        end_workers(self.workers, seconds)
        self._finalizer.cancel()


def _raise_first(workers: Sequence[Worker], raise_losses: bool) -> None:
    lost = None
    for worker in workers:
        lost = lost or worker.lost
        fault = worker.fault()
        if fault is not None:
            raise fault
    if raise_losses and lost is not None:
        raise lost


def env_names(rows: Sequence[int]) -> str:
    """``env 3`` or ``envs 0-3, 8``."""
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row for row in rows if row + 1 not in rows]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"env{'s' if len(rows) > 1 else ''} {', '.join(runs)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# The parent's end of every line to a worker that is open in this process.
_parent_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def end_workers(workers: list[Worker], seconds: float = CLOSE_SECONDS) -> None:
    """Let them close their envs for so long, then kill; takes them off the list, never raises."""
    deadline = time.monotonic() + seconds
    closing = []
    for worker in workers:
        if not worker.is_own():
            continue  # in a forked copy of the parent
        if seconds > 0:
            worker.send(CLOSE, worker.number + 1, b"", 0.0)
        if seconds > 0 and worker.lost is None:
            closing.append(worker)
        else:
            worker.process.kill()
    # A worker that still has a large reply to give cannot hear before it is taken.
    while closing and (left := deadline - time.monotonic()) > 0:
        readable = ready([worker.channel.sock for worker in closing], min(left, _LOOK_SECONDS))
        closing = [
            worker
            for worker in closing
            if worker.process.is_alive()
            and (worker.channel.sock not in readable or worker.channel.discard())
        ]
    for worker in list(workers):
        if worker.is_own():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join(1.0)
        worker.channel.sock.close()
        workers.remove(worker)
        if worker.is_own() and worker.process.exitcode is not None:
            worker.process.close()  # its descriptors would else wait for a garbage collection


@contextlib.contextmanager
def _own_default(context: Any) -> Iterator[None]:
    """Hide a foreign start method, as joblib's loky, which a spawned process is told to adopt.

    Its name means nothing to a process that has not imported what brought it.
    """
    defaults: Any = multiprocessing.context._default_context
    before = defaults._actual_context
    if before is None or before.get_start_method() in multiprocessing.get_all_start_methods():
        yield
        return
    defaults._actual_context = context
    try:
        yield
    finally:
        defaults._actual_context = before


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Children started inside inherit the block, so that no signal hits them half started."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
