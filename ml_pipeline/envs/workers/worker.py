"""What runs inside a worker process: a slice of the envs, stepped on request.

``EnvSlice`` is also what the main process steps, in ``SerialEnv`` and with ``main_slice``, so
that all behave alike. Spawned workers import this module: torch here would cost each of them
half a gigabyte.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from multiprocessing import connection, parent_process
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot
from ml_pipeline.envs.workers.channel import BUSY, NO_SPIN, Channel, Spin
from ml_pipeline.envs.workers.shared_arrays import (
    EnvArrays,
    Layout,
    SharedBlock,
    is_finite,
    objects_of,
    put_objects,
    read_row,
    row_of,
    scalars_of,
    take_objects,
    write_value,
)
from ml_pipeline.errors import UserError

EnvFn = Callable[[], gym.Env[Any, Any]]
InfoMode = Literal["all", "final"]

# Kinds of a request: a step, any other method of the slice with its arguments, the end.
STEP, CALL, CLOSE = b"s", b"c", b"x"
# Kinds of a reply: ready to serve; done; done, with a pickled result; a pickled Fault.
READY, DONE, RESULT, FAULT = b"h", b"d", b"r", b"f"
PLAIN = STEP, DONE

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM} | (
    {signal.SIGHUP} if hasattr(signal, "SIGHUP") else set()
)

_FOLLOW_PARENT_SECONDS = 0.25  # how often a worker looks whether its parent lives


class WorkerError(UserError, RuntimeError):
    """An env raised, or the process that ran it died or fell silent.

    Where an env raised, the error can also be caught as the type that it raised, which is its
    ``__cause__``.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's would quote it


class SliceOptions(NamedTuple):
    """How a slice treats its envs; the same for all slices of a vector env."""

    autoreset_mode: AutoresetMode
    infos: InfoMode = "all"  # "final": of resets and ended episodes only
    check_finite: bool = False


