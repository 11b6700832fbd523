"""One run, from a composed config to its result; ``train(overrides)`` starts one from Python."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from ml_pipeline.assembly.agent import agent_name, build_trainer, chosen_network, find_algorithm
from ml_pipeline.assembly.build import act_greedily, build_loggers, kept_cwd, make_tensor_env
from ml_pipeline.assembly.compose import (
    checked_config,
    compose_config,
    find_modules_in_cwd,
    resumed_config,
    resumed_folder,
    stored_text,
    with_newest_run,
)
from ml_pipeline.assembly.load import load_agent, load_policy
from ml_pipeline.assembly.plan import RunPlan, make_plan
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.device import precision_of_products, torch_threads
from ml_pipeline.envs.choice import choose_mode
from ml_pipeline.envs.foreign_device_env import ForeignDeviceEnv, why_on_host
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.errors import BrokenEnvError, UserError, type_and_line
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.self_play import ArrayOpponents, SelfPlayEnv
from ml_pipeline.metrics import MEAN_RETURN
from ml_pipeline.ranks.world import launched_rank
from ml_pipeline.runs.checkpoint import LATEST, check_fits, checkpoint_path, misfit_explained
from ml_pipeline.runs.console import quiet_console, say, say_stopping
from ml_pipeline.runs.large_files import disk_remark, load_files, save_files
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.resuming import (
    SavedEpisodes,
    read_episodes,
    resume_episodes,
    save_latest,
    sweep_litter,
)
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.seeding import seed_global_generators
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.checks import BadValueError, PartError
from ml_pipeline.training.contracts import Agent, Callback, Envs, Logger
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.out_of_memory import memory_explained, ran_out_of_memory

__all__ = ["RunResult", "load_agent", "load_policy", "run", "train"]

ProcessEnv = ParallelEnv | SerialEnv | SelfPlayEnv | ForeignVectorEnv


class RunResult(NamedTuple):
    """The result of a run."""

    run_dir: Path
    env_steps: int
    mean_reward: float  # of the last 100 training episodes; nan if none has ended
    agent: Agent
    objective: float  # the metric named by the config's ``objective``; nan if never measured


def train(
    overrides: Sequence[str] = (), *, callbacks: Mapping[str, Callback] | None = None
) -> RunResult:
    """Train as the command line does: ``train(["env=cartpole", "n_envs=4"])``.

    ``callbacks`` are called after those of the config.
    """
    overrides = with_newest_run(overrides)
    return run(compose_config(overrides), overrides, callbacks=callbacks)


@kept_cwd()
def run(
    cfg: DictConfig,
    overrides: Sequence[str],
    *,
    sweep: str | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    folder: RunFolder | None = None,
) -> RunResult:
    """One run from a composed config; ``overrides`` are those of the command line.

    ``folder`` is for a new run; None: a new one under ``run_root``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a worker imported the script that starts it, which would start another run; put the "
            "call of train under: if __name__ == '__main__':"
        )
    find_modules_in_cwd()
    if launched_rank() > 0:
        return _follow(cfg, overrides)
    with ExitStack() as stack:
        if cfg.resume is not None:
            # Lock the folder before reading it: another process may be about to save.
            stack.enter_context(resumed_folder(str(cfg.resume), trust=cfg.trust).locked())
            cfg = resumed_config(cfg, overrides)
        plan = make_plan(checked_config(cfg), callbacks=callbacks, folder=folder)
        signals = _prepared(plan, stack, StopSignals(on_wait=say_stopping))
        saved = read_saved_episodes(plan)
        if plan.state is None:
            plan.run.make()
            stack.enter_context(plan.run.locked())
        else:
            sweep_litter(plan.run, plan.state)
        record = build_record(plan, overrides, sweep)
        stack.callback(record.close)
        try:
            with memory_explained(plan.context.device, partial(memory_advice, plan)):
                loop, how, resumed = _built(plan, stack, record.loggers, signals, saved)
                write_text(plan.run.config, stored_text(plan.config))
                record.begin(f"{plan.config.env.name}: {how}, {plan.where}")
                if resumed:
                    say(resumed)
                if remark := disk_remark(plan.run, loop.trainer, plan.wanted_steps):
                    say(remark)
                _train(loop, plan, record, signals)
        except Interrupted as stop:
            signals.arrived()
            with signals.shielded():
                record.end("interrupted", f"stopped by {stop.signal_name}")
            raise
        except BaseException as error:
            with signals.shielded():
                record.end("failed", f"failed with {type(error).__name__}")
            raise
        record.end("finished", loop.stop_reason or "finished")
        objective = record.value(plan.config.objective)
        if math.isnan(objective):
            if plan.config.objective == MEAN_RETURN:
                say("no episode of the training has ended, so it has no return; raise total_steps")
            else:
                say(f"objective={plan.config.objective} was never measured; see {plan.run.metrics}")
        return RunResult(plan.run.shown, loop.env_steps, record.mean_reward, plan.agent, objective)


