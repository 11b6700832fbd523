"""follow: ranks other than 0; they train with rank 0 and write no file of the record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from omegaconf import DictConfig

from ml_pipeline.assembly.build import build_loop, read_saved_episodes, resume
from ml_pipeline.assembly.compose import checked_config, resumed_config
from ml_pipeline.assembly.plan import make_plan
from ml_pipeline.assembly.vec_envs import build_vec_envs
from ml_pipeline.device import precision_of_products, torch_threads
from ml_pipeline.runs.console import quiet_console
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.training.contracts import Agent


def follow(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int, float, Agent, float]:
    """The run of a rank other than 0; returns the fields of ``RunResult``."""

    with ExitStack() as stack:
        stack.enter_context(quiet_console(True))
        if cfg.resume is not None:
            cfg = resumed_config(cfg, overrides)
        # Rank 0 evaluates, saves and logs.
        config = dataclasses.replace(checked_config(cfg), callbacks={}, logger={})
        plan = make_plan(config)
        device = plan.context.device
        stack.enter_context(plan.context.world)
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
            loop.wait_for_end()
            raise
        loop.wait_for_end()
        return plan.run.shown, loop.env_steps, math.nan, plan.agent, math.nan