class Description(NamedTuple):
    """What a vector env must know of an env before the first reset."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any  # gymnasium's EnvSpec, or None


# Infos of one env in one step, only sent where there is something to tell: the env's index, the
# last info of an episode that ended in this step (else empty), and the info that goes on from it.
# A plain tuple, and so is SliceReport: they are pickled in the middle of a step.
StepInfo = tuple[int, "dict[str, Any]", "dict[str, Any]"]

# What a step or reset of a slice has to tell beside the arrays: infos, the objects of the
# observations and of the final observations (see take_objects), and casts to be told once.
SliceReport = tuple[list[StepInfo], list[list[Any]], list[list[Any]], list[str]]


class EnvSlice:
    """Some envs of a vector env; reads and writes their rows of its arrays."""

    def __init__(self, options: SliceOptions, *, in_worker: bool = False) -> None:
        self.options = options
        self._in_worker = in_worker
        self._same_step = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._all_infos = options.infos == "all"
        self._check_finite = options.check_finite
        self.rows: list[int] = []
        self.envs: list[gym.Env[Any, Any]] = []
        self.seeds: list[int | None] = []  # what each env was last seeded with; named in errors
        self._ended: list[bool] = []
        self._casts: set[str] = set()
        self._casts_told: set[str] = set()
        self._arrays: Any = None  # EnvArrays, from the first bind on
        self._reward: memoryview[Any]
        self._terminated: memoryview[Any]
        self._truncated: memoryview[Any]
        self._sends_objects = False
        self._scalar_actions: Any = None
        self._obs_rows: list[Any] = []
        self._final_obs_rows: list[Any] = []

    def build(
        self, env_fns: Sequence[EnvFn], rows: Sequence[int], seeds: Sequence[int | None]
    ) -> list[Description]:
        """Add envs; ``bind`` must be called before the next step."""
        descriptions: list[Description] = []
        for env_fn, row, seed in zip(env_fns, rows, seeds, strict=True):
            self.rows.append(row)
            self.seeds.append(seed)
            self._ended.append(False)
            try:
                env = env_fn()
                if not isinstance(env, gym.Env):
                    raise TypeError(f"the factory made {type(env).__name__}, no gymnasium.Env")
                self.envs.append(env)
                spaces = env.observation_space, env.action_space
                if descriptions and spaces == descriptions[0][:2]:
                    spaces = descriptions[0][:2]  # the same objects are pickled once
                descriptions.append(Description(*spaces, env.metadata, env.render_mode, env.spec))
            except BaseException as error:
                self._raise_named(len(self.rows) - 1, error)
        return descriptions

    def drop(self, n_envs: int) -> None:
        """Close the envs from row ``n_envs`` on."""
        keep = sum(row < n_envs for row in self.rows)
        for offset in range(keep, len(self.envs)):
            self._close_env(offset)
        for each in (self.envs, self.rows, self.seeds, self._ended):
            del each[keep:]

    def bind(self, arrays: EnvArrays) -> None:
        """The arrays to use from now on; called once again whenever the envs change."""
        if self._arrays is not None:
            # Arrays are the parent's to copy; objects are in lists that each process has.
            kept = [row for row in self.rows if row < len(self._arrays.reward)]
            put_objects(arrays.obs, kept, take_objects(self._arrays.obs, kept))
        self._arrays = arrays
        self._obs_rows = [row_of(arrays.obs, row) for row in self.rows]
        self._final_obs_rows = [row_of(arrays.final_obs, row) for row in self.rows]
        self._sends_objects = any(objects_of(arrays.obs))
        self._scalar_actions = scalars_of(arrays.action, self.rows)
        # As memory views, which are faster than arrays for a single number.
        self._reward, self._terminated, self._truncated = (
            memoryview(each)  # type: ignore[arg-type]  # arrays are buffers
            for each in (arrays.reward, arrays.terminated, arrays.truncated)
        )

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: Sequence[bool],
    ) -> SliceReport | None:
        """Reset the envs whose ``mask`` is set; ``seeds`` and ``mask`` cover this slice only."""
        infos: list[StepInfo] = []
        offset = 0
        try:
            for offset, seed in enumerate(seeds):
                if mask[offset]:
                    self.seeds[offset] = self.seeds[offset] if seed is None else seed
                    self._reset_env(offset, infos, seed=seed, options=deepcopy(options))
        except BaseException as error:
            self._raise_named(offset, error)
        return self._outcome(infos)

    def put_actions(self, objects: list[list[Any]]) -> None:
        """The parts of the actions that are in no array, before a step."""
        put_objects(self._arrays.action, self.rows, objects)

    def step(self) -> SliceReport | None:
        """Step every env with its row of the actions; None where there is nothing to tell."""
        infos: list[StepInfo] = []
        rows, ended, obs_rows, reward_of = self.rows, self._ended, self._obs_rows, self._reward
        terminated_of, truncated_of = self._terminated, self._truncated
        offset = 0
        try:
            for offset, action in enumerate(self._actions()):
                if ended[offset]:
                    self._begin_episode(offset, infos)
                    continue
                obs, reward, terminated, truncated, info = self.envs[offset].step(action)
                row = rows[offset]
                reward_of[row] = reward if type(reward) is float else _number(reward)
                if terminated is False and truncated is False:
                    terminated_of[row] = truncated_of[row] = False
                    if info and self._all_infos:
                        infos.append((row, {}, dict(info)))
                else:
                    obs = self._note_flags(offset, terminated, truncated, obs, info, infos)
                write_value(obs_rows[offset], obs, self._casts)
                if self._check_finite:
                    self._require_finite(offset)
        except BaseException as error:
            self._raise_named(offset, error)
        return self._outcome(infos)

    def _actions(self) -> list[Any]:
        """What each env is given; in memory of its own, it may keep it."""
        if self._scalar_actions is not None:
            return list(self._scalar_actions)
        return [read_row(self._arrays.action, row) for row in self.rows]

    def _note_flags(
        self,
        offset: int,
        terminated: Any,
        truncated: Any,
        obs: Any,
        info: dict[str, Any],
        infos: list[StepInfo],
    ) -> Any:
        """Of a step that may have ended an episode; gives the observation to go on from."""
        row = self.rows[offset]
        self._terminated[row] = _flag(terminated, "terminated")
        self._truncated[row] = _flag(truncated, "truncated")
        if not (self._terminated[row] or self._truncated[row]):
            if info and self._all_infos:
                infos.append((row, {}, dict(info)))
        elif self._same_step:
            # Kept before the reset: an env may reuse the buffers of observation and info.
            write_value(self._final_obs_rows[offset], obs, self._casts)
            final_info = deepcopy(info) if info else {}
            obs, info = self.envs[offset].reset()
            if info or final_info:
                infos.append((row, final_info, dict(info)))
        else:
            self._ended[offset] = True
            if info:
                infos.append((row, {}, dict(info)))
        return obs

    def _begin_episode(self, offset: int, infos: list[StepInfo]) -> None:
        """What a step does to an env whose episode ended in the step before."""
        if self.options.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(
                "the episode has ended and autoreset is off; reset this env first, by "
                "options={'reset_mask': mask}"
            )
        self._reset_env(offset, infos)

    def _reset_env(self, offset: int, infos: list[StepInfo], **arguments: Any) -> None:
        row = self.rows[offset]
        obs, info = self.envs[offset].reset(**arguments)
        write_value(self._obs_rows[offset], obs, self._casts)
        self._ended[offset] = False
        self._reward[row] = 0.0
        self._terminated[row] = self._truncated[row] = False
        if self._check_finite:
            self._require_finite(offset)
        if info:
            infos.append((row, {}, dict(info)))

    def _require_finite(self, offset: int) -> None:
        row = self.rows[offset]
        if not math.isfinite(self._reward[row]):
            raise ValueError(f"the env gave a reward that is not finite: {self._reward[row]}")
        seen = [(self._arrays.obs, self._obs_rows)]
        if self._same_step and (self._terminated[row] or self._truncated[row]):
            seen.append((self._arrays.final_obs, self._final_obs_rows))
        for tree, rows in seen:
            if not is_finite(rows[offset]):
                obs = read_row(tree, row)
                raise ValueError(f"the env gave an observation that is not finite: {obs}")

    def _outcome(self, infos: list[StepInfo]) -> SliceReport | None:
        casts: list[str] = []
        if self._casts:
            casts = sorted(self._casts - self._casts_told)
            self._casts_told |= self._casts
            self._casts.clear()
        if self._sends_objects:
            arrays, rows = self._arrays, self.rows
            objects = take_objects(arrays.obs, rows), take_objects(arrays.final_obs, rows)
            return infos, *objects, casts
        return (infos, [], [], casts) if infos or casts else None

    def ping(self) -> None:
        """Answer."""

    def end_episodes(self) -> None:
        """Take every episode as ended; the next step begins a new one."""
        self._ended = [True] * len(self.envs)

    def snapshot(self) -> list[bytes]:
        """The state of each env between two steps."""
        taken = []
        for offset, env in enumerate(self.envs):
            try:
                taken.append(take_snapshot(env, read_row(self._arrays.obs, self.rows[offset])))
            except BaseException as error:
                self._raise_named(offset, error)
        return taken

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Go on from snapshots of envs of the same build."""
        for offset, snapshot in enumerate(snapshots):
            try:
                self.envs[offset], obs = restore_snapshot(self.envs[offset], snapshot)
                write_value(self._obs_rows[offset], obs, self._casts)
            except BaseException as error:
                self._raise_named(offset, error)
        self._ended = [False] * len(self.envs)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Each env's attribute ``name``, called if it can be."""
        results = []
        for offset, env in enumerate(self.envs):
            try:
                attribute = env.get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except BaseException as error:
                self._raise_named(offset, error)
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for offset, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            try:
                env.set_wrapper_attr(name, value)
            except BaseException as error:
                self._raise_named(offset, error)

    def close(self) -> None:
        """Close every env, whatever some of them raise; that is told, but stops nothing."""
        for offset in range(len(self.envs)):
            self._close_env(offset)

    def _close_env(self, offset: int) -> None:
        try:
            self.envs[offset].close()
        except (Exception, SystemExit) as error:
            with contextlib.suppress(RuntimeWarning):  # python -W error must not stop a close
                warnings.warn(str(self._blame(offset, error)), RuntimeWarning, stacklevel=3)

    def _raise_named(self, offset: int, error: BaseException) -> NoReturn:
        """Raise the error that names the env; outside workers an interrupt goes its way."""
        if not (self._in_worker or isinstance(error, (Exception, SystemExit))):
            raise error
        raise self._blame(offset, error) from error

    def _blame(self, offset: int, error: BaseException) -> WorkerError:
        trace = "".join(traceback.format_exception(error)).rstrip()
        who = f"env {self.rows[offset]} (seed {self.seeds[offset]})"
        return blamed(f"{who} raised:\n{trace}", error)


