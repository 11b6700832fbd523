"""Ranks other than 0: they train with rank 0 and write no file; and what several ranks refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from omegaconf import DictConfig
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ml_pipeline.config.train import TrainConfig
from ml_pipeline.device import precision_of_products
from ml_pipeline.distributed import World
from ml_pipeline.door.compose import ConfigError, checked_config, find_algorithm, resumed_config
from ml_pipeline.protocols import Agent, Place, StateDict
from ml_pipeline.runs.console import quiet_console
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.rank_loop import RankLoop


def check_ranks(config: TrainConfig, place: Place, agent: Agent) -> None:
    """Refuse settings that need one process, and sizes that are too small for all ranks."""
    if place.world.size == 1:
        return
    modules = getattr(agent, "model", nn.Module()).modules()
    has_batch_norm = any(isinstance(each, _BatchNorm) for each in modules)
    for is_wrong, key in (
        (has_batch_norm, "network, which has BatchNorm layers"),
        (not find_algorithm(config).trains_on_ranks, f"agent.algorithm={config.agent.algorithm}"),
        (config.opponent is not None, "opponent"),
        (config.curriculum is not None, "curriculum"),
    ):
        if is_wrong:
            raise ConfigError(
                f"{key}: does not train on {place.world.size} ranks; start one process, without "
                "torchrun"
            )
    if reason := config.agent.why_not(place.world.size * int(config.n_envs)):
        raise ConfigError(f"{place.world.size} ranks: {reason}")


def check_saved_envs(config: TrainConfig, world: World, state: StateDict | None) -> None:
    """Refuse another number of envs than that of the replay; old checkpoints do not have it."""
    n_saved = (state or {}).get("replay", {}).get("n_envs")
    n_envs = world.size * int(config.n_envs)
    if n_saved is None or n_saved == n_envs:
        return
    n_own, rest = divmod(n_saved, world.size)
    fix = f"a number of ranks that divides {n_saved}" if rest else f"n_envs={n_own}"
    raise ConfigError(
        f"n_envs={config.n_envs}: this run has {n_envs} envs on {_ranks(world.size)}, but its "
        f"replay has {n_saved}; use {fix}"
    )


def _ranks(n_ranks: int) -> str:
    return "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"


def follow(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int, float, Agent, float]:
    """The run of a rank other than 0; returns the fields of ``RunResult``."""
    from ml_pipeline.door.env_parts import build_vec_envs
    from ml_pipeline.door.parts import build_loop, read_saved_episodes, resume, torch_threads
    from ml_pipeline.door.plan import make_plan

    with ExitStack() as stack:
        stack.enter_context(quiet_console(True))
        if cfg.resume is not None:
            cfg = resumed_config(cfg, overrides)
        # Rank 0 evaluates, saves and logs.
        config = dataclasses.replace(checked_config(cfg), callbacks={}, logger={})
        plan = make_plan(config)
        device = plan.place.device
        stack.enter_context(plan.place.world)
        stack.enter_context(torch_threads(device, plan.config.cpu_threads))
        stack.enter_context(precision_of_products(config.precision, device))
        signals = stack.enter_context(StopSignals())
        saved = read_saved_episodes(plan)
        envs, _ = build_vec_envs(plan)
        for env in envs:
            stack.callback(env.close)
        loop = build_loop(plan, envs, (), signals)
        resume(plan, loop, saved)
        try:
            loop.train(plan.wanted_steps)
        except Interrupted:
            _wait_for_end(loop)
            raise
        _wait_for_end(loop)
        return plan.run.shown, loop.env_steps, math.nan, plan.agent, math.nan


def _wait_for_end(loop: object) -> None:
    if isinstance(loop, RankLoop):
        loop.wait_for_end()
