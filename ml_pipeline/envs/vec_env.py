"""ParallelEnv and SerialEnv: many envs as one gymnasium ``VectorEnv``.

Both return the same trajectories bit for bit, for any number of workers and any start method.
Env i is seeded ``seed + i``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from ml_pipeline.envs.kinds import Info
from ml_pipeline.envs.workers.channel import (
    BUSY,
    LONG_SPIN,
    MEDIUM_SPIN,
    NO_SPIN,
    SHORT_SPIN,
    Board,
    Spin,
)
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.envs.workers.env_spaces import ObservationMode
from ml_pipeline.envs.workers.errors import (
    AnswerPendingError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
    env_names,
)
from ml_pipeline.envs.workers.handle import StartMethod, WorkerHandle, end_workers
from ml_pipeline.envs.workers.lazy_infos import unpacked
from ml_pipeline.envs.workers.pool import WorkerPool
from ml_pipeline.envs.workers.shared_arrays import SharedBlock
from ml_pipeline.envs.workers.slice import (
    Description,
    EnvFn,
    EnvSlice,
    InfoMode,
    SliceOptions,
    SliceReport,
    StepInfo,
)
from ml_pipeline.envs.workers.trees import Tree, copy_rows, put_objects
from ml_pipeline.envs.workers.vector_env import SliceVectorEnv, picked

__all__ = [
    "AnswerPendingError",
    "HasWorkers",
    "ParallelEnv",
    "Resizable",
    "Restorable",
    "SerialEnv",
    "WorkerError",
    "WorkerLoad",
    "WorkerStartError",
    "WorkerTimeoutError",
]

# Where envs are built: in this process, in a worker, or (None) in a new worker.
Host = EnvSlice | WorkerHandle | None


class WorkerLoad(NamedTuple):
    """The envs of one worker, and the time and memory it has used so far."""

    rows: list[int]  # indices of its envs
    pid: int
    busy_seconds: float  # spent in its envs
    rss_mb: float | None  # resident memory; None if the system does not report it


@runtime_checkable
class Resizable(Protocol):
    """A vector env whose number of envs can change between two steps."""

    def resize(self, n_envs: int) -> tuple[Any, Info]:
        """The observations of all envs, and the infos of the new ones."""


@runtime_checkable
class Restorable(Protocol):
    """A vector env whose episodes can continue in another process."""

    def snapshot(self) -> list[bytes]:
        """The state of each env, between two steps."""

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Continue the episodes of ``snapshots``, one per env, without a reset."""


@runtime_checkable
class HasWorkers(Protocol):
    """A vector env with worker processes."""

    n_restarts: int  # workers that were replaced so far

    @property
    def n_workers(self) -> int: ...

    def worker_loads(self) -> list[WorkerLoad]:
        """One per worker, in the order of their envs."""