def blamed(message: str, cause: BaseException | None) -> WorkerError:
    """A ``WorkerError`` that is caught as the type of its cause, too, where Python allows it."""
    error = WorkerError(message)
    if isinstance(cause, Exception):
        members = {"__module__": __name__, "__reduce__": _reduce_blamed}
        with contextlib.suppress(TypeError):  # two layouts that do not fit together
            kind = type("WorkerError", (WorkerError, type(cause)), members)
            maker: Any = OSError if issubclass(kind, OSError) else kind
            error = maker.__new__(kind, message)
            error.__dict__.update(vars(cause))
    error.args = (message,)
    error.__cause__ = cause
    return error


def _reduce_blamed(error: WorkerError) -> Any:
    """Its class is made for the occasion, so that it is made anew where it is unpickled."""
    return blamed, (str(error), error.__cause__)


def _flag(value: Any, name: str) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, (bool, np.bool_)) or (np.ndim(value) == 0 and value in (0, 1)):
        return bool(value)
    raise TypeError(f"the env gave {name}={value!r}, no bool")


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if value is None or isinstance(value, str) or np.ndim(value) > 1 or np.size(value) != 1:
        raise TypeError(f"the env gave the reward {value!r} of {type(value)}, no number")
    return float(np.asarray(value).reshape(()))


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Go on."""


def worker_main(
    sock: socket.socket, inherited: Sequence[socket.socket], parent: int | None, at_once: bool
) -> None:
    """Serve one slice until told to close, or until the parent is gone.

    ``inherited`` are the parent's ends of lines that a forked worker must not keep open: its
    siblings would else never see that the parent has died. ``parent`` and ``at_once``: see
    ``_follow_parent``.
    """
    # Ctrl-C, a closed terminal, and the SIGTERM of timeout or SLURM go to all processes of a
    # group. They are the parent's to handle: this worker ends when its parent says so. A handler
    # and not SIG_IGN, which a program that an env starts would inherit.
    for number in STOP_SIGNALS:
        signal.signal(number, _leave_to_parent)
    if sys.platform != "win32":
        # The parent blocked them while this process started, so that none came too early.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for end in inherited:
        end.close()
    if parent is None:
        _leave_fork_server()
    _follow_parent(parent, at_once)
    try:
        _SliceServer(Channel(sock, "worker", plain=PLAIN)).serve()
    except (EOFError, ConnectionError):
        # The parent has gone or has given this worker up; there is nobody to tell.
        os._exit(1)


def _leave_fork_server() -> None:
    """Let go of the line by which a fork server counts its children: it would outlive its user."""
    module = sys.modules.get("multiprocessing.forkserver")
    server = getattr(module, "_forkserver", None)
    if server is not None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _SliceServer:
    """Answers each request with exactly one reply that bears its number."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slice: EnvSlice
        self._spin = Spin(NO_SPIN)
        self._busy = 0  # nanoseconds
        self._line = memoryview(bytearray(8 * (BUSY + 1))).cast("q")  # of the hints, once bound

    def serve(self) -> None:
        channel = self._channel
        channel.send(READY, 0)
        while True:
            kind, number, payload = channel.next(self._spin)
            start = time.perf_counter_ns()
            reply, result = self._answer(kind, payload)
            self._busy += time.perf_counter_ns() - start
            self._line[BUSY] = self._busy
            channel.send(reply, number, result)
            if kind == CLOSE:
                return

    def _answer(self, kind: bytes, payload: bytes) -> tuple[bytes, bytes]:
        try:
            result: Any = None
            if kind == STEP:
                if payload:
                    self._slice.put_actions(cloudpickle.loads(payload))
                result = self._slice.step()
            elif kind == CLOSE:
                if hasattr(self, "_slice"):
                    self._slice.close()
            else:
                method, arguments = cloudpickle.loads(payload)
                # Building and binding are the server's, all else the slice's.
                owner = self if method in ("build", "bind") else self._slice
                result = getattr(owner, method)(*arguments)
            # Only a step is asked of all workers at once, which a plain answer needs: see Channel.
            is_plain = kind == STEP and result is None
            return (DONE, b"") if is_plain else (RESULT, _pickled(result))
        except BaseException as error:
            return FAULT, _pack_fault(error)

    def build(
        self,
        payload: bytes,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        options: SliceOptions,
    ) -> list[Description]:
        if not hasattr(self, "_slice"):
            self._slice = EnvSlice(options, in_worker=True)
            _seed_global_generators(seeds[0])
        return self._slice.build(cloudpickle.loads(payload), rows, seeds)

    def bind(
        self, n_envs: int, n_workers: int, worker: int, block: str | None, spin_seconds: float
    ) -> None:
        env = self._slice.envs[0]  # its spaces are those of all: they may be large, to be sent
        layout = Layout(env.observation_space, env.action_space, n_envs, n_workers)
        memory = SharedBlock.receive(self._channel.sock, block, layout.n_bytes())
        arrays = layout.arrays_in(memory)
        memory.close()
        self._slice.bind(arrays)
        self._line = memoryview(arrays.hints[worker])
        self._channel.use_hints(arrays.hints, worker)
        self._spin = Spin(spin_seconds)


