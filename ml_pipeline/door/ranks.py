"""Ranks other than 0: they train with rank 0 and write no file; and what several ranks refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from omegaconf import DictConfig

from ml_pipeline.config.off_policy import OffPolicyConfig
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.device import precision_of_products
from ml_pipeline.door.compose import ConfigError, checked_config, find_algorithm, resumed_config
from ml_pipeline.protocols import Agent, Place
from ml_pipeline.runs.console import quiet_console
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.rank_loop import RankLoop


def check_ranks(config: TrainConfig, place: Place, *, is_tensor: bool) -> None:
    """Refuse settings that need one process."""
    if place.world.size == 1:
        return
    for is_wrong, key in (
        (
            is_tensor and isinstance(config.agent, OffPolicyConfig),
            f"agent.algorithm={config.agent.algorithm} with env.target={config.env.target}",
        ),
        (not find_algorithm(config).trains_on_ranks, f"agent.algorithm={config.agent.algorithm}"),
        (config.opponent is not None, "opponent"),
        (config.curriculum is not None, "curriculum"),
    ):
        if is_wrong:
            raise ConfigError(
                f"{key}: does not train on {place.world.size} ranks; start one process, without "
                "torchrun"
            )


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
        stack.enter_context(torch_threads(device))
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
