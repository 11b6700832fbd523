"""worker_main: the main function of a worker process, which serves one slice of the envs.

Spawned workers import this module: torch here would cost each of them half a gigabyte.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, parent_process
from types import FrameType
from typing import Any

import cloudpickle
import numpy as np

from ml_pipeline.envs.workers.channel import (
    BUSY,
    CLOSE,
    DONE,
    FAULT,
    NO_SPIN,
    READY,
    RESULT,
    RUNNING,
    STEP,
    Channel,
    Spin,
)
from ml_pipeline.envs.workers.errors import WorkerError, error_from
from ml_pipeline.envs.workers.lazy_infos import unpacked
from ml_pipeline.envs.workers.shared_arrays import Layout, SharedBlock
from ml_pipeline.envs.workers.slice import Description, EnvSlice, SliceOptions
from ml_pipeline.signals import STOP_SIGNALS

_CHECK_PARENT_SECONDS = 0.25  # how often a worker checks that its parent is alive


def worker_main(
    sock: socket.socket, inherited: Sequence[socket.socket], parent: int | None, by_kernel: bool
) -> None:
    """Serve one slice until the parent sends CLOSE or dies.

    ``inherited``: the parent's ends of sockets that a forked worker must close. Otherwise its
    siblings would never notice that the parent died. ``parent`` and ``by_kernel``: see
    ``_die_with_parent``.
    """
    # Ctrl-C, a closed terminal, and SIGTERM from timeout or SLURM reach every process of a group.
    # The parent handles them and ends this worker. Not SIG_IGN, because a program that an env
    # starts would inherit it.
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)
    if sys.platform != "win32":
        # The parent blocked them while this process started.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for end in inherited:
        end.close()
    if parent is None:
        _detach_from_fork_server()
    _die_with_parent(parent, by_kernel)
    try:
        _SliceServer(Channel(sock, "worker")).serve()
    except (EOFError, ConnectionError):
        os._exit(1)  # the parent has ended, so no process would read an error
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    if not all(thread.daemon for thread in others):
        # Python would wait for a thread that an env has left running.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


def _detach_from_fork_server() -> None:
    """Close the fork server's alive descriptor; otherwise the server outlives the main process."""
    module = sys.modules.get("multiprocessing.forkserver")
    server = getattr(module, "_forkserver", None)
    if server is not None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _SliceServer:
    """Answers each request with exactly one reply that has the request's number."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slice: EnvSlice | None = None
        self._spin = Spin(NO_SPIN)
        self._busy = 0  # nanoseconds
        self._hints = memoryview(bytearray(8 * (RUNNING + 1))).cast("q")  # replaced by bind

    def serve(self) -> None:
        channel = self._channel
        channel.send(READY, 0)
        while True:
            kind, number, payload = channel.next(self._spin)
            start = time.perf_counter_ns()
            reply, result = self._answer(kind, payload)
            self._busy += time.perf_counter_ns() - start
            self._hints[BUSY], self._hints[RUNNING] = self._busy, 0
            channel.send(reply, number, result)
            if kind == CLOSE:
                return

    def _answer(self, kind: bytes, payload: bytes) -> tuple[bytes, bytes]:
        try:
            result: object = None
            if kind == STEP:
                envs: Any = self._slice
                result = envs.step(cloudpickle.loads(payload)) if payload else envs.step()
            elif kind == CLOSE:
                if self._slice is not None:
                    self._slice.close()
            else:
                method, arguments = cloudpickle.loads(payload)
                owner = self if method in ("build", "bind", "run") else self._slice
                result = getattr(owner, method)(*arguments)
            # A plain reply is possible only if all workers got the request, as in a step.
            is_plain = kind == STEP and result is None
            return (DONE, b"") if is_plain else (RESULT, _pickled(result, self._slice))
        except BaseException as error:
            return FAULT, _pickled_fault(error)

    def build(
        self,
        payload: bytes,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        options: SliceOptions,
    ) -> list[Description]:
        if self._slice is None:
            self._slice = EnvSlice(options, in_worker=True)
            _seed_global_generators(seeds[0])
        return self._slice.build(cloudpickle.loads(payload), rows, seeds)

    def run(self, work: Callable[[], object]) -> object:
        """Call a function that needs no slice: see ``call_in_worker``."""
        return work()

    def bind(
        self, n_envs: int, n_workers: int, worker: int, block: str | None, spin_seconds: float
    ) -> None:
        if self._slice is None:
            raise RuntimeError("bind was called before build")
        env = self._slice.envs[0]  # its spaces give the same layout as those of any other
        layout = Layout(env.observation_space, env.action_space, n_envs, n_workers)
        memory = SharedBlock.receive(self._channel.sock, block, layout.n_bytes())
        arrays = layout.arrays_in(memory)
        memory.close()
        self._hints = arrays.hints[worker].data
        self._slice.bind(arrays, self._hints[RUNNING : RUNNING + 1])
        self._channel.use_hints(arrays.hints, worker)
        self._spin = Spin(spin_seconds)


def _pickled(result: object, envs: EnvSlice | None) -> bytes:
    """Raises a ``WorkerError`` that names the env whose part of ``result`` cannot be pickled."""
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:  # a lambda, or a class of the main script; cloudpickle is slower
        try:
            return bytes(cloudpickle.dumps(result))
        except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
            if envs is not None:
                _raise_for_part(result, envs)
            raise error


def _raise_for_part(result: object, envs: EnvSlice) -> None:
    for row, what, part in _parts(result, envs.rows):
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise error_from(
                error,
                f"{envs.name_of(row)}: {what} cannot be sent from a worker: "
                f"{type(error).__name__}: {error}; leave it out, or use SerialEnv "
                "(vec_env=serial)",
            ) from error


def _parts(result: object, rows: list[int]) -> Iterator[tuple[int, str, object]]:
    """Index of the env, what it is, and the part of the result itself."""
    if isinstance(result, tuple):  # a SliceReport
        infos, obs, final_obs, _ = result
        for row, last, final_info, info in infos:
            yield row, "its observation", last
            for name, value in [*final_info.items(), *unpacked(info).items()]:
                yield row, f"info[{name!r}]", value
        for objects in [*obs, *final_obs]:
            for row, value in zip(rows, objects, strict=True):
                yield row, "its observation", value
    elif isinstance(result, list):  # of a call, or of the envs just built
        for row, value in zip(rows[-len(result) :], result, strict=True):
            yield row, "its result", value


def _pickled_fault(error: BaseException) -> bytes:
    if isinstance(error, WorkerError):
        message, original = str(error), error.__cause__
    else:
        # No env raised this: a factory or a result could not be pickled or unpickled.
        trace = "".join(traceback.format_exception(error)).rstrip()
        message, original = f"the worker failed:\n{trace}", error
    try:
        cause = cloudpickle.dumps(original)
        pickle.loads(cause)  # some exceptions can be pickled, but not unpickled
    except Exception:  # a user's __reduce__ may raise anything; the message says enough
        cause = b""
    return pickle.dumps((message, cause))


def _seed_global_generators(seed: int | None) -> None:
    """For envs that use the global generators; forked workers would all have the same state."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)


def _die_with_parent(parent: int | None, by_kernel: bool) -> None:
    """End this process when the parent ends, even in the middle of a step.

    ``parent``: its process id, or None if a fork server started this process.
    ``by_kernel``: ask the Linux kernel to kill this process, even if it is stopped or stuck in C
    code. The kernel does so when the thread that started it ends, so only for a main thread.
    """
    if by_kernel and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = os.getppid() if parent is None else parent
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    process = parent_process()
    # Other forked workers also keep the sentinel open, so check the parent's id as well.
    while os.getppid() == parent:
        if process is None:
            time.sleep(_CHECK_PARENT_SECONDS)
        elif connection.wait([process.sentinel], _CHECK_PARENT_SECONDS):
            break
    os._exit(1)