def _seed_global_generators(seed: int | None) -> None:
    """Those of this process, for envs that draw from them: forked siblings share one state."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:  # a lambda, or a class of the main script; cloudpickle is slower
        return bytes(cloudpickle.dumps(result))


def _pack_fault(error: BaseException) -> bytes:
    if isinstance(error, WorkerError):
        message, original = str(error), error.__cause__
    else:
        # Not an env's doing: the factory or a result could not be pickled.
        trace = "".join(traceback.format_exception(error)).rstrip()
        message, original = f"the worker failed:\n{trace}", error
    try:
        cause = cloudpickle.dumps(original)
        pickle.loads(cause)  # exceptions with odd constructors pickle, but do not come back
    except Exception:  # whatever a user's __reduce__ raises: the message still tells it all
        cause = b""
    return pickle.dumps((message, cause))


def _follow_parent(parent: int | None, at_once: bool) -> None:
    """End when the parent does, whatever the envs are doing.

    ``parent`` is its process id; None where another process, a fork server, stands between.
    ``at_once``: where the kernel can, let it kill this process, even one that is stopped or
    stuck in C code. It would do so when the thread that started this process ends, so only a
    main thread asks for it.
    """
    if at_once and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    parent = os.getppid() if parent is None else parent
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    process = parent_process()
    while os.getppid() == parent:
        # The sentinel is held open by forked siblings, too; so the id of the parent is looked at.
        if process is None:
            time.sleep(_FOLLOW_PARENT_SECONDS)
        elif connection.wait([process.sentinel], _FOLLOW_PARENT_SECONDS):
            break
    os._exit(1)
