"""ParallelEnv and SerialEnv: many envs behind one gymnasium ``VectorEnv``.

Both step ``EnvSlice``s over the same arrays, so trajectories are bit for bit the same whatever
the number of workers and however they were started. Env i is seeded ``seed + i``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ml_pipeline.envs.channel import BUSY, LONG_SPIN, NO_SPIN, SHORT_SPIN, Spin
from ml_pipeline.envs.cores import available_cores
from ml_pipeline.envs.env_worker import (
    STEP,
    Description,
    EnvFn,
    EnvSlice,
    InfoMode,
    Outcome,
    SliceOptions,
    StepInfo,
    WorkerError,
)
from ml_pipeline.envs.shared_arrays import (
    EnvArrays,
    Layout,
    SharedBlock,
    choices_of,
    copy_rows,
    hand_out,
    is_finite,
    objects_of,
    put_objects,
    read_row,
    take_objects,
    write_all,
)
from ml_pipeline.envs.worker_pool import (
    CLOSE_SECONDS,
    AnswerPendingError,
    StartMethod,
    Worker,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
    end_workers,
    env_names,
)

__all__ = [
    "AnswerPendingError",
    "ParallelEnv",
    "SerialEnv",
    "WorkerError",
    "WorkerStartError",
    "WorkerTimeoutError",
]

Seeds = list[int | None]
StepResult = tuple[
    Any, "NDArray[np.float64]", "NDArray[np.bool_]", "NDArray[np.bool_]", dict[str, Any]
]

_ResetRequest = tuple[Seeds, "dict[str, Any] | None", list[bool]]  # seeds, options, mask

_RESERVED = ("reset", "step", "close")  # not to be had by ``call``: the arrays would not know


class WorkerLoad(NamedTuple):
    """What one worker has done and holds."""

    rows: list[int]  # the envs that it runs
    pid: int
    busy_seconds: float  # spent in its envs so far
    rss_mb: float | None  # resident memory; None where the system does not tell


class _SliceVectorEnv(VectorEnv[Any, Any, Any]):
    """A slice of the envs in this process, the others in workers; either may be absent."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        seed: int | None,
        options: SliceOptions,
        *,
        copy: bool,
        pool: WorkerPool | None,
    ) -> None:
        self.env_fns = list(env_fns)
        if not self.env_fns:
            raise ValueError("env_fns is empty; give at least one env factory")
        self.autoreset_mode = options.autoreset_mode
        self.copy = copy
        self._options = options
        self._first_seed = None if seed is None else int(seed)  # of env 0; env i has this + i
        self._seeds = _spread_seed(seed, len(self.env_fns))  # what each env was last seeded with
        self._unused_seeds = list(self._seeds)  # by a first reset that brings no seed of its own
        self._main: EnvSlice | None = None
        self._pool = pool
        self._workers: list[Worker] = pool.workers if pool is not None else []
        self._block: SharedBlock | None = None
        self._arrays: EnvArrays
        self._pending: str | None = None  # reset, step or call, between its async and its wait
        self._main_result: list[Any] | None = None  # what the slice here has done of it
        self._main_request: tuple[str, tuple[Any, ...]] = ("step", ())
        self._cut_short = False
        self._reset_request: _ResetRequest = (self._seeds, None, [True] * len(self._seeds))
        self._casts_told: set[str] = set()
        self._last_obs: Any = None  # where workers are restarted: what was last handed out

    def _adopt(self, descriptions: Sequence[Description]) -> None:
        """Take over spaces and metadata; all envs must agree on the spaces."""
        first = descriptions[0]
        self.num_envs = len(descriptions)
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        for index, description in enumerate(descriptions):
            self._check_spaces(description, index)
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self._choices = choices_of(first.action_space)
        self._sends_objects = any(objects_of(Layout(*self._spaces(), 1, 0).arrays().action))
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.spec = first.spec

    def _spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        return self.single_observation_space, self.single_action_space

    def _check_spaces(self, description: Description, index: int) -> None:
        for name in ("observation_space", "action_space"):
            theirs, ours = getattr(description, name), getattr(self, f"single_{name}")
            if theirs != ours:
                raise WorkerError(
                    f"env {index} has {name} {theirs}, "
                    f"but env 0 has {ours}; all envs must share one"
                )

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those in ``options["reset_mask"]``; an int seeds env i seed + i."""
        try:
            self.reset_async(seed=seed, options=options)
            return self.reset_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._check_idle("reset")
        options = dict(options) if options is not None else None
        mask = [True] * self.num_envs
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self.num_envs).tolist()
        seeds = self._unused_seeds if seed is None else _spread_seed(seed, self.num_envs)
        seeds = [each if chosen else None for each, chosen in zip(seeds, mask, strict=True)]
        self._begin(
            "reset", "reset", lambda rows: (_picked(seeds, rows), options, _picked(mask, rows))
        )
        self._reset_request = (seeds, options, mask)
        if isinstance(seed, (int, np.integer)) and all(mask):
            self._first_seed = int(seed)
        for index, new in enumerate(seeds):
            self._seeds[index] = self._seeds[index] if new is None else new
            self._unused_seeds[index] = None if mask[index] else self._unused_seeds[index]
        self._cut_short = self._cut_short and not all(mask)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        infos = self._merge(self._finish("reset", timeout))
        return self._hand_out(), infos

    def step(self, actions: Any) -> StepResult:
        try:
            self.step_async(actions)
            return self.step_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def step_async(self, actions: Any) -> None:
        """Let the envs start on ``actions``; they are checked before anything is sent."""
        if self._pending is not None or self._cut_short or self.closed:
            self._check_idle("step_async")
            raise WorkerError(
                "the last step was interrupted and what it brought is lost; reset all envs first"
            )
        if self._pool is not None:
            self._pool.settle(self._workers)
        action = self._arrays.action
        write_all(action, actions, self._choices)
        if self._options.check_finite and not is_finite(action):
            raise ValueError(f"the actions are not finite: {actions}")
        if self._pool is not None:
            payloads = [b""] * len(self._workers)
            if self._sends_objects:
                objects = [take_objects(action, worker.rows) for worker in self._workers]
                payloads = [cloudpickle.dumps(each) for each in objects]
            self._cut_short = True  # by whatever comes before all are asked
            number, seconds = self._pool.next_number(), self._pool.answer_seconds
            for worker, payload in zip(self._workers, payloads, strict=True):
                worker.send(STEP, number, payload, seconds)
            self._cut_short = False
        self._main_request = ("step", ())
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """``WorkerTimeoutError`` after ``timeout`` seconds; the step can still be waited for."""
        infos = self._merge(self._finish("step", timeout))
        arrays = self._arrays
        return (
            self._hand_out(),
            arrays.reward.copy(),
            arrays.terminated.copy(),
            arrays.truncated.copy(),
            infos,
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Each env's attribute ``name``, called with the arguments if it is a method."""
        try:
            self.call_async(name, *args, **kwargs)
            return self.call_wait()
        except BaseException as error:
            self._abandon(error)
            raise

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        self._check_idle("call")
        if name in _RESERVED:
            raise ValueError(f"call({name!r}) would pass by the vector env; use its own {name}")
        self._begin("call", "call", lambda rows: (name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        return tuple(self._per_env(self._finish("call", timeout)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | Any) -> None:
        """Set an attribute of every env; a list or tuple holds one value per env."""
        self._check_idle("set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"{len(values)} values given for {self.num_envs} envs")
        self._begin("call", "set_attr", lambda rows: (name, [values[i] for i in rows]))
        self._finish("call", None)

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    @property  # type: ignore[misc]  # one per env and not to be set, as in Gymnasium's own
    def np_random(self) -> Any:
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        return self.get_attr("np_random_seed")

    def close_extras(self, *, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs; a worker that takes longer than ``timeout`` (2 s) is ended.

        With ``terminate`` the workers are ended at once.
        """
        try:
            if self._pool is not None:
                seconds = CLOSE_SECONDS if timeout is None else timeout
                self._pool.end(0.0 if terminate else seconds)
        finally:
            if self._main is not None:
                self._main.close()
            if self._block is not None:
                self._block.close()

    # How requests are run: by the workers, and meanwhile by the slice of this process.

    def _begin(self, pending: str, method: str, arguments_of: Any) -> None:
        """Ask every slice for ``method``, with the arguments for its rows."""
        if self._pool is not None:
            arguments = [arguments_of(worker.rows) for worker in self._workers]
            self._pool.request(self._workers, method, arguments)
        if self._main is not None:
            self._main_request = (method, arguments_of(self._main.rows))
        self._pending = pending

    def _finish(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        """What the slices have brought, each with its rows."""
        self._check_open()
        if self._pending != pending:
            raise NoAsyncCallError(f"{pending}_wait without a {pending}_async before it", pending)
        try:
            results: list[tuple[list[int], Any]] = []
            if self._main is not None:
                if self._main_result is None:
                    method, arguments = self._main_request
                    self._main_result = [getattr(self._main, method)(*arguments)]
                results.append((self._main.rows, self._main_result[0]))
            results += self._workers_results(pending, timeout)
        except AnswerPendingError:
            raise  # it can be waited for again
        except BaseException as error:
            self._pending = self._main_result = None
            self._cut_short = not isinstance(error, WorkerError) and pending != "call"
            raise
        self._pending = self._main_result = None
        return results

    def _abandon(self, error: BaseException) -> None:
        """Nobody will wait any more for what an interrupt has left pending."""
        if not isinstance(error, Exception) and self._pending is not None:
            self._cut_short = self._cut_short or self._pending != "call"
            self._pending = self._main_result = None

    def _workers_results(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        if self._pool is None:
            return []
        results = self._pool.results(self._workers, patience=timeout)
        return [
            (worker.rows, result) for worker, result in zip(self._workers, results, strict=True)
        ]

    def _per_env(self, results: list[tuple[list[int], Any]]) -> list[Any]:
        """One item per env, in the order of the envs."""
        found: list[Any] = [None] * sum(len(rows) for rows, _ in results)
        for rows, items in results:
            for row, item in zip(rows, items, strict=True):
                found[row] = item
        return found

    def _merge(self, outcomes: list[tuple[list[int], Outcome | None]]) -> dict[str, Any]:
        """The infos of all envs as Gymnasium gives them."""
        arrays = self._arrays
        told: list[StepInfo] = []
        for rows, outcome in outcomes:
            if outcome is None:
                continue
            step_infos, obs_objects, final_obs_objects, casts = outcome
            told += step_infos
            if obs_objects:
                put_objects(arrays.obs, rows, obs_objects)
                put_objects(arrays.final_obs, rows, final_obs_objects)
            for cast in set(casts) - self._casts_told:
                self._casts_told.add(cast)
                warnings.warn(cast, UserWarning, stacklevel=4)
        if not told:
            return {}
        told.sort(key=itemgetter(0))
        infos = self._final_infos([each for each in told if each[1] is not None])
        for index, _, info in told:
            if info:
                infos = self._add_info(infos, info, index)
        return infos

    def _final_infos(self, ended: list[StepInfo]) -> dict[str, Any]:
        """What ``_add_info`` makes of final_obs and final_info, in one go: it is often needed."""
        if not ended:
            return {}
        final_obs = np.empty(self.num_envs, dtype=object)  # of None
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        final_info: dict[str, Any] = {}
        for index, info, _ in ended:
            mask[index] = True
            final_obs[index] = read_row(self._arrays.final_obs, index)
            if info:
                final_info = self._add_info(final_info, info, index)
        return {
            "final_obs": final_obs,
            "_final_obs": mask,
            "final_info": final_info,
            "_final_info": mask.copy(),
        }

    def _hand_out(self) -> Any:
        if self._last_obs is not None:
            copy_rows(self._arrays.obs, self._last_obs, range(self.num_envs))
        return hand_out(self._arrays.obs, copy=self.copy)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed; make a new one")

    def _check_idle(self, name: str) -> None:
        self._check_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"{name} while a {self._pending} is pending; {self._pending}_wait first",
                self._pending,
            )


class SerialEnv(_SliceVectorEnv):
    """Envs stepped one after the other in this process: for cheap envs and for debugging."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        infos: InfoMode = "all",
        copy: bool = True,
        check_finite: bool = False,
    ) -> None:
        """The keywords are those of ``ParallelEnv``."""
        options = _slice_options(autoreset_mode, infos, check_finite)
        super().__init__(env_fns, seed, options, copy=copy, pool=None)
        self._main = EnvSlice(options)
        try:
            self._adopt(self._main.build(self.env_fns, range(len(self.env_fns)), self._seeds))
            self._arrays = Layout(*self._spaces(), self.num_envs, 0).arrays()
            self._main.bind(self._arrays)
        except BaseException:
            self.close()
            raise


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
        infos: InfoMode = "all",
        main_slice: bool = False,
        copy: bool = True,
        check_finite: bool = False,
        step_timeout: float | None = 300.0,
        on_worker_death: Literal["raise", "restart"] = "raise",
        max_restarts: int = 10,
    ) -> None:
        """``env_fns`` are sent to the workers by cloudpickle; env i is seeded ``seed + i``.

        ``n_workers``: processes that step envs; None: one per core that this process may use,
        at most one per env. With ``main_slice`` this process is one of them, beside one worker
        at least: it steps a slice of its own while it waits.
        ``start_method``: None is spawn, which is safe beside threads.
        ``infos``: "final" sends those of resets and of ended episodes only, which is faster.
        ``copy``: False hands out views that are valid until the next step.
        ``check_finite``: refuse observations, rewards and actions that are nan or infinite.
        ``step_timeout``: seconds after which a silent worker is ended and a ``WorkerError``,
        also while it builds its envs; None waits, but still sees a death.
        ``on_worker_death``: "restart" replaces a dead or stuck worker, at most ``max_restarts``
        times; its envs are reset, and truncated in that step with ``infos["worker_restarted"]``.
        """
        if n_workers is not None and n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        if on_worker_death not in ("raise", "restart"):
            raise ValueError(f"on_worker_death is raise or restart, got {on_worker_death!r}")
        options = _slice_options(autoreset_mode, infos, check_finite)
        pool = WorkerPool(start_method or "spawn", step_timeout)
        super().__init__(env_fns, seed, options, copy=copy, pool=pool)
        self.start_method: StartMethod = pool.start_method
        self.on_worker_death = on_worker_death
        self.max_restarts = max_restarts
        self.n_restarts = 0
        self._pool: WorkerPool = pool
        try:
            self._start(n_workers or available_cores(), main_slice)
        except BaseException:
            self.close(terminate=True)
            raise

    def _start(self, n_slices: int, main_slice: bool) -> None:
        n_envs = len(self.env_fns)
        self._n_slices = max(n_slices, 2) if main_slice else n_slices
        bounds = np.linspace(0, n_envs, min(self._n_slices, n_envs) + 1).astype(int).tolist()
        homes: list[EnvSlice | Worker | None] = [None] * (len(bounds) - 1)
        if main_slice:
            homes[0] = self._main = EnvSlice(self._options)
        shares = [list(range(a, b)) for a, b in pairwise(bounds)]
        self._adopt(self._build(homes, shares))
        self._lay_out()

    def _build(
        self, homes: Sequence[EnvSlice | Worker | None], shares: Sequence[list[int]]
    ) -> list[Description]:
        """Make the envs of each share at home: here, in a worker, or (None) in a new worker."""
        payloads = [self._pickled(rows) for rows in shares]
        new = iter(self._pool.start([r for home, r in zip(homes, shares, strict=True) if not home]))
        workers: list[Worker] = []
        arguments = []
        for home, rows, payload in zip(homes, shares, payloads, strict=True):
            if isinstance(home, EnvSlice):
                continue
            if home is None:
                home = next(new)
                self._workers.append(home)
            else:
                home.rows = home.rows + rows
            workers.append(home)
            arguments.append((payload, rows, [self._seeds[row] for row in rows], self._options))
        self._pool.request(workers, "build", arguments)
        descriptions: dict[int, Description] = {}
        for home, rows in zip(homes, shares, strict=True):
            if isinstance(home, EnvSlice):
                env_fns, seeds = _picked(self.env_fns, rows), _picked(self._seeds, rows)
                descriptions.update(zip(rows, home.build(env_fns, rows, seeds), strict=True))
        for (_, rows, _, _), built in zip(arguments, self._pool.results(workers), strict=True):
            descriptions.update(zip(rows, built, strict=True))
        return [descriptions[row] for row in sorted(descriptions)]

    def _pickled(self, rows: list[int]) -> bytes:
        try:
            return bytes(cloudpickle.dumps([self.env_fns[row] for row in rows]))
        except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
            raise WorkerError(
                f"the factories of {env_names(rows)} cannot be sent to a worker: "
                f"{type(error).__name__}: {error}; create what cannot be pickled inside the factory"
            ) from error

    def _lay_out(self) -> None:
        """Arrays for all envs and workers; the rows of envs that were there before are kept."""
        layout = Layout(*self._spaces(), self.num_envs, len(self._workers))
        block = SharedBlock.create(layout.n_bytes())
        arrays = layout.arrays_in(block)
        if self._block is not None:
            kept = range(min(len(self._arrays.reward), self.num_envs))
            copy_rows(self._arrays.obs, arrays.obs, kept)
            self._block.close()
        self._layout, self._block, self._arrays = layout, block, arrays
        if self.on_worker_death == "restart":
            self._last_obs = layout.arrays().obs
            copy_rows(arrays.obs, self._last_obs, range(self.num_envs))
        # Never more spinners than cores: somebody always works. Where the workers fill all cores
        # the parent takes one from them as it spins, so it must not do so for long.
        n_spare = available_cores() - len(self._workers)
        self._worker_spin = LONG_SPIN if n_spare >= 0 else NO_SPIN
        self._pool.spin = Spin(LONG_SPIN if n_spare > 0 else min(SHORT_SPIN, self._worker_spin))
        if self._main is not None:
            self._main.bind(arrays)
        self._bind(self._workers, range(len(self._workers)))

    def _bind(self, workers: Sequence[Worker], lines: Sequence[int]) -> None:
        """Let workers use the arrays, each with its line of the hints."""
        block = self._block
        if block is None:
            raise RuntimeError("bound before laid out")
        arguments = [(self._layout, line, block.name, self._worker_spin) for line in lines]
        self._pool.request(workers, "bind", arguments, block)
        for worker, line in zip(workers, lines, strict=True):
            worker.channel.use_hints(self._arrays.hints, line)  # where it will answer
        self._pool.results(workers)

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in the order of their envs."""
        return [worker.process.pid or 0 for worker in self._workers]

    def worker_loads(self) -> list[WorkerLoad]:
        """What each worker has done and holds, in the order of their envs."""
        self._check_open()
        return [
            WorkerLoad(list(worker.rows), pid, float(busy) * 1e-9, _resident_mb(pid))
            for worker, pid, busy in zip(
                self._workers, self.worker_pids, self._arrays.hints[:, BUSY], strict=True
            )
        ]

    def resize(self, n_envs: int) -> tuple[Any, dict[str, Any]]:
        """Grow or shrink at the end; the envs that stay are not touched.

        New envs come from the factories in turn, are seeded ``seed + i`` and reset; workers
        without envs end, and new ones start where fewer run than asked for. Gives the
        observations of all envs, and the infos of the resets. An env that cannot be made, or a
        worker that is lost already, leaves all as it was; a worker that is lost on the way
        closes this env.
        """
        self._check_idle("resize")
        if n_envs < 1:
            raise ValueError(f"n_envs must be at least 1, got {n_envs}")
        self._pool.ask(self._workers, "ping", [()] * len(self._workers))
        before = self.num_envs
        if n_envs > before:
            self._grow(n_envs)
        try:
            self._drop(n_envs)
            self.num_envs = n_envs
            self.observation_space = batch_space(self.single_observation_space, n_envs)
            self.action_space = batch_space(self.single_action_space, n_envs)
            self._lay_out()
        except BaseException:
            self.close(terminate=True)
            raise
        if n_envs <= before:
            return self._hand_out(), {}
        is_new = np.arange(n_envs) >= before
        return self.reset(seed=list(self._seeds), options={"reset_mask": is_new})

    def _drop(self, n_envs: int) -> None:
        """Close the envs from ``n_envs`` on; workers without others end."""
        if self._main is not None:
            self._main.drop(n_envs)
        ended = [worker for worker in self._workers if worker.rows[0] >= n_envs]
        self._workers[:] = [worker for worker in self._workers if worker not in ended]
        end_workers(ended)
        changed = [worker for worker in self._workers if worker.rows[-1] >= n_envs]
        for worker in changed:
            worker.rows = [row for row in worker.rows if row < n_envs]
        self._pool.ask(changed, "drop", [(n_envs,)] * len(changed))
        del self.env_fns[n_envs:], self._seeds[n_envs:], self._unused_seeds[n_envs:]

    def _grow(self, n_envs: int) -> None:
        """Make the new envs in new workers as long as more were asked for, else where few are."""
        before, first = self.num_envs, self._first_seed
        rows = range(before, n_envs)
        self.env_fns += [self.env_fns[row % before] for row in rows]
        self._seeds += [None if first is None else first + row for row in rows]
        self._unused_seeds += [None] * len(rows)
        homes: list[EnvSlice | Worker | None] = [*self._workers]
        if self._main is not None:
            homes.insert(0, self._main)
        loads = [len(home.rows) for home in homes if home is not None]
        homes += [None] * min(max(self._n_slices - len(homes), 0), len(rows))
        loads += [0] * (len(homes) - len(loads))
        shares: list[list[int]] = [[] for _ in homes]
        for row in rows:
            fewest = loads.index(min(loads))
            shares[fewest].append(row)
            loads[fewest] += 1
        served = [i for i, share in enumerate(shares) if share]
        try:
            built = self._build(_picked(homes, served), _picked(shares, served))
            for description, row in zip(built, rows, strict=True):
                self._check_spaces(description, row)
        except BaseException:
            try:
                self._drop(before)
            except WorkerError:
                self.close(terminate=True)
            raise

    def _workers_results(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        restart = self.on_worker_death == "restart" and pending != "call"
        results = self._pool.results(self._workers, patience=timeout, raise_losses=not restart)
        if any(worker.lost for worker in self._workers):
            # None takes the place of a lost one before all are ready: the next try finds all.
            replacements: dict[int, Worker] = {}
            try:
                for line, lost in enumerate(self._workers):
                    if lost.lost is not None:
                        replacements[line], results[line] = self._restarted(line, lost, pending)
            except BaseException:
                end_workers(list(replacements.values()), 0.0)
                raise
            for line, worker in replacements.items():
                end_workers([self._workers[line]], 0.0)
                self._workers[line] = worker
        return [(worker.rows, each) for worker, each in zip(self._workers, results, strict=True)]

    def _restarted(self, line: int, lost: Worker, pending: str) -> tuple[Worker, Outcome]:
        """A replacement, tried again and again while the budget lasts, and its reply."""
        cause = lost.lost
        while True:
            if self.n_restarts >= self.max_restarts:
                raise WorkerError(
                    f"{cause}; all {self.max_restarts} restarts (max_restarts) are used up"
                ) from cause
            self.n_restarts += 1
            warnings.warn(
                f"{cause}; restart {self.n_restarts} of {self.max_restarts}",
                RuntimeWarning,
                stacklevel=6,
            )
            (worker,) = self._pool.start([lost.rows])
            try:
                return worker, self._revive(worker, line, pending)
            except BaseException as error:
                end_workers([worker], 0.0)
                if worker.lost is None or not isinstance(error, WorkerError):
                    raise  # an env has raised, and that is told as always
                cause = worker.lost

    def _revive(self, worker: Worker, line: int, pending: str) -> Outcome:
        """Build and reset the envs of a new worker; what takes the place of the lost reply."""
        arrays, rows = self._arrays, worker.rows
        arrays.hints[line] = 0
        building = (self._pickled(rows), rows, _picked(self._seeds, rows), self._options)
        self._pool.ask([worker], "build", [building])
        self._bind([worker], [line])
        seeds: Seeds = [_restart_seed(self._seeds[row], self.n_restarts) for row in rows]
        options = None
        if pending == "reset":
            asked, options, _ = self._reset_request
            seeds = [
                new if asked[row] is None else asked[row]
                for row, new in zip(rows, seeds, strict=True)
            ]
        (outcome,) = self._pool.ask([worker], "reset", [(seeds, options, [True] * len(rows))])
        step_infos, obs_objects, _, casts = outcome or ([], [], [], [])
        if obs_objects:
            put_objects(arrays.obs, rows, obs_objects)
        final_info: dict[str, Any] | None = None
        if pending == "step":
            arrays.truncated[rows] = True
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                copy_rows(self._last_obs, arrays.final_obs, rows)
                final_info = {}
            else:
                copy_rows(self._last_obs, arrays.obs, rows)
                self._pool.ask([worker], "end_episodes", [()])
        told = {row: info for row, _, info in step_infos}
        infos: list[StepInfo] = [
            (row, final_info, {**told.get(row, {}), "worker_restarted": True}) for row in rows
        ]
        return infos, [], [], casts


def _picked(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [items[index] for index in indices]


def _restart_seed(seed: int | None, n_restarts: int) -> int | None:
    """Not the seed of before: the same episode might end the same way."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, n_restarts]).generate_state(1)[0])


def _slice_options(
    autoreset_mode: AutoresetMode | str, infos: InfoMode, check_finite: bool
) -> SliceOptions:
    if infos not in ("all", "final"):
        raise ValueError(f"infos is all or final, got {infos!r}")
    return SliceOptions(AutoresetMode(autoreset_mode), infos, check_finite)


def _spread_seed(seed: int | Sequence[int | None] | None, n_envs: int) -> Seeds:
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


def _resident_mb(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):  # no /proc, or the worker has just died
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
