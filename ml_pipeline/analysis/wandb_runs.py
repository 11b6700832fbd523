"""Runs stored at Weights & Biases, downloaded into run folders: ``wandb:ENTITY/PROJECT[/RUN]``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from ml_pipeline.errors import UserError, first_line
from ml_pipeline.runs.console import say
from ml_pipeline.runs.loggers import CsvLogger, has_wandb_key
from ml_pipeline.runs.run_folder import RunFolder, write_text

PREFIX = "wandb:"

_DOWNLOADS = Path("runs/wandb")
_STATUS = {"finished": "finished", "running": "running", "killed": "interrupted"}
_ADDED_KEYS = ("env_name", "agent_name")  # for W&B's tables; not part of a run's config


class WandbError(UserError):
    """W&B has no such runs, or they cannot be downloaded."""


def download(address: str) -> list[Path]:
    """Download runs into runs/wandb, replacing earlier downloads; returns their folders."""
    parts = address.removeprefix(PREFIX).split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise WandbError(f"{address} is not a W&B address; write wandb:ENTITY/PROJECT[/RUN]")
    if not has_wandb_key():
        raise WandbError(f"{address} needs a W&B key; run wandb login, or set WANDB_API_KEY")
    import wandb

    name = "/".join(parts)
    folder = _DOWNLOADS / parts[1]
    try:
        api = wandb.Api(timeout=20)
        found = [api.run(name)] if len(parts) == 3 else list(api.runs(name))
        folders = [_save(run, folder / run.id) for run in found]
    except UserError:
        raise
    except Exception as error:  # W&B raises many types
        raise WandbError(f"{address} cannot be read: {first_line(error)}") from error
    if not folders:
        raise WandbError(f"{address} has no runs")
    say(f"{address}: {len(folders)} runs downloaded to {folder}")
    return folders


def _save(wandb_run: Any, path: Path) -> Path:
    run = RunFolder(path)
    run.make()
    config = {
        name: value
        for name, value in wandb_run.config.items()
        if name not in _ADDED_KEYS and not name.startswith("_")
    }
    write_text(run.config, yaml.safe_dump(config, sort_keys=False))
    run.metrics.unlink(missing_ok=True)
    log = CsvLogger(run.metrics)
    for row in wandb_run.scan_history():
        metrics = {name: value for name, value in row.items() if _is_metric(name, value)}
        if "env_steps" in metrics:
            log.log({**metrics, "env_steps": int(metrics["env_steps"])}, env_steps=0)
    log.close()
    run.update_summary(
        {
            "status": _STATUS.get(wandb_run.state, "failed"),
            "git_commit": wandb_run.commit,
            "seconds": wandb_run.summary.get("_runtime"),
            "wandb": wandb_run.url,
        }
    )
    return path


def _is_metric(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and not name.startswith("_")