def _prepared(plan: RunPlan, stack: ExitStack, signals: StopSignals) -> StopSignals:
    """Join the ranks and set up torch; the signals are handled from here on."""
    device = plan.context.device
    stack.enter_context(plan.context.world)
    for callback in plan.callbacks.values():
        stack.callback(callback.close)
    stack.enter_context(torch_threads(device, plan.config.cpu_threads))
    stack.enter_context(precision_of_products(plan.config.precision, device))
    return stack.enter_context(signals)


def _built(
    plan: RunPlan,
    stack: ExitStack,
    loggers: Sequence[Logger],
    signals: StopSignals,
    saved: SavedEpisodes | None,
) -> tuple[Loop, str, str]:
    """The loop in its envs, how they run, and how the run resumes."""
    envs, how = build_vec_envs(plan)
    for env in envs:
        stack.callback(env.close)
    loop = build_loop(plan, envs, loggers, signals)
    return loop, how, resume(plan, loop, saved)


def _follow(cfg: DictConfig, overrides: Sequence[str]) -> RunResult:
    """The run of a rank other than 0: it trains with rank 0, which writes the record."""
    with ExitStack() as stack:
        stack.enter_context(quiet_console(True))
        if cfg.resume is not None:
            cfg = resumed_config(cfg, overrides)
        # Rank 0 evaluates, saves and logs.
        plan = make_plan(dataclasses.replace(checked_config(cfg), callbacks={}, logger={}))
        signals = _prepared(plan, stack, StopSignals())
        loop, _, _ = _built(plan, stack, (), signals, read_saved_episodes(plan))
        try:
            loop.train(plan.wanted_steps)
        except Interrupted:
            loop.wait_for_end()
            raise
        loop.wait_for_end()
        return RunResult(plan.run.shown, loop.env_steps, math.nan, plan.agent, math.nan)


def _train(loop: Loop, plan: RunPlan, record: Record, signals: StopSignals) -> None:
    """Train to the end; a stop signal or a failing env leaves the last complete iteration saved."""
    try:
        with record.timed():
            loop.train(plan.wanted_steps)
    except (Interrupted, BrokenEnvError, BadValueError) as error:
        if isinstance(error, Interrupted) or loop.env_steps > plan.first_step:
            with signals.shielded():
                save_latest(plan.run, loop)
        raise
    except Exception as error:  # a user's callback, loss or network may raise anything
        if ran_out_of_memory(error) or (
            isinstance(error, UserError) and not isinstance(error, PartError)
        ):
            raise
        with signals.shielded():
            _save_after(error, loop, plan)
        if isinstance(error, PartError):
            where = f"the whole traceback: {plan.run.shown / plan.run.traceback.name}"
            raise PartError(f"{error}; {where}") from error.__cause__
        raise


def _save_after(error: Exception, loop: Loop, plan: RunPlan) -> None:
    """Save the last complete iteration and the traceback; a second error must not hide this one."""
    try:
        text = "".join(traceback.format_exception(error))
        write_text(plan.run.traceback, text)
        if loop.env_steps > plan.first_step:
            save_latest(plan.run, loop)
    except Exception as second:  # the state of a callback may raise too
        say(f"could not save the run: {type_and_line(second)}")


def build_vec_envs(plan: RunPlan) -> tuple[Sequence[ProcessEnv | DeviceVectorEnv], str]:
    """The envs, in two halves with collector=double, and a text that says how they run."""
    if plan.make_env.is_vector:
        n_envs = plan.config.n_envs
        batch = plan.make_env.make_batch(n_envs)
        how = f"{_counted(n_envs)} in one {type(batch.env.unwrapped).__name__}"
        if _stays_on_device(plan, batch):
            device = plan.context.device
            return [ForeignDeviceEnv(batch, device=device)], f"{how}, with tensors on {device}"
        resets = ", whose step after an episode only resets it and is left out"
        return [batch], how + (resets if batch.has_reset_rows else "")
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


def _stays_on_device(plan: RunPlan, batch: ForeignVectorEnv) -> bool:
    """Whether the tensors of the env, if it has any, can be those of the rollout."""
    device = plan.context.device
    if device.type == "cpu" or plan.trial.counts_episodes:
        return False  # on the CPU an array may be the tensor's memory
    _, infos = batch.reset()  # only its observations show where they are
    return why_on_host(batch, device, infos) is None


