"""FollowFreeCores: more envs while the machine is free, fewer while others use it."""

from __future__ import annotations

import os

from ml_pipeline.config.checks import check, integer_steps
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback, Metrics, Trainer
from ml_pipeline.runs.console import say


class FollowFreeCores(Callback):
    """Every ``every`` iterations gives the run ``envs_per_core`` envs for each free core.

    Free is what the load of the last minute leaves, this run's own share counted as free. What
    such a run learns depends on what else the machine did: it cannot be repeated.
    """

    def __init__(
        self, envs_per_core: int = 4, min_envs: int = 1, max_envs: int = 256, every: int = 5
    ) -> None:
        for name, value in vars().items():
            if name != "self":
                integer_steps(f"callbacks.scaling.{name}", value)
        check(min_envs <= max_envs, "callbacks.scaling.min_envs", "at most max_envs", min_envs)
        self.envs_per_core = envs_per_core
        self.min_envs = min_envs
        self.max_envs = max_envs
        self.every = every

    def on_train_start(self, trainer: Trainer) -> None:
        if _growing_env(trainer) is None:
            raise UserError(
                "callbacks.scaling needs envs in workers and collector=sync; choose "
                "vec_env=parallel or vec_env=shared"
            )
        if not hasattr(os, "getloadavg"):
            raise UserError("callbacks.scaling needs the load of the machine, unknown here")

    def on_iteration_end(self, trainer: Trainer, metrics: Metrics) -> None:
        env = _growing_env(trainer)
        if trainer.iteration % self.every or env is None:
            return
        own = metrics.get("workers/busy", 1.0) * env.n_workers + 1.0
        free = max(available_cores() - max(os.getloadavg()[0] - own, 0.0), 0.0)
        wanted = min(max(round(free * self.envs_per_core), self.min_envs), self.max_envs)
        before = env.num_envs
        n_envs = trainer.resize(wanted)
        if n_envs != before:
            say(f"{free:.1f} of {available_cores()} cores are free: {n_envs} envs, before {before}")


def _growing_env(trainer: Trainer) -> ParallelEnv | None:
    """The one env of the run, if its size can change."""
    env = trainer.envs[0]
    return env if isinstance(env, ParallelEnv) and len(trainer.envs) == 1 else None
