"""One run, from a composed config to its result; ``train(overrides)`` is the same in Python."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from omegaconf import DictConfig

from ml_pipeline.agents.observations import batched
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.device import precision_of_products
from ml_pipeline.door.compose import (
    checked_config,
    compose_config,
    find_modules_in_cwd,
    resumed_config,
    stored_text,
)
from ml_pipeline.door.load import load_agent, load_policy
from ml_pipeline.door.parts import (
    build_agent,
    build_record,
    build_trainer,
    build_vec_envs,
    torch_threads,
)
from ml_pipeline.door.plan import RunPlan, make_plan
from ml_pipeline.envs.factory import close_env
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Callback
from ml_pipeline.runs.checkpoint import LATEST, checkpoint_path
from ml_pipeline.runs.console import say
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.resuming import resume_episodes, save_latest, sweep_litter
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.out_of_memory import activation_bytes, memory_advice, memory_explained
from ml_pipeline.training.ppo_trainer import PPOTrainer

__all__ = ["RunResult", "load_agent", "load_policy", "run", "train"]


class RunResult(NamedTuple):
    """What a run left behind."""

    run_dir: Path
    env_steps: int
    mean_reward: float  # of the last 100 training episodes; nan if none has ended
    agent: PPOAgent
    objective: float  # the metric named by the config's ``objective``; nan if never taken


def train(
    overrides: Sequence[str] = (), *, callbacks: Mapping[str, Callback] | None = None
) -> RunResult:
    """Train as ``python train_ppo.py`` does: ``train(["env=cartpole", "n_envs=4"])``.

    ``callbacks`` are more than the config names, and hear of everything after those.
    """
    return run(compose_config(overrides), overrides, callbacks=callbacks)


def run(
    cfg: DictConfig,
    overrides: Sequence[str],
    *,
    sweep: str | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    folder: RunFolder | None = None,
) -> RunResult:
    """One run from a composed config; ``overrides`` is what the command line named.

    ``folder`` is where a run that begins is kept; None: a new one under ``RUN_ROOT``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a worker has imported the script that starts it, which would start another run; put "
            "the call of train under: if __name__ == '__main__':"
        )
    find_modules_in_cwd()
    with ExitStack() as stack:
        if cfg.resume is not None:
            # Locked before anything is read: another process may be about to save.
            stack.enter_context(RunFolder.open(str(cfg.resume)).locked())
            cfg = resumed_config(cfg, overrides)
        plan = make_plan(checked_config(cfg), callbacks=callbacks, folder=folder)
        stack.callback(close_env, plan.first_env)
        stack.enter_context(torch_threads(plan.device))
        stack.enter_context(precision_of_products(plan.config.precision, plan.device))
        signals = stack.enter_context(StopSignals(on_wait=_say_stopping))
        if plan.state is None:
            plan.run.make()
            stack.enter_context(plan.run.locked())
        else:
            sweep_litter(plan.run, plan.state)
        record = build_record(plan, overrides, sweep)
        stack.callback(record.close)
        try:
            with memory_explained(plan.device, partial(_memory_advice, plan)):
                envs, how = build_vec_envs(plan)
                for env in envs:
                    stack.callback(env.close)
                trainer = build_trainer(plan, envs, record, signals)
                resumed = _resume(plan, trainer)
                write_text(plan.run.config, stored_text(plan.config))
                record.begin(f"{plan.config.env.name}: {how}, {plan.device}")
                if resumed:
                    say(resumed)
                _train(trainer, plan, record, signals)
        except Interrupted as stop:
            with signals.shielded():
                record.end("interrupted", f"stopped by {stop.signal_name}")
            raise
        except BaseException as error:
            with signals.shielded():
                record.end("failed", f"failed with {type(error).__name__}")
            raise
        record.end("finished", trainer.stop_reason or "finished")
        objective = record.value(plan.config.objective)
        if math.isnan(objective):
            say(f"objective={plan.config.objective} was never measured; see {plan.run.metrics}")
        return RunResult(
            plan.run.path, trainer.env_steps, record.mean_reward, plan.agent, objective
        )


def _say_stopping() -> None:
    # Not by print, which may be at work when the signal comes, and cannot be entered twice.
    with suppress(OSError):  # the terminal may be gone
        os.write(1, b"stopping after this iteration; once more to stop sooner\n")


def _memory_advice(plan: RunPlan) -> str:
    """What the run needs and how to need less; ``DeviceMemoryError`` begins with the fact."""
    config, space = plan.config, plan.first_env.observation_space
    per_transition = None
    with suppress(Exception):  # a user's network may do anything, and there is little memory left
        # Another agent, since the run's is where no memory is.
        agent = build_agent(config, plan.first_env, torch.device("cpu"))
        one = agent.reader.read(batched(space, [space.sample()]))
        per_transition = activation_bytes(agent, one)
    advice = memory_advice(
        plan.agent,
        per_transition,
        n_steps=config.agent.n_steps,
        n_envs=int(config.n_envs),
        n_minibatches=config.agent.n_minibatches,
        keeps_final_obs=plan.torch_env is not None,
    )
    saved = checkpoint_path(plan.run, LATEST).is_file()
    return advice + ("; the last checkpoint is kept" if saved else "")


def _resume(plan: RunPlan, trainer: PPOTrainer) -> str:
    """Go on where the envs stood, if they can; what is to be said of this resume, or of a later."""
    if plan.state is not None:
        saved_env = (yaml.safe_load(plan.state["config"]) or {}).get("env")
        if saved_env == dataclasses.asdict(plan.config.env):
            how = resume_episodes(plan.run, trainer, plan.state, trust=plan.config.trust)
        else:
            how = "with new episodes: the env's settings have changed"
        return f"resumed at env step {plan.first_step:,} {how}"
    if plan.no_snapshot is not None:
        return f"a resume of this run will begin new episodes: {plan.no_snapshot}"
    return ""


def _train(trainer: PPOTrainer, plan: RunPlan, record: Record, signals: StopSignals) -> None:
    """Train to the end; a stop signal leaves a checkpoint of the last whole iteration.

    So does an env that fails, which it does amid a rollout: no weight has changed since.
    """
    try:
        with record.timed():
            trainer.train(plan.config.wanted_steps)
    except (Interrupted, WorkerError) as error:
        if isinstance(error, Interrupted) or trainer.env_steps > plan.first_step:
            with signals.shielded():
                save_latest(plan.run, trainer)
        raise
