"""WorkerVectorEnv: a SliceVectorEnv with workers; builds their envs and replaces lost workers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import cloudpickle
from gymnasium.vector import AutoresetMode

from ml_pipeline.envs.workers.channel import (
    LONG_SPIN,
    MEDIUM_SPIN,
    NO_SPIN,
    SHORT_SPIN,
    Board,
    Spin,
)
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.envs.workers.env_spaces import ObservationMode
from ml_pipeline.envs.workers.errors import WorkerError, env_names
from ml_pipeline.envs.workers.handle import WorkerHandle, end_workers
from ml_pipeline.envs.workers.pool import WorkerPool
from ml_pipeline.envs.workers.shared_arrays import SharedBlock
from ml_pipeline.envs.workers.slice import (
    Description,
    EnvFn,
    EnvSlice,
    SliceOptions,
    SliceReport,
    StepInfo,
)
from ml_pipeline.envs.workers.trees import copy_rows, put_objects
from ml_pipeline.envs.workers.vector_env import SliceVectorEnv, picked

# Where envs are built: in this process, in a worker, or (None) in a new worker.
Host = EnvSlice | WorkerHandle | None


class WorkerVectorEnv(SliceVectorEnv):
    """The part of ``ParallelEnv`` that does not depend on how envs are spread over workers."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        seed: int | None,
        options: SliceOptions,
        *,
        copy: bool,
        observation_mode: ObservationMode,
        pool: WorkerPool,
        on_worker_death: Literal["raise", "restart"],
        max_restarts: int,
    ) -> None:
        super().__init__(
            env_fns, seed, options, copy=copy, observation_mode=observation_mode, pool=pool
        )
        self.on_worker_death = on_worker_death
        self.max_restarts = max_restarts
        self.n_restarts = 0
        self._pool: WorkerPool = pool
        # The attributes that set_attr has set in each env, for restarted workers and new envs.
        self._attributes: list[dict[str, Any]] = [{} for _ in self.env_fns]

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
            copy_rows(arrays.obs, self._last_obs, range(self.num_envs))
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

    def _set_attributes(self, attributes: list[dict[str, Any]]) -> None:
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
        return self._with_rows(results)

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
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                copy_rows(self._last_obs, arrays.final_obs, rows)
            else:
                copy_rows(self._last_obs, arrays.obs, rows)
                self._pool.ask([worker], "end_episodes", [()])
        known = {row: info for row, _, _, info in reset_infos}
        infos: list[StepInfo] = [
            (row, None, {}, {**known.get(row, {}), "worker_restarted": True}) for row in rows
        ]
        return infos, [], [], casts
