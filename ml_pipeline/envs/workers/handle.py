"""WorkerHandle: one worker process, seen from the process that started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

from ml_pipeline.envs.workers.channel import CLOSE, FAULT, Channel, Message, ready
from ml_pipeline.envs.workers.errors import (
    WorkerError,
    WorkerTimeoutError,
    env_names,
    error_from,
)
from ml_pipeline.envs.workers.shared_arrays import SharedBlock
from ml_pipeline.envs.workers.worker import worker_main
from ml_pipeline.signals import STOP_SIGNALS

StartMethod = Literal["spawn", "fork", "forkserver"]

CLOSE_SECONDS = 2.0  # a worker that needs longer to close its envs is killed
CHECK_SECONDS = 0.1  # how often a waiting parent checks that its workers are alive

# The parent's ends of all sockets to workers that are open in this process.
_parent_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class WorkerHandle:
    """Starts a process; holds its connection, its last reply, and why it was lost."""

    def __init__(self, rows: list[int], start_method: StartMethod) -> None:
        self.rows = rows  # indices of the envs that it runs
        self.reply: Message | None = None  # to the last request; None until it arrives
        self.lost: WorkerError | None = None  # why no reply will ever come
        self.number = 0  # of the last request
        self.asked_at = time.monotonic()
        self._owner = os.getpid()
        self._has_started = False
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, "parent")
        # A forked child inherits every socket that is open here now.
        inherited = [*_parent_ends, ours] if start_method == "fork" else []
        parent = None if start_method == "forkserver" else os.getpid()
        by_kernel = threading.current_thread() is threading.main_thread()
        context: Any = multiprocessing.get_context(start_method)
        self.process = context.Process(
            target=worker_main,
            args=(theirs, inherited, parent, by_kernel),
            name=f"env worker {rows[0]}",
            daemon=True,
        )
        try:
            with _stop_signals_blocked(), _foreign_start_method_hidden(context):
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
        """False in a forked copy of the process that started the worker."""
        return os.getpid() == self._owner

    def send(self, kind: bytes, number: int, payload: bytes, seconds: float | None) -> None:
        """Send a request; a worker that does not read it in time is lost."""
        if self.lost is None:
            self.number = number
            self.asked_at = time.monotonic()
            try:
                self.channel.send(kind, number, payload, seconds)
            except TimeoutError:
                self.lost = self._killed(f"has not taken a request within {seconds} s")
            except OSError:  # the connection is closed
                self.lost = self._death()
            except BaseException:
                if payload:  # a message without one is sent whole or not at all
                    self.lost = self._killed("was interrupted while it took a request")
                raise
        # Only now: if an interrupt came earlier, the request may never be answered.
        self.reply = None

    def send_block(self, block: SharedBlock, seconds: float | None) -> None:
        """Send a descriptor, directly after a ``bind`` request."""
        while self.lost is None:
            try:
                block.send_descriptor(self.channel.sock)
                return
            except BlockingIOError:  # the worker has not read the request yet
                if not ready([self.channel.sock], seconds, to_send=True):
                    self.lost = self._killed(f"has not taken a request within {seconds} s")
            except OSError:
                self.lost = self._death()

    def receive(self, seconds: float | None) -> None:
        """Read a reply that has begun to arrive; drops replies to older requests."""
        try:
            message = self.channel.receive(seconds)
            self._has_started = True
            if message is not None and message[1] == self.number:
                self.reply = message
        except (EOFError, ConnectionError):
            self.lost = self._death()
        except TimeoutError:
            self.lost = self._killed("stopped in the middle of an answer")
        except BaseException:
            if self.reply is None:
                self.lost = self._killed("was interrupted in the middle of an answer")
            raise

    def unpickled(self, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except Exception as error:  # a user's __setstate__ may raise anything
            message = f"a result of {env_names(self.rows)} cannot be unpickled here: "
            raise error_from(error, f"{message}{type(error).__name__}: {error}") from error

    def fault(self) -> WorkerError | None:
        """The error in the reply, if the reply is one."""
        if self.reply is None or self.reply[0] != FAULT:
            return None
        message, cause = pickle.loads(self.reply[2])
        try:
            return error_from(pickle.loads(cause) if cause else None, message)
        except Exception:  # a user's __setstate__ may raise anything; the message says enough
            return WorkerError(message)

    def check_alive(self) -> None:
        """Detect a dead worker even if a child process of an env keeps the connection open."""
        is_alive = self.process.is_alive()
        if not is_alive and not ready([self.channel.sock], 0.0):  # read its last reply first
            self.lost = self._death()

    def give_up(self, seconds: float | None) -> None:
        advice = "; raise step_timeout (vec_env.step_timeout_seconds) if its envs need longer"
        self.lost = self._killed(f"has not answered within {seconds} s", advice)

    def _death(self) -> WorkerError:
        self.process.join(1.0)
        code = self.process.exitcode
        how = "closed its connection"
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
        elif code is not None:
            how = f"ended with exit code {code}"
        self.process.kill()
        if not self._has_started:
            how += (
                " while it started; if it printed no error: a script that starts workers must "
                "do so under if __name__ == '__main__':"
            )
        return WorkerError(f"the worker of {env_names(self.rows)} {how}{self._in_env()}")

    def _killed(self, why: str, advice: str = "") -> WorkerTimeoutError:
        """Kill the worker: a late answer would be useless."""
        self.process.kill()
        return WorkerTimeoutError(
            f"the worker of {env_names(self.rows)} {why} and was killed{self._in_env()}{advice}"
        )

    def _in_env(self) -> str:
        env = self.channel.running_env()
        return "" if env is None else f" while it ran env {env}"


def end_workers(workers: list[WorkerHandle], seconds: float = CLOSE_SECONDS) -> None:
    """Let workers close their envs, kill those that need longer, and empty the list.

    Never raises. With ``seconds=0`` all are killed at once.
    """
    deadline = time.monotonic() + seconds
    closing = []
    for worker in workers:
        if not worker.is_own():
            continue
        if seconds > 0:
            worker.send(CLOSE, worker.number + 1, b"", 0.0)
        if seconds > 0 and worker.lost is None:
            closing.append(worker)
        else:
            worker.process.kill()
    # A worker that is sending a large reply reads CLOSE only after we have read the reply.
    while closing and (left := deadline - time.monotonic()) > 0:
        readable = ready([worker.channel.sock for worker in closing], min(left, CHECK_SECONDS))
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
            worker.process.close()  # frees its descriptors without a garbage collection


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextlib.contextmanager
def _foreign_start_method_hidden(context: Any) -> Iterator[None]:
    """Hide a default start method such as joblib's loky, which a spawned process would also use.

    That process would fail: it has not imported joblib, so it does not know the name.
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
    """Block stop signals; children started inside inherit the block until they are ready."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
