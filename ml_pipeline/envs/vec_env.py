"""ParallelEnv and SerialEnv: many envs behind one gymnasium ``VectorEnv``, and the choice.

Both step ``EnvSlice``s over the same arrays, so trajectories are bit for bit the same whatever
the number of workers and however they were started. Env i is seeded ``seed + i``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ml_pipeline.envs.env_worker import (
    CALL,
    CLOSE,
    FAULT,
    RESULT,
    STEP,
    Description,
    EnvFn,
    EnvSlice,
    StepInfo,
    WorkerError,
    worker_main,
)
from ml_pipeline.envs.shared_arrays import (
    EnvArrays,
    SharedBlock,
    block_size,
    copy_tree,
    env_arrays,
    read_row,
    shared_env_arrays,
    write_all,
)

__all__ = ["ParallelEnv", "SerialEnv", "VecEnvChoice", "WorkerError", "available_cores", "choose"]

StartMethod = Literal["spawn", "fork", "forkserver"]
StepResult = tuple[
    Any, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]
]

_CLOSE_SECONDS = 2.0  # a worker that has not closed its envs by then is ended by force
# What one exchange with the workers costs beside the envs' own work; on 2 cores
# benchmarks/vec_env.py measured about 150 us.
_TURN_OVERHEAD_SECONDS = 150e-6


class _SliceVectorEnv(VectorEnv[Any, Any, Any]):
    """What SerialEnv and ParallelEnv share: seeds, arrays and infos; not how slices are run."""

    def __init__(self, seed: int | None, autoreset_mode: AutoresetMode, copy: bool) -> None:
        self._seed = seed  # used up by the first reset that brings no seed of its own
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.copy = copy
        self._arrays: EnvArrays
        self._stepping = False

    def _request(self, method: str, arguments_of_slices: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``method`` of every slice with its own arguments; results in slice order."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        raise NotImplementedError

    def _end_step(self, timeout: float | None) -> list[list[StepInfo] | None]:
        raise NotImplementedError

    def _slices(self) -> list[slice]:
        raise NotImplementedError

    def _adopt(self, descriptions: Sequence[Description]) -> None:
        """Take over spaces and metadata; all envs must agree on the spaces."""
        first = descriptions[0]
        for index, other in enumerate(descriptions):
            for name in ("observation_space", "action_space"):
                if getattr(other, name) != getattr(first, name):
                    raise WorkerError(
                        f"env {index} has {name} {getattr(other, name)}, "
                        f"but env 0 has {getattr(first, name)}; all envs must share one"
                    )
        self.num_envs = len(descriptions)
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.spec = first.spec

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those in ``options["reset_mask"]``; an int seeds env i seed + i."""
        self._check_idle("reset")
        if seed is None:
            seed, self._seed = self._seed, None
        seeds = _spread_seed(seed, self.num_envs)
        options = dict(options) if options is not None else None
        mask = np.ones(self.num_envs, dtype=np.bool_)
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self.num_envs)
        replies = self._request(
            "reset", [(seeds[rows], options, mask[rows].tolist()) for rows in self._slices()]
        )
        return self._hand_out(self._arrays.obs), self._merge_infos(replies)

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Let the envs start on ``actions``; they are checked before anything is sent."""
        self._check_idle("step_async")
        write_all(self._arrays.action, actions)
        self._begin_step()
        self._stepping = True

    def step_wait(self, timeout: float | None = None) -> StepResult:
        self._check_open()
        if not self._stepping:
            raise NoAsyncCallError("step_wait without a step_async before it", "step")
        self._stepping = False
        infos = self._merge_infos(self._end_step(timeout))
        arrays = self._arrays
        return (
            self._hand_out(arrays.obs),
            arrays.reward.copy(),
            arrays.terminated.copy(),
            arrays.truncated.copy(),
            infos,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Each env's attribute ``name``, called with the arguments if it is a method."""
        self._check_idle("call")
        replies = self._request("call", [(name, args, kwargs)] * len(self._slices()))
        return tuple(result for reply in replies for result in reply)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of every env; a list or tuple holds one value per env."""
        self._check_idle("set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values given for {self.num_envs} envs")
        self._request("set_attr", [(name, values[rows]) for rows in self._slices()])

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property  # type: ignore[misc]  # one per env and not to be set, as in Gymnasium's own
    def np_random(self) -> Any:
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        return self.get_attr("np_random_seed")

    def _hand_out(self, tree: Any) -> Any:
        return copy_tree(tree) if self.copy else tree

    def _merge_infos(self, replies: Sequence[list[StepInfo] | None]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for reply in replies:
            for index, final_info, info in reply or ():
                if final_info is not None:
                    final_obs = read_row(self._arrays.final_obs, index)
                    final = {"final_obs": final_obs, "final_info": final_info}
                    infos = self._add_info(infos, final, index)
                infos = self._add_info(infos, info, index)
        return infos

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed; make a new one")

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._stepping:
            raise AlreadyPendingCallError(
                f"{name} while a step is pending; step_wait first", "step"
            )


class SerialEnv(_SliceVectorEnv):
    """Envs stepped one after the other in this process: for cheap envs and for debugging."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        copy: bool = True,
    ) -> None:
        super().__init__(seed, autoreset_mode, copy)
        self._slice = EnvSlice(
            _checked_env_fns(env_fns),
            first=0,
            seeds=_spread_seed(seed, len(env_fns)),
            autoreset_mode=self.autoreset_mode,
        )
        self._adopt(self._slice.describe())
        spaces = self.single_observation_space, self.single_action_space
        self._arrays = env_arrays(*spaces, self.num_envs)
        self._slice.bind(self._arrays)

    def _slices(self) -> list[slice]:
        return [slice(0, self.num_envs)]

    def _request(self, method: str, arguments_of_slices: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self._slice, method)(*arguments_of_slices[0])]

    def _begin_step(self) -> None:
        """Nothing to start: the work is done by ``_end_step``."""

    def _end_step(self, timeout: float | None) -> list[list[StepInfo] | None]:
        return [self._slice.step()]

    def close_extras(self, **kwargs: Any) -> None:
        self._slice.close()


