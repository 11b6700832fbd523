"""ParallelEnv and SerialEnv: many envs as one gymnasium ``VectorEnv``.

Both return the same trajectories bit for bit, for any number of workers and any start method.
Env i is seeded ``seed + i``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from gymnasium.vector import AutoresetMode

from ml_pipeline.envs.kinds import Info
from ml_pipeline.envs.workers.channel import BUSY
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.envs.workers.env_spaces import ObservationMode
from ml_pipeline.envs.workers.errors import (
    AnswerPendingError,
    WorkerError,
    WorkerStartError,
    WorkerTimeoutError,
)
from ml_pipeline.envs.workers.handle import StartMethod, end_workers
from ml_pipeline.envs.workers.pool import WorkerPool
from ml_pipeline.envs.workers.slice import EnvFn, EnvSlice, InfoMode, SliceOptions
from ml_pipeline.envs.workers.vector_env import SliceVectorEnv, picked
from ml_pipeline.envs.workers.worker_vector_env import Host, WorkerVectorEnv

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


class ParallelEnv(WorkerVectorEnv):
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
        super().__init__(
            env_fns,
            seed,
            SliceOptions(AutoresetMode(autoreset_mode), infos, check_finite),
            copy=copy,
            observation_mode=observation_mode,
            pool=WorkerPool(self.start_method, step_timeout),
            on_worker_death=on_worker_death,
            max_restarts=max_restarts,
        )
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

    def resize(self, n_envs: int) -> tuple[Any, Info]:
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


def _resident_mb(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):  # no /proc, or the worker has just died
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
