"""FollowFreeCores: more envs while cores are free, fewer while other programs use them."""

from __future__ import annotations

import os

from ml_pipeline.config.checks import check, integer_steps
from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import UserError
from ml_pipeline.records import Metrics
from ml_pipeline.runs.console import say
from ml_pipeline.training.contracts import Callback, RunningLoop


class FollowFreeCores(Callback):
    """Every ``every`` iterations, sets the number of envs to ``envs_per_core`` per free core.

    A core is free if no other program used it, by the load average of the last minute. The
    result depends on the load of other programs and cannot be reproduced.
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

    def on_train_start(self, loop: RunningLoop) -> None:
        if _resizable_env(loop) is None:
            raise UserError(
                "callbacks=scaling: needs envs in workers and collector=sync; choose "
                "vec_env=parallel or vec_env=shared"
            )
        if not hasattr(os, "getloadavg"):
            raise UserError(
                "callbacks=scaling: this system does not report its load; choose callbacks=default"
            )

    def on_iteration_end(self, loop: RunningLoop, metrics: Metrics) -> None:
        env = _resizable_env(loop)
        if loop.iteration % self.every or env is None:
            return
        own = metrics.get("workers/busy", 1.0) * env.n_workers + 1.0
        free = max(available_cores() - max(os.getloadavg()[0] - own, 0.0), 0.0)
        wanted = min(max(round(free * self.envs_per_core), self.min_envs), self.max_envs)
        before = env.num_envs
        n_envs = loop.resize(wanted)
        if n_envs != before:
            say(
                f"{free:.1f} of {available_cores()} cores are free: "
                f"changed from {before} to {n_envs} envs"
            )


def _resizable_env(loop: RunningLoop) -> ParallelEnv | None:
    """The only vector env of the run, if its size can change."""
    env = loop.envs[0].unwrapped
    return env if isinstance(env, ParallelEnv) and len(loop.envs) == 1 else None