def _how_tensor_envs_run(plan: RunPlan) -> str:
    n_envs = plan.config.n_envs
    how = "1 tensor env" if n_envs == 1 else f"{n_envs} tensor envs"
    if plan.context.programs.mode == "graph":
        # Say so: it takes seconds, and nothing else is printed meanwhile.
        captured = ", compiled and captured in the first iterations"
        why_not = plan.tensor_env.why_no_graph if plan.tensor_env is not None else None
        how += f", whose steps no CUDA graph captures: {why_not}" if why_not else captured
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


def build_loop(
    plan: RunPlan,
    envs: Sequence[ProcessEnv | DeviceVectorEnv],
    loggers: Sequence[Logger],
    signals: StopSignals,
) -> Loop:
    """The loop and its trainer, in the state of the checkpoint if the run is resumed."""
    config = plan.config
    all_envs = Envs(envs, plan.env_seed, plan.trial.counts_episodes)
    trainer = build_trainer(config, plan.agent, all_envs, plan.context)
    loop = Loop(
        trainer,
        callbacks=plan.callbacks,
        loggers=loggers,
        signals=signals,
        saves_envs=plan.no_snapshot is None,
        world=plan.context.world,
    )
    loop.save_files = partial(save_files, plan.run, trainer)
    seed_global_generators(config.seed)  # again: a probed env may have drawn from them
    if plan.state is not None:
        with misfit_explained(plan.run):
            own = loop.state_dict()
            if isinstance(own.get("collector"), dict):
                own["collector"]["position"] = None  # that of another env has another form
            check_fits(own, plan.state, "state")
            loop.load_state_dict(plan.state)
            load_files(plan.run, trainer, plan.state, salvage=config.salvage)
    return loop


def read_saved_episodes(plan: RunPlan) -> SavedEpisodes | None:
    """The episodes to resume, or None for a new run; raises before a file changes."""
    if plan.state is None:
        return None
    env, world = dataclasses.asdict(plan.config.env), plan.context.world
    saved = read_episodes(plan.run, plan.state, env, trust=plan.config.trust)
    n_ranks = plan.state["n_ranks"]
    if (misfit := world.misfit(n_ranks)) and not saved.why_not:
        return SavedEpisodes([], misfit)
    return saved._replace(snapshots=saved.snapshots[world.envs(len(saved.snapshots) // n_ranks)])


def resume(plan: RunPlan, loop: Loop, saved: SavedEpisodes | None) -> str:
    """Continue the saved episodes if possible; returns the line to print, or an empty string."""
    if plan.state is not None and saved is not None:
        how = resume_episodes(plan.run, loop, plan.state, saved)
        return f"resumed at env step {plan.first_step:,} {how}"
    if plan.no_snapshot is not None:
        return f"if resumed, this run will start new episodes: {plan.no_snapshot}"
    return ""


def memory_advice(plan: RunPlan) -> str:
    """How much memory the run needs and how to reduce it, for an error message."""
    config, is_tensor = plan.config, plan.tensor_env is not None
    advice = find_algorithm(config).memory_advice(
        plan.agent, config.agent, int(config.n_envs), is_tensor
    )
    saved = checkpoint_path(plan.run, LATEST).is_file()
    return advice + ("; the last checkpoint is kept" if saved else "")


def build_record(plan: RunPlan, overrides: Sequence[str], sweep: str | None) -> Record:
    """The run's folder on disk, and everything that is written into it."""
    config = plan.config
    with ExitStack() as on_failure:
        on_failure.callback(plan.run.discard_unstarted)
        loggers = build_loggers(config, plan.run, sweep, plan.first_step, on_failure)
        record = Record(
            plan.run,
            facts={
                "env": config.env.name,
                "agent": agent_name(config),
                "seed": config.seed,
                "n_envs": config.n_envs,
                # In place of network=auto, for comparisons with runs that name their network.
                "network": chosen_network(config, plan.trial.observation_space),
                "name": config.name,
                "notes": config.notes,
                "tags": config.tags,
                "sweep": sweep,  # its name, or that of the study
            },
            overrides=overrides,
            total_steps=plan.wanted_steps,
            env_steps=plan.first_step,
            loggers=loggers,
            named_metrics=_named_metrics(config),
        )
        if plan.state is None:  # a resumed run writes its config once the resume has succeeded
            write_text(plan.run.config, stored_text(config))
        on_failure.pop_all()
    return record


def _named_metrics(config: TrainConfig) -> dict[str, str]:
    """The metrics that the config names, by key; ``metric`` of a callback is one."""
    named = {"objective": config.objective, "best_metric": config.best_metric}
    for name, entry in config.callbacks.items():
        if isinstance(metric := entry.get("metric"), str):
            named[f"callbacks.{name}.metric"] = metric
    for name, phase in (config.curriculum.phases if config.curriculum else {}).items():
        if phase.until.metric is not None:
            named[f"curriculum.phases.{name}.until.metric"] = phase.until.metric
    return named
