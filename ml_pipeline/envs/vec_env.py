"""ParallelEnv and SerialEnv: many envs behind one gymnasium ``VectorEnv``.

Both step ``EnvSlice``s over the same arrays, so trajectories are bit for bit the same whatever
the number of workers and however they were started. Env i is seeded ``seed + i``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ml_pipeline.envs.workers.channel import BUSY, LONG_SPIN, NO_SPIN, SHORT_SPIN, Spin
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.envs.workers.pool import (
    AnswerPendingError,
    StartMethod,
    Worker,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
    end_workers,
    env_names,
)
from ml_pipeline.envs.workers.shared_arrays import Layout, SharedBlock, copy_rows, put_objects
from ml_pipeline.envs.workers.slice import Seeds, SliceVectorEnv, picked, slice_options
from ml_pipeline.envs.workers.worker import (
    Description,
    EnvFn,
    EnvSlice,
    InfoMode,
    SliceReport,
    StepInfo,
    WorkerError,
)

__all__ = [
    "AnswerPendingError",
    "ParallelEnv",
    "SerialEnv",
    "WorkerError",
    "WorkerStartError",
    "WorkerTimeoutError",
]


class WorkerLoad(NamedTuple):
    """What one worker has done and holds."""

    rows: list[int]  # the envs that it runs
    pid: int
    busy_seconds: float  # spent in its envs so far
    rss_mb: float | None  # resident memory; None where the system does not tell


class SerialEnv(SliceVectorEnv):
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
        options = slice_options(autoreset_mode, infos, check_finite)
        super().__init__(env_fns, seed, options, copy=copy, pool=None)
        self._main = EnvSlice(options)
        try:
            self._adopt(self._main.build(self.env_fns, range(len(self.env_fns)), self._seeds))
            self._arrays = Layout(*self._spaces(), self.num_envs, 0).arrays()
            self._main.bind(self._arrays)
        except BaseException:
            self.close()
            raise


class ParallelEnv(SliceVectorEnv):
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
        options = slice_options(autoreset_mode, infos, check_finite)
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
                env_fns, seeds = picked(self.env_fns, rows), picked(self._seeds, rows)
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
        sizes = self._layout.n_envs, self._layout.n_workers
        arguments = [(*sizes, line, block.name, self._worker_spin) for line in lines]
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
            built = self._build(picked(homes, served), picked(shares, served))
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
                lost, self._workers[line] = self._workers[line], worker
                end_workers([lost], 0.0)
        return [(worker.rows, each) for worker, each in zip(self._workers, results, strict=True)]

    def _restarted(self, line: int, lost: Worker, pending: str) -> tuple[Worker, SliceReport]:
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

    def _revive(self, worker: Worker, line: int, pending: str) -> SliceReport:
        """Build and reset the envs of a new worker; what takes the place of the lost reply."""
        arrays, rows = self._arrays, worker.rows
        arrays.hints[line] = 0
        building = (self._pickled(rows), rows, picked(self._seeds, rows), self._options)
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
        if pending == "step":
            arrays.truncated[rows] = True
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                copy_rows(self._last_obs, arrays.final_obs, rows)
            else:
                copy_rows(self._last_obs, arrays.obs, rows)
                self._pool.ask([worker], "end_episodes", [()])
        told = {row: info for row, _, info in step_infos}
        infos: list[StepInfo] = [
            (row, {}, {**told.get(row, {}), "worker_restarted": True}) for row in rows
        ]
        return infos, [], [], casts


def _restart_seed(seed: int | None, n_restarts: int) -> int | None:
    """Not the seed of before: the same episode might end the same way."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, n_restarts]).generate_state(1)[0])


def _resident_mb(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):  # no /proc, or the worker has just died
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
