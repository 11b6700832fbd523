"""Comparison of runs: one row each, with what differs in their configs, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ml_pipeline.errors import UserError
from ml_pipeline.extras import import_extra
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

_CURVES = ("rollout/episode_return_mean_100", "eval/episode_return")


class RunData(NamedTuple):
    """What is read of one run."""

    run: RunFolder
    config: dict[str, Any]  # flat: "agent.gamma" -> 0.99
    summary: dict[str, Any]
    rows: list[dict[str, str]]  # metrics.csv

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Env steps and values, where the metric was taken."""
        taken = [row for row in self.rows if row.get(metric)]
        return [int(row["env_steps"]) for row in taken], [float(row[metric]) for row in taken]


def read_run(path: Path | str, config: Mapping[str, Any]) -> RunData:
    """``config`` is the run's config as nested plain dicts."""
    run = RunFolder.open(path)
    if not run.metrics.is_file():
        raise RunFolderError(f"{path} has no metrics.csv: it ended before its first iteration")
    return RunData(run, _flat(config), run.read_summary(), read_metrics(run.metrics))


def comparison_table(runs: Sequence[RunData]) -> Table:
    """A row per run; of the configs only the keys that differ."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    differing = differing_keys([run.config for run in runs])
    for title in ("run", "status", *differing):
        table.add_column(title, overflow="fold")
    for title in ("env steps", "mean(100)", "best eval", "last eval", "seconds"):
        table.add_column(title, justify="right")
    for data in runs:
        _, means = data.curve(_CURVES[0])
        _, evals = data.curve(_CURVES[1])
        env_steps = int(data.rows[-1]["env_steps"]) if data.rows else 0
        table.add_row(
            str(data.run.path),
            str(data.summary.get("status", "unknown")),
            *(str(data.config.get(key, "-")) for key in differing),
            f"{env_steps:,}",
            f"{means[-1]:.1f}" if means else "-",
            f"{max(evals):.1f}" if evals else "-",
            f"{evals[-1]:.1f}" if evals else "-",
            str(data.summary.get("seconds", "-")),
        )
    return table


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all configs, in the order of the first."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]


def draw_curves(runs: Sequence[RunData], path: Path) -> None:
    """Learning curves by env steps: training episodes on the left, evaluations on the right."""
    import_extra("matplotlib", needed_by="compare --plot")
    from matplotlib.figure import Figure

    differing = differing_keys([run.config for run in runs])
    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = ("return of training episodes, mean of 100", "return of greedy evaluation")
    for axes, metric, title in zip(
        figure.subplots(1, 2, sharey=True), _CURVES, titles, strict=True
    ):
        for data in runs:
            label = ", ".join(f"{key}={data.config.get(key, '-')}" for key in differing)
            axes.plot(*data.curve(metric), label=label or data.run.name)
        axes.set_title(title)
        axes.set_xlabel("env steps")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    names = sorted({str(data.summary.get("env", "")) for data in runs})
    figure.suptitle(", ".join(names))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written: {error}") from error


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
