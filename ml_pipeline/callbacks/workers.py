"""WorkerReport: logs the load and memory of the env workers, and reports a straggler."""

from __future__ import annotations

import statistics

from ml_pipeline.envs.vec_env import HasWorkers, WorkerLoad
from ml_pipeline.envs.workers.errors import env_names
from ml_pipeline.records import Metrics
from ml_pipeline.runs.console import say
from ml_pipeline.training.contracts import Callback, RunningLoop

_PATIENCE = 3  # iterations; a single slow episode does not make a straggler


class WorkerReport(Callback):
    """Adds the load, memory and restarts of workers to the metrics if the envs run in workers.

    ``workers/busy`` is the share of the collection time that workers spend in their envs, on
    average. ``workers/rss_mb`` is the resident memory of the largest worker. ``workers/restarts``
    counts the workers that were lost and replaced so far.
    All workers wait for the slowest one. A straggler is busy ``straggler`` times as long as the
    median of the others, for several iterations in a row. It is reported once.
    """

    def __init__(self, straggler: float = 1.5) -> None:
        self.straggler = straggler
        self._last: dict[int, float] = {}  # pid -> busy seconds
        self._suspect: tuple[int, int] = (-1, 0)  # pid, iterations in a row
        self._named: set[int] = set()

    def on_train_start(self, loop: RunningLoop) -> None:
        self._last = {load.pid: load.busy_seconds for load in _worker_loads(loop)}

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        loads = _worker_loads(loop)
        if not loads:
            return
        busy = [load.busy_seconds - self._last.get(load.pid, 0.0) for load in loads]
        self._last = {load.pid: load.busy_seconds for load in loads}
        metrics["workers/busy"] = statistics.mean(busy) / metrics["time/collect_seconds"]
        resident = [load.rss_mb for load in loads if load.rss_mb is not None]
        if resident:
            metrics["workers/rss_mb"] = max(resident)
        metrics["workers/restarts"] = sum(
            env.unwrapped.n_restarts for env in loop.envs if isinstance(env.unwrapped, HasWorkers)
        )
        self._name_straggler(loads, busy)

    def _name_straggler(self, loads: list[WorkerLoad], busy: list[float]) -> None:
        if len(busy) < 2:
            return
        slowest = max(range(len(busy)), key=busy.__getitem__)
        others = statistics.median(busy[:slowest] + busy[slowest + 1 :])
        pid, times = self._suspect
        if busy[slowest] < self.straggler * others:
            self._suspect = (-1, 0)
            return
        self._suspect = (loads[slowest].pid, times + 1 if pid == loads[slowest].pid else 1)
        if self._suspect[1] >= _PATIENCE and self._suspect[0] not in self._named:
            self._named.add(self._suspect[0])
            say(
                f"straggler: the worker of {env_names(loads[slowest].rows)} is busy "
                f"{busy[slowest] / max(others, 1e-9):.1f} times as long as the others, and all "
                "wait for it"
            )


def _worker_loads(loop: RunningLoop) -> list[WorkerLoad]:
    """The load of every worker; env numbers continue from one vector env to the next."""
    loads: list[WorkerLoad] = []
    first = 0
    for env in loop.envs:
        if isinstance(env.unwrapped, HasWorkers):
            for load in env.unwrapped.worker_loads():
                loads.append(load._replace(rows=[first + row for row in load.rows]))
        first += env.num_envs
    return loads