class ParallelEnv(_SliceVectorEnv):
    """Envs in worker processes, several in each, that answer through shared memory."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | None = None,
        n_workers: int | None = None,
        start_method: StartMethod | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        copy: bool = True,
        step_timeout: float | None = 300.0,
    ) -> None:
        """``n_workers`` None: one per core that this process may use; at most one per env.

        ``step_timeout``: seconds after which a silent worker is a ``WorkerError``, also while it
        starts; None waits, but still sees a death.
        """
        super().__init__(seed, autoreset_mode, copy)
        env_fns = _checked_env_fns(env_fns)
        if n_workers is not None and n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        self.n_workers = min(n_workers or available_cores(), len(env_fns))
        self.start_method: StartMethod = start_method or "spawn"
        self.step_timeout = step_timeout
        bounds = np.linspace(0, len(env_fns), self.n_workers + 1).astype(int).tolist()
        self._rows = [slice(a, b) for a, b in pairwise(bounds)]
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._replies_under_way = False
        self._finalizer = weakref.finalize(self, _end_workers, self._processes, self._connections)
        try:
            self._start_workers(env_fns, _spread_seed(seed, len(env_fns)))
        except BaseException:
            self.close()
            raise

    def _start_workers(self, env_fns: Sequence[EnvFn], seeds: Sequence[int | None]) -> None:
        payloads = [_pickled(env_fns, rows) for rows in self._rows]
        # Named always: a launcher may have left another start method behind as the default.
        context: Any = multiprocessing.get_context(self.start_method)
        if self.start_method != "fork" and sys.platform != "win32":
            # The first spawn would start it, and it would lift the block of SIGINT on its way.
            resource_tracker.ensure_running()
        for rows in self._rows:
            ours, theirs = context.Pipe()
            # A forked child holds a copy of every pipe end that is open here now.
            inherited = [*_parent_ends, ours] if self.start_method == "fork" else []
            process = context.Process(
                target=worker_main,
                args=(theirs, inherited),
                name=f"env worker {rows.start}-{rows.stop - 1}",
                daemon=True,
            )
            with _sigint_blocked():
                process.start()
            theirs.close()
            _parent_ends.add(ours)
            self._processes.append(process)
            self._connections.append(ours)
        # Not among the arguments of the process: a child that dies while it imports would leave
        # its parent writing a large factory into a pipe that nobody reads.
        replies = self._request(
            "build",
            [
                (payload, rows.start, seeds[rows], self.autoreset_mode)
                for payload, rows in zip(payloads, self._rows, strict=True)
            ],
        )
        self._adopt([description for reply in replies for description in reply])

        spaces = self.single_observation_space, self.single_action_space
        block = SharedBlock.create(block_size(*spaces, self.num_envs))
        try:
            self._arrays = shared_env_arrays(*spaces, self.num_envs, block)
            self._request("bind", [(*spaces, self.num_envs)] * self.n_workers, block)
        finally:
            block.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in the order of their envs."""
        return [process.pid or 0 for process in self._processes]

    def _slices(self) -> list[slice]:
        return self._rows

    def _request(
        self,
        method: str,
        arguments_of_slices: Sequence[tuple[Any, ...]],
        block: SharedBlock | None = None,
    ) -> list[Any]:
        messages = [CALL + cloudpickle.dumps((method, each)) for each in arguments_of_slices]
        self._open_exchange()
        for worker, message in enumerate(messages):
            self._send(worker, message, block)
        return self._gather(self.step_timeout)

    def _begin_step(self) -> None:
        self._open_exchange()
        for worker in range(self.n_workers):
            self._send(worker, STEP)

    def _end_step(self, timeout: float | None) -> list[list[StepInfo] | None]:
        return self._gather(self.step_timeout if timeout is None else timeout)

    def _open_exchange(self) -> None:
        """From here on replies are under way, until ``_gather`` has read the last of them."""
        if self._replies_under_way:
            raise WorkerError(
                "an earlier call was cut short by an interrupt, a death or a deadline, and its "
                "replies are lost; close this env and make a new one"
            )
        self._replies_under_way = True

    def _send(self, worker: int, message: bytes, block: SharedBlock | None = None) -> None:
        try:
            self._connections[worker].send_bytes(message)
            if block is not None:
                block.send(self._connections[worker], self.worker_pids[worker])
        except OSError:  # BrokenPipeError, ConnectionResetError
            raise self._death(worker) from None

    def _gather(self, timeout: float | None) -> list[Any]:
        """One reply of every worker, in their order.

        All replies are read before the first fault is raised, so that none is taken for the
        answer to a later request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        replies, faults = [], []
        for worker, connection in enumerate(self._connections):
            try:
                wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not connection.poll(wait):
                    raise self._silence(worker, timeout)
                reply = connection.recv_bytes()
            except (EOFError, OSError):
                raise self._death(worker) from None
            if reply[:1] == FAULT:
                faults.append(reply[1:])
            replies.append(pickle.loads(reply[1:]) if reply[:1] == RESULT else None)
        self._replies_under_way = False
        if faults:
            message, cause = pickle.loads(faults[0])
            raise WorkerError(message) from (pickle.loads(cause) if cause else None)
        return replies

    def _death(self, worker: int) -> WorkerError:
        self._processes[worker].join(1.0)
        code = self._processes[worker].exitcode
        how = "ended"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif code is not None:
            how = f"ended with exit code {code}"
        return WorkerError(f"the worker of {self._names(worker)} {how}")

    def _silence(self, worker: int, timeout: float | None) -> WorkerError:
        # Its late answer would be taken for the answer to a later request.
        self._processes[worker].kill()
        return WorkerError(
            f"the worker of {self._names(worker)} has not answered within {timeout} s and was "
            "ended; raise step_timeout (vec_env.step_timeout_seconds) if its envs may need longer"
        )

    def _names(self, worker: int) -> str:
        rows = self._rows[worker]
        if rows.stop - rows.start == 1:
            return f"env {rows.start}"
        return f"envs {rows.start}-{rows.stop - 1}"

    def close_extras(self, *, terminate: bool = False, **kwargs: Any) -> None:
        """End the workers; with ``terminate`` without giving the envs time to close."""
        if terminate:
            for process in self._processes:
                process.kill()
        self._finalizer()


# The parent's end of every pipe to a worker that is open in this process.
_parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


def _end_workers(processes: list[BaseProcess], connections: list[Connection]) -> None:
    """Ask politely, wait a moment, then kill; never raises over a worker that is gone."""
    for connection in connections:
        with contextlib.suppress(OSError):  # the worker is dead already
            connection.send_bytes(CLOSE)
    deadline = time.monotonic() + _CLOSE_SECONDS
    for process, connection in zip(processes, connections, strict=True):
        # A worker that still has a large reply to give cannot hear before it is taken.
        with contextlib.suppress(EOFError, OSError):
            while connection.poll(max(0.0, deadline - time.monotonic())):
                connection.recv_bytes()
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(1.0)
        connection.close()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Children started inside inherit the block, so Ctrl-C cannot hit them half started."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pickled(env_fns: Sequence[EnvFn], rows: slice) -> bytes:
    try:
        return bytes(cloudpickle.dumps(env_fns[rows]))
    except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
        raise WorkerError(
            f"the factories of envs {rows.start}-{rows.stop - 1} cannot be sent to a worker: "
            f"{type(error).__name__}: {error}; create what cannot be pickled inside the factory"
        ) from error


def _checked_env_fns(env_fns: Sequence[EnvFn]) -> list[EnvFn]:
    env_fns = list(env_fns)
    if not env_fns:
        raise ValueError("env_fns is empty; give at least one env factory")
    return env_fns


def _spread_seed(seed: int | Sequence[int | None] | None, n_envs: int) -> list[int | None]:
    if seed is None:
        return [None] * n_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(n_envs)]
    if len(seed) != n_envs:
        raise ValueError(f"{len(seed)} seeds given for {n_envs} envs")
    return list(seed)


def _checked_mask(mask: Any, n_envs: int) -> NDArray[np.bool_]:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {mask!r}")
    if mask.shape != (n_envs,) or not mask.any():
        raise ValueError(
            f"options['reset_mask'] must have shape ({n_envs},) and one True at least, got {mask}"
        )
    return mask


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class VecEnvChoice(NamedTuple):
    """What ``vec_env=auto`` picked, and the sentence that says why."""

    mode: Literal["serial", "parallel"]
    reason: str


def choose(env: gym.Env[Any, Any], *, n_envs: int, n_workers: int) -> VecEnvChoice:
    """Measure one env for a moment and pick what should step ``n_envs`` of them faster."""
    if n_envs == 1:
        return VecEnvChoice("serial", "one env needs no worker")
    if n_workers == 1:
        return VecEnvChoice("serial", "one worker would only add a detour")
    step_seconds = _measure_step(env)
    serial = n_envs * step_seconds
    parallel = -(-n_envs // n_workers) * step_seconds + _TURN_OVERHEAD_SECONDS
    figures = f"a turn would take {serial * 1e3:.2f} ms serial, {parallel * 1e3:.2f} ms in workers"
    return VecEnvChoice("parallel" if parallel < serial else "serial", figures)


def _measure_step(env: gym.Env[Any, Any], *, n_steps: int = 500, seconds: float = 0.1) -> float:
    """Median seconds of a step with random actions, after a few to warm up."""
    env.action_space.seed(0)
    env.reset(seed=0)
    durations: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(durations) < 5 or (len(durations) < n_steps and time.perf_counter() < deadline):
        action = env.action_space.sample()
        start = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(action)
        durations.append(time.perf_counter() - start)
        if terminated or truncated:
            env.reset()
    return float(np.median(durations))
