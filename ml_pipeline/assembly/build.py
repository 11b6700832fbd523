"""The loop, the record, the loggers and the callbacks of a run, made from its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ml_pipeline.assembly.agent import build_env_factory
from ml_pipeline.assembly.compose import ConfigError, find_algorithm, stored_text
from ml_pipeline.callbacks.curriculum import Curriculum
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.runs.checkpoint import (
    LATEST,
    check_fits,
    check_plain,
    checkpoint_path,
    misfit_explained,
)
from ml_pipeline.runs.large_files import load_files, save_files
from ml_pipeline.runs.record import Record
from ml_pipeline.runs.resuming import SavedEpisodes, read_episodes, resume_episodes
from ml_pipeline.runs.run_folder import RunFolder, write_text
from ml_pipeline.seeding import seed_global_generators
from ml_pipeline.signals import StopSignals
from ml_pipeline.targets import instantiate
from ml_pipeline.training.contracts import Callback, Envs, Logger
from ml_pipeline.training.loop import Loop

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from ml_pipeline.assembly.run_plan import RunPlan


def build_loop(
    plan: RunPlan,
    envs: Sequence[VectorEnv[Any, Any, Any]],
    loggers: Sequence[Logger],
    signals: StopSignals,
) -> Loop:
    """The loop and its trainer, in the state of the checkpoint if the run is resumed."""
    config = plan.config
    all_envs = Envs(envs, plan.env_seed, plan.trial.counts_episodes)
    trainer = find_algorithm(config).make_trainer(plan.agent, all_envs, config.agent, plan.context)
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
            load_files(plan.run, trainer, plan.state)
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
                "agent": _agent_name(config),
                "seed": config.seed,
                "n_envs": config.n_envs,
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


def _agent_name(config: TrainConfig) -> str:
    return type(config.agent).__name__.removesuffix("Config").lower()


def build_loggers(
    config: TrainConfig,
    run_folder: RunFolder,
    sweep: str | None,
    env_steps: int,
    on_failure: ExitStack,
) -> dict[str, Logger]:
    """The loggers of the config; the local record and the console are always on."""
    run_config = {
        **dataclasses.asdict(config),
        "env_name": config.env.name,
        "agent_name": _agent_name(config),
    }
    offers = {
        "run": run_folder,
        "run_config": run_config,
        "sweep": sweep,
        "env_steps": env_steps,  # at which the run resumes; 0 for a new run
    }
    loggers: dict[str, Logger] = {}
    for name, entry in config.logger.items():
        loggers[name] = instantiate(entry, key=f"logger.{name}", offers=offers)
        if not all(hasattr(loggers[name], method) for method in ("log", "close")):
            raise ConfigError(
                f"logger.{name}: {type(loggers[name]).__name__} has no log and close; "
                "see ml_pipeline.training.contracts.Logger"
            )
        on_failure.callback(loggers[name].close)
    return loggers


def build_callbacks(
    config: TrainConfig, run_folder: RunFolder, device: torch.device
) -> dict[str, Callback]:
    offers = {
        "run": run_folder,
        "make_env": build_env_factory(config.evaluated_env),
        "vec_env": config.vec_env,
        "seed": config.seed,
        "device": device,
        "best_metric": config.best_metric,
    }
    callbacks: dict[str, Callback] = {}
    if config.curriculum is not None:
        if "curriculum" in config.callbacks:
            raise ConfigError("callbacks.curriculum: the key curriculum makes one of that name")
        callbacks["curriculum"] = Curriculum(config.curriculum)
    for name, entry in config.callbacks.items():
        callbacks[name] = instantiate(entry, key=f"callbacks.{name}", offers=offers)
        if not isinstance(callbacks[name], Callback):
            raise ConfigError(
                f"callbacks.{name}: {type(callbacks[name]).__name__} is not an "
                "ml_pipeline.training.contracts.Callback; derive it from that class"
            )
        check_plain(callbacks[name].state_dict(), f"the state of callbacks.{name}")
    return callbacks
