"""init_from=RUN: a new run that starts with the weights of another one.

Only the checkpoint of that run is read, with ``weights_only=True``. Its config names classes, but
nothing imports them, so a folder of another user needs no trust.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ml_pipeline.analysis.listing import newest_run
from ml_pipeline.assembly.compose import ConfigError, find_algorithm
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.errors import UserError, first_line
from ml_pipeline.runs.checkpoint import (
    best_or_latest,
    checkpoint_path,
    load_checkpoint,
    named_checkpoint,
)
from ml_pipeline.runs.console import is_job, say
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.contracts import Agent

_LATEST_RUN = "latest"


def started_from(config: TrainConfig, agent: Agent) -> TrainConfig:
    """Load the weights that ``config.init_from`` names; returns the config with the file's path."""
    given = str(config.init_from)
    start_from = find_algorithm(config).start_from
    if start_from is None:
        raise ConfigError(
            f"init_from={given}: {config.agent.algorithm} cannot start from another run; "
            "give its Algorithm a start_from function"
        )
    try:
        run = RunFolder.open(_newest(Path(config.run_root)) if _is_latest(given) else given)
        name = named_checkpoint(given) or best_or_latest(run)
        state = load_checkpoint(run, name)
        start_from(agent, state["agent"])
        env_steps = int(state["env_steps"])
    except UserError as error:
        raise ConfigError(f"init_from={given}: {error}") from error
    except Exception as error:  # the state of another algorithm, or a damaged one, may raise any
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{first_line(error)}; use the env, network and agent of that run"
        raise ConfigError(f"init_from={given}: {reason}") from error
    path = checkpoint_path(run, name)
    say(f"started from {path}, env step {env_steps:,}, with a new optimiser")
    return dataclasses.replace(config, init_from=str(path))


def _is_latest(given: str) -> bool:
    return given == _LATEST_RUN and not Path(given).exists()


def _newest(root: Path) -> Path:
    if is_job():
        raise ConfigError("jobs of a sweep would find each other; name a run folder")
    return newest_run(root).path
