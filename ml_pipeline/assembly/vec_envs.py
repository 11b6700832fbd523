"""The vector envs of a run: tensor envs, or envs in this process and in workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from ml_pipeline.assembly.build import act_greedily, make_tensor_env
from ml_pipeline.assembly.plan import RunPlan
from ml_pipeline.envs.choice import choose_mode
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.self_play import ArrayOpponents, SelfPlayEnv

ProcessEnv = ParallelEnv | SerialEnv | SelfPlayEnv


def build_vec_envs(plan: RunPlan) -> tuple[Sequence[ProcessEnv | TorchVectorEnv], str]:
    """The envs, in two halves with collector=double, and a text that says how they run."""
    if plan.tensor_env is not None:
        env = make_tensor_env(
            plan.config,
            plan.tensor_env,
            plan.context.device,
            n_envs=plan.config.n_envs,
            seed=plan.env_seed,
            pool=plan.pool,
        )
        return [env], _how_tensor_envs_run(plan)
    return _build_process_envs(plan)


def _how_tensor_envs_run(plan: RunPlan) -> str:
    n_envs = plan.config.n_envs
    how = "1 tensor env" if n_envs == 1 else f"{n_envs} tensor envs"
    if plan.context.programs.mode == "graph":
        # Say so: it takes seconds, and nothing else is printed meanwhile.
        how += ", compiled and captured in the first iterations"
    return how + (f" ({plan.remark})" if plan.remark else "")


def _counted(n_envs: int) -> str:
    return "1 env" if n_envs == 1 else f"{n_envs} envs"


def _build_process_envs(plan: RunPlan) -> tuple[Sequence[ProcessEnv], str]:
    config, mode, reason = plan.config, plan.config.vec_env.mode, plan.remark
    n_slices = min(config.vec_env.n_workers or available_cores(), config.n_envs)
    halves = [config.n_envs] if config.collector == "sync" else [config.n_envs // 2] * 2
    if mode == "auto":
        mode, why = choose_mode(
            partial(_make_timed_env, plan),
            plan.trial,
            partial(act_greedily, plan.agent),
            n_envs=config.n_envs,
            n_slices=n_slices,
        )
        reason = f"{reason}; {why}" if reason else why
    envs: list[ParallelEnv | SerialEnv] = []
    try:
        for number, n_envs in enumerate(halves):
            envs.append(_make_vec_env(plan, mode, n_envs=n_envs, first=number * n_envs))
    except BaseException:
        for env in envs:
            env.close()
        raise
    how = _how_process_envs_run(envs, mode) + (f" ({reason})" if reason else "")
    if plan.pool is None:
        return envs, how
    return _with_opponents(plan, envs, plan.pool), f"{how}, against a pool of opponents"


def _with_opponents(
    plan: RunPlan, envs: Sequence[ParallelEnv | SerialEnv], pool: OpponentPool
) -> list[SelfPlayEnv]:
    moves = plan.self_play.moves if plan.self_play is not None else None
    opponents = ArrayOpponents(pool, moves=moves)
    first_envs = accumulate((env.num_envs for env in envs[:-1]), initial=0)
    return [
        SelfPlayEnv(env, opponents, first_env=first, moves=moves)
        for env, first in zip(envs, first_envs, strict=True)
    ]


def _make_timed_env(plan: RunPlan, mode: str) -> ProcessEnv:
    """All envs, and opponents of their own: the pool of the run must not draw yet."""
    env = _make_vec_env(plan, mode)
    if plan.self_play is None:
        return env
    pool = plan.self_play.new_pool(plan.agent, plan.context)
    return _with_opponents(plan, [env], pool)[0]


def _how_process_envs_run(envs: Sequence[ParallelEnv | SerialEnv], mode: str) -> str:
    how = _counted(sum(env.num_envs for env in envs))
    how += " in two halves" if len(envs) > 1 else ""
    first = envs[0]
    if not isinstance(first, ParallelEnv):
        return f"{how} in this process"
    n_workers = sum(env.n_workers for env in envs if isinstance(env, ParallelEnv))
    how += f", {n_workers} {first.start_method} worker{'s' if n_workers > 1 else ''}"
    return how + (" and this process" if mode == "shared" else "")


def _make_vec_env(
    plan: RunPlan, mode: str, *, n_envs: int | None = None, first: int = 0
) -> ParallelEnv | SerialEnv:
    """``n_envs`` envs (None: all), starting with env ``first`` of the run."""
    n_envs = plan.config.n_envs if n_envs is None else n_envs
    vec_env, env_fns = plan.config.vec_env, [plan.make_env] * n_envs
    common: dict[str, Any] = {
        "seed": plan.env_seed + first,
        "infos": vec_env.infos,
        "check_finite": vec_env.check_finite,
    }
    if mode == "serial":
        return SerialEnv(env_fns, **common)
    n_workers = vec_env.n_workers
    if n_workers is not None:  # the halves of a double-buffered collector share the workers
        n_workers = max(n_workers * n_envs // plan.config.n_envs, 1)
    return ParallelEnv(
        env_fns,
        **common,
        n_workers=n_workers,
        start_method=vec_env.start_method,  # type: ignore[arg-type]  # checked by VecEnvConfig
        main_slice=mode == "shared",
        step_timeout=vec_env.step_timeout_seconds,
        on_worker_death=vec_env.on_worker_death,  # type: ignore[arg-type]  # as above
        max_restarts=vec_env.max_restarts,
    )
