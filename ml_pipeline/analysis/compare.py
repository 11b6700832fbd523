"""Comparison of runs: reads them, groups those that differ only by seed, and makes tables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis.statistics import Array, verdict, with_interval
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

# The seed, over which a group averages, and keys that have no effect on learning.
_NOT_COMPARED = (
    *("seed", "device", "resume", "trust"),
    *("objective", "best_metric", "vec_env.", "logger."),
)


class ComparisonError(UserError):
    """These runs cannot be compared in this way."""


class RunData(NamedTuple):
    """The config and the metrics of one run."""

    run: RunFolder
    config: dict[str, Any]  # flat: "agent.gamma" -> 0.99
    summary: dict[str, Any]
    rows: list[dict[str, str]]  # metrics.csv

    @property
    def env(self) -> str:
        return str(self.config.get("env.target") or self.config.get("env.id"))

    @property
    def best_metric(self) -> str:
        return str(self.config.get("best_metric", EVAL_RETURN))

    @property
    def env_steps(self) -> int:
        return int(self.rows[-1]["env_steps"]) if self.rows else 0

    def curve(self, metric: str) -> tuple[Array, Array]:
        """Env steps and values of the rows that have the metric."""
        rows = [row for row in self.rows if row.get(metric)]
        return _column(rows, "env_steps"), _column(rows, metric)

    def seconds(self, metric: str) -> Array:
        """Training time so far, of the rows that have the metric."""
        passed = np.cumsum([float(row.get("time/iteration_seconds") or 0) for row in self.rows])
        return passed[[bool(row.get(metric)) for row in self.rows]]

    def final(self, metric: str) -> float:
        values = self.curve(metric)[1]
        return float(values[-1]) if len(values) else float("nan")

    def steps_per_second(self) -> float:
        seconds = float(_column(self.rows, "time/iteration_seconds").sum())
        first = int(self.rows[0]["env_steps"]) if self.rows else 0
        n_rows = len(self.rows)
        # The first row does not say where it started; assume the mean of the other rows.
        steps = (self.env_steps - first) * n_rows / (n_rows - 1) if n_rows > 1 else self.env_steps
        return steps / seconds if seconds else float("nan")


class Group(NamedTuple):
    """Runs that differ only by seed."""

    label: str
    runs: list[RunData]

    def finals(self, metric: str) -> Array:
        values = np.array([run.final(metric) for run in self.runs])
        return np.asarray(values[np.isfinite(values)])


def read_run(path: Path | str, config: Mapping[str, Any]) -> RunData:
    """``config`` is the run's config as nested plain dicts."""
    run = RunFolder.open(path)
    if not run.metrics.is_file():
        raise RunFolderError(f"{path} has no metrics.csv: the run ended before its first iteration")
    rows = read_metrics(run.metrics)
    if not rows:
        raise RunFolderError(f"{path} has no rows in metrics.csv: no iteration has finished")
    return RunData(run, _flat(config), run.read_summary(), rows)


def check_one_env(runs: Sequence[RunData]) -> None:
    """Refuse runs of different envs: their returns cannot be compared."""
    envs = sorted({run.env for run in runs})
    if len(envs) > 1:
        raise ComparisonError(
            f"these runs use {len(envs)} envs, whose returns cannot be compared: "
            f"{', '.join(envs)}; name runs of one env"
        )


def chosen_metric(runs: Sequence[RunData], wanted: str | None) -> str:
    """``wanted``, or the first ``best_metric`` that all runs have, or the training return."""
    known = [{name for row in run.rows for name, value in row.items() if value} for run in runs]
    everywhere = sorted(set.intersection(*known))
    if wanted is None:
        return next((r.best_metric for r in runs if r.best_metric in everywhere), MEAN_RETURN)
    if wanted not in everywhere:
        hint = _did_you_mean(wanted, everywhere)
        raise ComparisonError(f"--metric {wanted}: not in metrics.csv of every run{hint}")
    return wanted


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ between configs, in the order of the configs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]


def grouped(runs: Sequence[RunData], by: Sequence[str] = ()) -> list[Group]:
    """Group by the keys ``by``, or by all differing keys that can affect learning."""
    configs = [run.config for run in runs]
    known = sorted({name for config in configs for name in config})
    for key in by:
        if key not in known:
            hint = _did_you_mean(key, known)
            raise ComparisonError(f"--by {key}: not a config key of these runs{hint}")
    keys = list(by) or [k for k in differing_keys(configs) if not k.startswith(_NOT_COMPARED)]
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        label = ", ".join(f"{key}={run.config.get(key, '-')}" for key in keys) or "all runs"
        groups.setdefault(label, []).append(run)
    return [Group(label, members) for label, members in groups.items()]


def verdicts(groups: Sequence[Group], metric: str) -> list[str]:
    """One line per pair of groups: the claim that their runs support."""
    if len(groups) == 1:
        n_runs = len(groups[0].finals(metric))
        return ["one run: an interval needs at least two"] if n_runs == 1 else []
    lines = []
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            finals = group.finals(metric), other.finals(metric)
            lines.append(verdict(group.label, finals[0], other.label, finals[1]))
    return lines


def comparison_table(runs: Sequence[RunData]) -> Table:
    """A row per run, with the config keys that differ."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    differing = differing_keys([run.config for run in runs])
    for title in ("run", "status", *differing):
        table.add_column(title, overflow="fold")
    for title in ("env steps", "mean(100)", "best eval", "last eval", "seconds"):
        table.add_column(title, justify="right")
    for data in runs:
        evals = data.curve(EVAL_RETURN)[1]
        table.add_row(
            str(data.run.path),
            str(data.summary.get("status", "unknown")),
            *(str(data.config.get(key, "-")) for key in differing),
            f"{data.env_steps:,}",
            _shown(data.final(MEAN_RETURN)),
            _shown(evals.max() if len(evals) else float("nan")),
            _shown(data.final(EVAL_RETURN)),
            str(data.summary.get("seconds", "-")),
        )
    return table


def groups_table(groups: Sequence[Group], metric: str) -> Table:
    """A row per group: the interquartile mean over its runs, with its interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("group", overflow="fold")
    for title in ("seeds", f"{metric}, IQM", "95 % interval", "env steps/s"):
        table.add_column(title, justify="right")
    for row in group_rows(groups, metric):
        table.add_row(*row)
    return table


def group_rows(groups: Sequence[Group], metric: str) -> list[list[str]]:
    """Per group: label, number of runs, interquartile mean, its interval, env steps per second."""
    rows = []
    for group in groups:
        finals = group.finals(metric)
        value, low, high = with_interval(finals) if len(finals) else [np.array(np.nan)] * 3
        interval = f"{low:.1f} to {high:.1f}" if np.isfinite(low) else "-"
        speed = float(np.median([run.steps_per_second() for run in group.runs]))
        rows.append(
            [group.label, str(len(group.runs)), _shown(float(value)), interval, f"{speed:,.0f}"]
        )
    return rows


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _shown(value: float) -> str:
    return f"{value:.1f}" if np.isfinite(value) else "-"


def _column(rows: Iterable[Mapping[str, str]], name: str) -> Array:
    return np.array([float(row.get(name) or "nan") for row in rows])


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