class SerialEnv(SliceVectorEnv):
    """Steps the envs one after the other in this process: for cheap envs and for debugging."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        *,
        seed: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        infos: InfoMode = "all",
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        check_finite: bool = False,
    ) -> None:
        """The arguments are those of ``ParallelEnv``."""
        options = SliceOptions(AutoresetMode(autoreset_mode), infos, check_finite)
        super().__init__(
            env_fns, seed, options, copy=copy, observation_mode=observation_mode, pool=None
        )
        self._main = EnvSlice(options)
        try:
            rows = range(len(self.env_fns))
            self._adopt(self._main.build(self.env_fns, rows, self._seeds.last))
            self._arrays = self._layout_for(self.num_envs, 0).arrays()
            self._main.bind(self._arrays)
        except BaseException:
            self.close()
            raise


class ParallelEnv(SliceVectorEnv):
    """Steps the envs in worker processes, several in each, which answer through shared memory."""

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
        observation_mode: ObservationMode = "same",
        check_finite: bool = False,
        step_timeout: float | None = 300.0,
        on_worker_death: Literal["raise", "restart"] = "raise",
        max_restarts: int = 10,
    ) -> None:
        """``env_fns`` are sent to the workers by cloudpickle; env i is seeded ``seed + i``.

        ``n_workers``: number of processes that step envs. None: one per core that this process
        may use, at most one per env. With ``main_slice`` this process is one of them, and
        there are at least two. It steps its own slice while the workers step theirs.
        ``start_method``: None means spawn, which is safe in programs with threads.
        ``infos``: "final" sends only those of resets and ended episodes, which is faster.
        ``copy``: False returns views of the observations, valid until the next step.
        ``observation_mode``: "different" accepts envs whose observation spaces differ in bounds
        and numbers of choices, but not in shapes and dtypes. A pair of spaces sets the batched and
        the single observation space.
        ``check_finite``: refuse NaN and infinity in observations, rewards and actions.
        ``step_timeout``: a worker that does not answer for this many seconds is killed, and the
        call raises ``WorkerTimeoutError``. This includes building the envs. None waits forever,
        but still detects a dead worker.
        ``on_worker_death``: "restart" replaces a dead or stuck worker, at most ``max_restarts``
        times. Its envs are built and reset, with the attributes that ``set_attr`` has set. In
        that step they are truncated and marked in ``infos["worker_restarted"]``.
        """
        if n_workers is not None and n_workers < 1:
            raise ValueError(f"n_workers must be at least 1, got {n_workers}")
        if on_worker_death not in ("raise", "restart"):
            raise ValueError(f"on_worker_death={on_worker_death!r}: must be 'raise' or 'restart'")
        self.start_method: StartMethod = start_method or "spawn"
        self.on_worker_death = on_worker_death
        self.max_restarts = max_restarts
        self.n_restarts = 0
        options = SliceOptions(AutoresetMode(autoreset_mode), infos, check_finite)
        pool = WorkerPool(self.start_method, step_timeout)
        super().__init__(
            env_fns, seed, options, copy=copy, observation_mode=observation_mode, pool=pool
        )
        self._pool: WorkerPool = pool
        self._last_obs: Tree = None  # the observations last returned, if workers can be restarted
        # The attributes that set_attr has set in each env, for restarted workers and new envs.
        self._attributes: list[dict[str, object]] = [{} for _ in self.env_fns]
        try:
            self._start(n_workers or available_cores(), main_slice)
        except BaseException:
            self.close(terminate=True)
            raise

    def _start(self, n_slices: int, main_slice: bool) -> None:
        n_envs = len(self.env_fns)
        self._n_slices = max(n_slices, 2) if main_slice else n_slices
        bounds = np.linspace(0, n_envs, min(self._n_slices, n_envs) + 1).astype(int).tolist()
        hosts: list[Host] = [None] * (len(bounds) - 1)
        if main_slice:
            hosts[0] = self._main = EnvSlice(self._options)
        shares = [list(range(a, b)) for a, b in pairwise(bounds)]
        self._adopt(self._build(hosts, shares))
        self._lay_out()

    def restore(self, snapshots: Sequence[bytes]) -> None:
        super().restore(snapshots)
        self._keep_last_obs()

    def _observations(self) -> Tree:
        self._keep_last_obs()
        return super()._observations()

    def _keep_last_obs(self) -> None:
        if self._last_obs is not None:
            copy_rows(self._arrays.obs, self._last_obs, range(self.num_envs))

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, in the order of their envs."""
        return [worker.process.pid or 0 for worker in self._workers]

    def worker_loads(self) -> list[WorkerLoad]:
        """One per worker, in the order of their envs."""
        self._check_open()
        return [
            WorkerLoad(list(worker.rows), pid, float(busy) * 1e-9, _resident_mb(pid))
            for worker, pid, busy in zip(
                self._workers, self.worker_pids, self._arrays.hints[:, BUSY], strict=True
            )
        ]

    def resize(self, n_envs: int) -> tuple[Tree, Info]:
        """Add or remove envs at the end; the others are not affected.

        New envs use the factories in turn, and the attributes that ``set_attr`` has set in the
        envs of these. They are seeded ``seed + i`` and reset. Workers without envs end; new ones
        start if fewer than ``n_workers`` run. Returns the observations of all envs and the infos
        of the resets.

        If a worker is already lost or a new env cannot be built, this raises and changes nothing.
        If a worker is lost later, this raises and closes the vector env.
        """
        self._check_idle("resize")
        if n_envs < 1:
            raise ValueError(f"n_envs must be at least 1, got {n_envs}")
        if isinstance(self.observation_mode, tuple):
            raise ValueError(
                "observation_mode: a given pair of spaces fixes the number of envs; "
                "use 'same' or 'different' to resize"
            )
        self._pool.ask(self._workers, "ping", [()] * len(self._workers))
        before = self.num_envs
        if n_envs > before:
            self._grow(n_envs)
        try:
            self._shrink(n_envs)
            self.num_envs = n_envs
            self._use_spaces()
            self._lay_out()
        except BaseException:
            self.close(terminate=True)
            raise
        if n_envs <= before:
            return self._observations(), {}
        is_new = np.arange(n_envs) >= before
        told = [dict(self._attributes[row % before]) for row in range(before, n_envs)]
        if any(told):
            self._set_attributes([{}] * before + told)
        return self.reset(seed=list(self._seeds.last), options={"reset_mask": is_new})

    def _shrink(self, n_envs: int) -> None:
        """Close the envs from ``n_envs`` on, and end workers that have no others."""
        if self._main is not None:
            self._main.drop(n_envs)
        ended = [worker for worker in self._workers if worker.rows[0] >= n_envs]
        self._workers[:] = [worker for worker in self._workers if worker not in ended]
        end_workers(ended)
        changed = [worker for worker in self._workers if worker.rows[-1] >= n_envs]
        for worker in changed:
            worker.rows = [row for row in worker.rows if row < n_envs]
        self._pool.ask(changed, "drop", [(n_envs,)] * len(changed))
        del self.env_fns[n_envs:], self._attributes[n_envs:]
        self._spaces.resize(n_envs)
        self._seeds.resize(n_envs)

    def _grow(self, n_envs: int) -> None:
        """Build the new envs, each where there are the fewest; first start missing workers."""
        before = self.num_envs
        rows = range(before, n_envs)
        self.env_fns += [self.env_fns[row % before] for row in rows]
        self._attributes += [{} for _ in rows]
        self._seeds.resize(n_envs)
        hosts: list[Host] = [*self._workers]
        if self._main is not None:
            hosts.insert(0, self._main)
        loads = [len(host.rows) for host in hosts if host is not None]
        hosts += [None] * min(max(self._n_slices - len(hosts), 0), len(rows))
        loads += [0] * (len(hosts) - len(loads))
        shares: list[list[int]] = [[] for _ in hosts]
        for row in rows:
            fewest = loads.index(min(loads))
            shares[fewest].append(row)
            loads[fewest] += 1
        used = [i for i, share in enumerate(shares) if share]
        try:
            built = self._build(picked(hosts, used), picked(shares, used))
            for description in built:
                self._spaces.add(description.observation_space, description.action_space)
        except BaseException:
            try:
                self._shrink(before)
            except WorkerError:
                self.close(terminate=True)
            raise

    def _build(self, hosts: Sequence[Host], shares: Sequence[list[int]]) -> list[Description]:
        """Build the envs of each share in its host."""
        payloads = [self._pickled(rows) for rows in shares]
        new = iter(self._pool.start([r for host, r in zip(hosts, shares, strict=True) if not host]))
        workers: list[WorkerHandle] = []
        arguments = []
        for host, rows, payload in zip(hosts, shares, payloads, strict=True):
            if isinstance(host, EnvSlice):
                continue
            if host is None:
                host = next(new)
                self._workers.append(host)
            else:
                host.rows = host.rows + rows
            workers.append(host)
            arguments.append((payload, rows, picked(self._seeds.last, rows), self._options))
        self._pool.request(workers, "build", arguments)
        descriptions: dict[int, Description] = {}
        for host, rows in zip(hosts, shares, strict=True):
            if isinstance(host, EnvSlice):
                env_fns, seeds = picked(self.env_fns, rows), picked(self._seeds.last, rows)
                descriptions.update(zip(rows, host.build(env_fns, rows, seeds), strict=True))
        for (_, rows, _, _), built in zip(arguments, self._pool.results(workers), strict=True):
            descriptions.update(zip(rows, built, strict=True))
        return [descriptions[row] for row in sorted(descriptions)]

    def _pickled(self, rows: list[int]) -> bytes:
        try:
            return bytes(cloudpickle.dumps([self.env_fns[row] for row in rows]))
        except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
            raise WorkerError(
                f"the factories of {env_names(rows)} cannot be sent to a worker: "
                f"{type(error).__name__}: {error}; create what cannot be pickled inside the factory"
            ) from error

    def _lay_out(self) -> None:
        """Make arrays for all envs and workers; envs that stay keep their observations."""
        layout = self._layout_for(self.num_envs, len(self._workers))
        block = SharedBlock.create(layout.n_bytes())
        arrays = layout.arrays_in(block)
        if self._block is not None:
            kept = range(min(len(self._arrays.reward), self.num_envs))
            copy_rows(self._arrays.obs, arrays.obs, kept)
            self._block.close()
        self._layout, self._block, self._arrays = layout, block, arrays
        self._pool.board = Board(arrays.hints) if self._workers else None
        if self.on_worker_death == "restart":
            self._last_obs = layout.arrays().obs
            self._keep_last_obs()
        # Never let more processes spin than there are cores. If the workers use all cores, the
        # parent takes one from them while it spins, and they one from it, so they spin less.
        n_spare = available_cores() - len(self._workers)
        self._worker_spin, parent_spin = NO_SPIN, NO_SPIN
        if n_spare > 0:
            self._worker_spin = parent_spin = LONG_SPIN
        elif n_spare == 0:
            self._worker_spin, parent_spin = MEDIUM_SPIN, SHORT_SPIN
        self._pool.spin = Spin(parent_spin)
        if self._main is not None:
            self._main.bind(arrays)
        self._bind(self._workers, range(len(self._workers)))

    def _bind(self, workers: Sequence[WorkerHandle], numbers: Sequence[int]) -> None:
        """Let workers use the arrays; worker number i uses row i of the hints."""
        block = self._block
        if block is None:
            raise RuntimeError("_bind was called before _lay_out")
        sizes = self._layout.n_envs, self._layout.n_workers
        arguments = [(*sizes, number, block.name, self._worker_spin) for number in numbers]
        self._pool.request(workers, "bind", arguments, block)
        for worker, number in zip(workers, numbers, strict=True):
            worker.channel.use_hints(self._arrays.hints, number)  # the worker answers there
        self._pool.results(workers)

    def _set_attributes(self, attributes: list[dict[str, object]]) -> None:
        super()._set_attributes(attributes)
        for known, new in zip(self._attributes, deepcopy(attributes), strict=True):
            for name in new:
                known.pop(name, None)  # so that the attributes stay in the order they were set
            known.update(new)

    def _workers_results(self, pending: str, timeout: float | None) -> list[tuple[list[int], Any]]:
        # A lost worker sets its attributes when the next reset or step restarts it.
        ignore_losses = self.on_worker_death == "restart" and pending != "call"
        results = self._pool.results(self._workers, timeout=timeout, raise_losses=not ignore_losses)
        if not results:
            return []
        if pending != "set_attr" and any(worker.lost for worker in self._workers):
            # Replace lost workers only after all restarts succeed; otherwise the next step retries.
            replacements: dict[int, WorkerHandle] = {}
            try:
                for number, lost in enumerate(self._workers):
                    if lost.lost is not None:
                        replacements[number], results[number] = self._restarted(
                            number, lost, pending
                        )
            except BaseException:
                end_workers(list(replacements.values()), 0.0)
                raise
            for number, worker in replacements.items():
                lost, self._workers[number] = self._workers[number], worker
                end_workers([lost], 0.0)
        return [(worker.rows, each) for worker, each in zip(self._workers, results, strict=True)]

    def _restarted(
        self, number: int, lost: WorkerHandle, pending: str
    ) -> tuple[WorkerHandle, SliceReport]:
        """A replacement and its report; tries again until ``max_restarts`` is reached."""
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
                return worker, self._revive(worker, number, pending)
            except BaseException as error:
                end_workers([worker], 0.0)
                if worker.lost is None or not isinstance(error, WorkerError):
                    raise  # an env raised, or an interrupt came
                cause = worker.lost

    def _revive(self, worker: WorkerHandle, number: int, pending: str) -> SliceReport:
        """Build and reset the envs of a new worker; returns a report in place of the lost one."""
        arrays, rows = self._arrays, worker.rows
        arrays.hints[number] = 0
        building = (self._pickled(rows), rows, picked(self._seeds.last, rows), self._options)
        self._pool.ask([worker], "build", [building])
        self._bind([worker], [number])
        self._pool.ask([worker], "set_attributes", [(picked(self._attributes, rows),)])
        seeds = self._seeds.after_restart(rows, self.n_restarts)
        options = None
        if pending == "reset":
            options, asked = self._reset_options, picked(self._reset_seeds, rows)
            seeds = [new if old is None else old for old, new in zip(asked, seeds, strict=True)]
        (report,) = self._pool.ask([worker], "reset", [(seeds, options, [True] * len(rows))])
        reset_infos, obs_objects, _, casts = report or ([], [], [], [])
        if obs_objects:
            put_objects(arrays.obs, rows, obs_objects)
        if pending == "step":
            arrays.truncated[rows] = True
            if self._same_step:
                copy_rows(self._last_obs, arrays.final_obs, rows)
            else:
                copy_rows(self._last_obs, arrays.obs, rows)
                self._pool.ask([worker], "end_episodes", [()])
        known = {row: unpacked(info) for row, _, _, info in reset_infos}
        infos: list[StepInfo] = [
            (row, None, {}, {**known.get(row, {}), "worker_restarted": True}) for row in rows
        ]
        return infos, [], [], casts


def _resident_mb(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):  # no /proc, or the worker has just died
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
