"""What runs inside a worker process: a slice of the envs, stepped on request.

``EnvSlice`` is also what ``SerialEnv`` runs in the main process, so that both behave alike.
Spawned workers import this module: torch here would cost each of them half a gigabyte.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, SupportsFloat

import cloudpickle
import gymnasium as gym
from gymnasium.vector import AutoresetMode

from ml_pipeline.envs.shared_arrays import (
    EnvArrays,
    SharedBlock,
    read_row,
    shared_env_arrays,
    write_row,
)
from ml_pipeline.errors import UserError

EnvFn = Callable[[], gym.Env[Any, Any]]

# A request: a step or the end, which need nothing else, or CALL and a pickled (method, arguments).
STEP, CALL, CLOSE = b"s", b"c", b"x"
# First byte of a reply: done; done, with a pickled result; a pickled Fault.
DONE, RESULT, FAULT = b"d", b"r", b"f"


class WorkerError(UserError, RuntimeError):
    """An env raised, or the process that ran it died or fell silent."""


class Description(NamedTuple):
    """What a vector env must know of an env before the first reset."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any  # gymnasium's EnvSpec, or None


class StepInfo(NamedTuple):
    """Infos of one env in one step; only sent where there is something to tell."""

    env_index: int
    final_info: dict[str, Any] | None  # None: no episode ended
    info: dict[str, Any]


class Fault(NamedTuple):
    """A ``WorkerError`` on its way between processes."""

    message: str
    cause: bytes  # the original exception, pickled; empty where it cannot be


class EnvSlice:
    """Envs ``first .. first + len(env_fns)`` of a vector env; reads and writes their rows."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        first: int,
        seeds: Sequence[int | None],
        autoreset_mode: AutoresetMode,
    ) -> None:
        self.first = first
        self.seeds = list(seeds)  # what each env was last seeded with; named in errors
        self.autoreset_mode = autoreset_mode
        self.envs: list[gym.Env[Any, Any]] = []
        self._ended = [False] * len(env_fns)
        self._arrays: EnvArrays
        for offset, env_fn in enumerate(env_fns):
            try:
                self.envs.append(env_fn())
            except (Exception, SystemExit) as error:
                raise self._blame(offset, error) from error

    def describe(self) -> list[Description]:
        return [
            Description(
                env.observation_space, env.action_space, env.metadata, env.render_mode, env.spec
            )
            for env in self.envs
        ]

    def bind(self, arrays: EnvArrays) -> None:
        """Must be called once, before the first reset."""
        self._arrays = arrays

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None,
        mask: Sequence[bool],
    ) -> list[StepInfo]:
        """Reset the envs whose ``mask`` is set; ``seeds`` and ``mask`` cover this slice only."""
        infos = []
        for offset, env in enumerate(self.envs):
            if not mask[offset]:
                continue
            row = self.first + offset
            if seeds[offset] is not None:
                self.seeds[offset] = seeds[offset]
            try:
                obs, info = env.reset(seed=seeds[offset], options=options)
                write_row(self._arrays.obs, row, obs)
            except (Exception, SystemExit) as error:
                raise self._blame(offset, error) from error
            self._ended[offset] = False
            self._arrays.reward[row] = 0.0
            self._arrays.terminated[row] = False
            self._arrays.truncated[row] = False
            if info:
                infos.append(StepInfo(row, None, info))
        return infos

    def step(self) -> list[StepInfo]:
        """Step every env with its row of the actions."""
        infos = []
        for offset in range(len(self.envs)):
            try:
                step_info = self._step_env(offset)
            except (Exception, SystemExit) as error:
                raise self._blame(offset, error) from error
            if step_info.final_info is not None or step_info.info:
                infos.append(step_info)
        return infos

    def _step_env(self, offset: int) -> StepInfo:
        env, arrays, row = self.envs[offset], self._arrays, self.first + offset
        if self._ended[offset] and self.autoreset_mode is AutoresetMode.NEXT_STEP:
            obs, info = env.reset()
            reward: SupportsFloat = 0.0
            terminated = truncated = False
        elif self._ended[offset] and self.autoreset_mode is AutoresetMode.DISABLED:
            raise RuntimeError(
                "the episode has ended and autoreset is off; reset this env first, by "
                "options={'reset_mask': mask}"
            )
        else:
            obs, reward, terminated, truncated, info = env.step(read_row(arrays.action, row))
        final_info = None
        ended = bool(terminated or truncated)
        if ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            # Written before the reset: an env may reuse the buffer of its observation.
            write_row(arrays.final_obs, row, obs)
            final_info = info
            obs, info = env.reset()
        self._ended[offset] = ended and self.autoreset_mode is not AutoresetMode.SAME_STEP
        write_row(arrays.obs, row, obs)
        arrays.reward[row] = float(reward)
        arrays.terminated[row] = terminated
        arrays.truncated[row] = truncated
        return StepInfo(row, final_info, info)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Each env's attribute ``name``, called if it can be."""
        results = []
        for offset, env in enumerate(self.envs):
            try:
                attribute = env.get_wrapper_attr(name)
                results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
            except (Exception, SystemExit) as error:
                raise self._blame(offset, error) from error
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for offset, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            try:
                env.set_wrapper_attr(name, value)
            except (Exception, SystemExit) as error:
                raise self._blame(offset, error) from error

    def close(self) -> None:
        """Close every env, whatever some of them raise; that is told, but stops nothing."""
        for offset, env in enumerate(self.envs):
            try:
                env.close()
            except Exception as error:
                warnings.warn(str(self._blame(offset, error)), RuntimeWarning, stacklevel=2)

    def _blame(self, offset: int, error: BaseException) -> WorkerError:
        trace = "".join(traceback.format_exception(error)).rstrip()
        who = f"env {self.first + offset} (seed {self.seeds[offset]})"
        return WorkerError(f"{who} raised:\n{trace}")


