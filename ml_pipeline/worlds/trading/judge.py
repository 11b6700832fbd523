"""Judge trading runs: walk their policies over a period of their market."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from ml_pipeline.assembly.build import build_env_factory
from ml_pipeline.assembly.compose import ConfigError, stored_config
from ml_pipeline.assembly.load import restored_agent
from ml_pipeline.config.train import EnvConfig, TrainConfig
from ml_pipeline.device import torch_threads
from ml_pipeline.envs.factory import close_env
from ml_pipeline.errors import UserError
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.runs.checkpoint import best_or_latest, named_checkpoint
from ml_pipeline.runs.console import user_command
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.worlds.trading.env import Trading
from ml_pipeline.worlds.trading.judgement import Judgement, judge
from ml_pipeline.worlds.trading.task import VALIDATION, TradingTask
from ml_pipeline.worlds.trading.walk import Walk, walk

_ALL = "all"  # the period with the bars of every other one


def judge_run(run_folder: Path | str, *, period: str, n_trials: int) -> Judgement:
    """Judge one run, as ``python -m ml_pipeline judge`` does; it must be the user's own."""
    return judge_runs([run_folder], period=period, n_trials=n_trials)


def facts_for_deployment(run: Path, n_trials: int) -> dict[str, object]:
    """What the judge says about a run that shall be deployed; refuses one without an edge.

    ``n_trials`` counts the trials that the run was selected from.
    """
    judged = judge_run(run, period=VALIDATION, n_trials=n_trials)
    if not judged.claims_edge:
        raise UserError(
            f"not deployed: {run} does not hold on the validation period: {judged.verdict}; "
            "the study is kept; to watch this policy on paper anyway: "
            f"{user_command('export')} {run}"
        )
    return {"sharpe": judged.sharpe, "verdict": judged.verdict, "n_trials": n_trials}


def judge_runs(
    run_folders: Sequence[Path | str],
    *,
    period: str,
    n_trials: int,
    checkpoint: str | None = None,
    trust: bool = False,
) -> Judgement:
    """Judge several runs together; ``n_trials`` counts those that they were chosen from."""
    walks: dict[str, Walk] = {}
    is_held_out = True
    for path in run_folders:
        run = RunFolder.open(path, trust=trust)
        if run.name in walks:
            raise ConfigError(f"{path}: named twice; name each run once")
        config = stored_config(run)
        trained_on = config.env.kwargs.get("period", "train")
        is_held_out &= trained_on != period and _ALL not in (trained_on, period)
        walks[run.name] = _walked(run, path, config, period, checkpoint)
    return judge(walks, period=period, n_trials=n_trials, is_held_out=is_held_out)


def _walked(
    run: RunFolder, path: Path | str, config: TrainConfig, period: str, checkpoint: str | None
) -> Walk:
    env = config.evaluated_env
    with closing(build_env_factory(env)()) as played:
        if not isinstance(played.unwrapped, Trading):
            raise ConfigError(
                f"{run.path}: env {env.name} is not a trading env; use the command evaluate"
            )
        task = played.unwrapped.task
    names = ("random",) if task.portfolio else _symbols(env, task)
    whole = {**env.kwargs, "period": period, "random_start": False}
    envs = [build_env_factory(replace(env, kwargs={**whole, "symbol": name}))() for name in names]
    checkpoint = checkpoint or named_checkpoint(path) or best_or_latest(run)
    env_spaces = Spaces(envs[0].observation_space, envs[0].action_space)
    agent, _ = restored_agent(run, config, checkpoint, env_spaces)
    try:
        with torch_threads(torch.device("cpu")):
            return walk(agent, envs)
    finally:
        for each in envs:
            close_env(each)


def _symbols(env: EnvConfig, task: TradingTask) -> tuple[str, ...]:
    """Every symbol of the market, or the one that the run trades."""
    symbol = env.kwargs.get("symbol", "random")
    return (symbol,) if symbol in task.market.symbols else task.market.symbols
