"""One run, from a composed config to its result; ``train(overrides)`` starts one from Python."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from ml_pipeline.assembly.agent import kept_cwd
from ml_pipeline.assembly.build import (
    build_loop,
    build_record,
    memory_advice,
    read_saved_episodes,
    resume,
)
from ml_pipeline.assembly.compose import (
    checked_config,
    compose_config,
    find_modules_in_cwd,
    resumed_config,
    resumed_folder,
    stored_text,
)
from ml_pipeline.assembly.follow import follow
from ml_pipeline.assembly.load import load_agent, load_policy
from ml_pipeline.assembly.plan import make_plan
from ml_pipeline.assembly.run_plan import RunPlan
from ml_pipeline.assembly.vec_envs import build_vec_envs
from ml_pipeline.device import precision_of_products, torch_threads
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.errors import UserError
from ml_pipeline.ranks.world import launched_rank
from ml_pipeline.runs.console import say, say_stopping
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.resuming import save_latest, sweep_litter
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.checks import BadValueError
from ml_pipeline.training.contracts import Agent, Callback
from ml_pipeline.training.loop import Loop
from ml_pipeline.training.out_of_memory import memory_explained

__all__ = ["RunResult", "load_agent", "load_policy", "run", "train"]


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
        return RunResult(*follow(cfg, overrides))  # rank 0 writes the record
    with ExitStack() as stack:
        if cfg.resume is not None:
            # Lock the folder before reading it: another process may be about to save.
            stack.enter_context(resumed_folder(str(cfg.resume)).locked())
            cfg = resumed_config(cfg, overrides)
        plan = make_plan(checked_config(cfg), callbacks=callbacks, folder=folder)
        device = plan.context.device
        stack.enter_context(plan.context.world)
        for callback in plan.callbacks.values():
            stack.callback(callback.close)
        stack.enter_context(torch_threads(device, plan.config.cpu_threads))
        stack.enter_context(precision_of_products(plan.config.precision, device))
        signals = stack.enter_context(StopSignals(on_wait=say_stopping))
        saved = read_saved_episodes(plan)
        if plan.state is None:
            plan.run.make()
            stack.enter_context(plan.run.locked())
        else:
            sweep_litter(plan.run, plan.state)
        record = build_record(plan, overrides, sweep)
        stack.callback(record.close)
        try:
            with memory_explained(device, partial(memory_advice, plan)):
                envs, how = build_vec_envs(plan)
                for env in envs:
                    stack.callback(env.close)
                loop = build_loop(plan, envs, record.loggers, signals)
                resumed = resume(plan, loop, saved)
                write_text(plan.run.config, stored_text(plan.config))
                record.begin(f"{plan.config.env.name}: {how}, {plan.where}")
                if resumed:
                    say(resumed)
                _train(loop, plan, record, signals)
        except Interrupted as stop:
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
            say(f"objective={plan.config.objective} was never measured; see {plan.run.metrics}")
        return RunResult(plan.run.shown, loop.env_steps, record.mean_reward, plan.agent, objective)


def _train(loop: Loop, plan: RunPlan, record: Record, signals: StopSignals) -> None:
    """Train to the end; a stop signal or a failing env leaves the last complete iteration saved."""
    try:
        with record.timed():
            loop.train(plan.wanted_steps)
    except (Interrupted, WorkerError, BadValueError) as error:
        if isinstance(error, Interrupted) or loop.env_steps > plan.first_step:
            with signals.shielded():
                save_latest(plan.run, loop)
        raise