def worker_main(requests: Connection, inherited: Sequence[Connection]) -> None:
    """Serve one slice until told to close, or until the parent is gone.

    ``inherited`` are the parent's ends of pipes that a forked worker must not keep open: its
    siblings would else never see that the parent has died.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform != "win32":
        # The parent blocked it while this process started, so that none came too early.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A terminal that closes tells everyone in it; this worker ends when its parent says so.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for end in inherited:
        end.close()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    server = _SliceServer(requests)
    try:
        while server.answer(requests.recv_bytes()):
            pass
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent has gone or has given this worker up; there is nobody to tell.
        os._exit(1)


class _SliceServer:
    """Answers each request with exactly one reply, so that none is taken for another's."""

    def __init__(self, requests: Connection) -> None:
        self._requests = requests
        self._slice: EnvSlice | None = None
        self._index = 0  # of the first env, for errors that no env is to blame for

    def answer(self, request: bytes) -> bool:
        """Do what ``request`` says and reply; False once there is nothing more to serve."""
        try:
            result: Any = None
            if request == STEP and self._slice is not None:
                result = self._slice.step()
            elif request == CLOSE and self._slice is not None:
                self._slice.close()
            elif request != CLOSE:
                method, arguments = cloudpickle.loads(request[1:])
                # Building and binding are the server's, all else the slice's.
                owner = self if method in ("build", "bind") else self._slice
                result = getattr(owner, method)(*arguments)
            reply = RESULT + cloudpickle.dumps(result) if result else DONE
        except Exception as error:
            reply = FAULT + _pack_fault(error, self._index)
        self._requests.send_bytes(reply)
        return request != CLOSE

    def build(
        self, payload: bytes, first: int, seeds: Sequence[int | None], mode: AutoresetMode
    ) -> list[Description]:
        self._index = first
        env_fns = cloudpickle.loads(payload)
        self._slice = EnvSlice(env_fns, first=first, seeds=seeds, autoreset_mode=mode)
        return self._slice.describe()

    def bind(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], n_envs: int
    ) -> None:
        block = SharedBlock.receive(self._requests)
        if self._slice is not None:
            arrays = shared_env_arrays(observation_space, action_space, n_envs, block)
            self._slice.bind(arrays)
        block.close()


def _pack_fault(error: Exception, first: int) -> bytes:
    if isinstance(error, WorkerError):
        message, original = str(error), error.__cause__
    else:
        # Not an env's doing: the factory or a result could not be pickled.
        trace = "".join(traceback.format_exception(error)).rstrip()
        message, original = f"the worker of env {first} and following failed:\n{trace}", error
    try:
        cause = cloudpickle.dumps(original)
        pickle.loads(cause)  # exceptions with odd constructors pickle, but do not come back
    except Exception:  # whatever a user's __reduce__ raises: the message still tells it all
        cause = b""
    return pickle.dumps(Fault(message, cause))


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
