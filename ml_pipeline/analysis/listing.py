"""The list of runs under a folder, and the removal of some of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ml_pipeline.errors import UserError
from ml_pipeline.runs.run_folder import RunFolder


class RunInfo(NamedTuple):
    """One line of the list."""

    run: RunFolder
    status: str  # "died" if the summary says running, but no process trains it
    summary: dict[str, Any]


def find_runs(root: Path) -> list[RunInfo]:
    """The runs under ``root``, a folder such as runs/, newest last."""
    if not root.is_dir():
        raise UserError(f"--root {root}: not a folder; runs/ is in the folder where you train")
    folders = sorted(path.parent for path in root.glob("*/*/config.yaml"))
    return sorted((_info(RunFolder(path)) for path in folders), key=lambda info: info.run.name)


def _info(run: RunFolder) -> RunInfo:
    try:
        summary = run.read_summary()
    except UserError:  # a damaged run is also listed
        summary = {}
    status = str(summary.get("status", "unknown"))
    if status == "running" and not run.is_locked():
        status = "died"
    return RunInfo(run, status, summary)


def runs_table(runs: Sequence[RunInfo]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    for title in ("env", "agent"):
        table.add_column(title)
    for title in ("seed", "env steps", "return"):
        table.add_column(title, justify="right")
    for title in ("status", "started"):
        table.add_column(title)
    for info in runs:
        facts = info.summary
        env_steps, mean = facts.get("env_steps"), facts.get("mean_reward")
        table.add_row(
            str(info.run.path),
            str(facts.get("env", "-")),
            str(facts.get("agent", "-")),
            str(facts.get("seed", "-")),
            f"{env_steps:,}" if isinstance(env_steps, int) else "-",
            f"{mean:.1f}" if isinstance(mean, float) else "-",
            info.status,
            str(facts.get("started", "-"))[:16].replace("T", " "),
        )
    return table


def prune(runs: Sequence[RunInfo]) -> None:
    """Remove run folders; raises ``RunFolderError`` for one that a process is training."""
    for info in runs:
        with info.run.locked():
            try:
                shutil.rmtree(info.run.path)
            except OSError as error:
                raise UserError(f"could not remove {info.run.path}: {error}") from error
