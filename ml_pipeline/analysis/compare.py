"""Comparison of runs: read, put into groups that differ by more than the seed, and tabulated."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ml_pipeline.analysis.statistics import Array, verdict, with_interval
from ml_pipeline.errors import UserError
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError

EVALUATION, TRAINING = "eval/episode_return", "rollout/episode_return_mean_100"

# What does not change a result, or is what a group is made of.
_NOT_COMPARED = ("seed", "device", "resume", "trust", "objective", "vec_env.", "logger.")


class ComparisonError(UserError):
    """These runs cannot be put side by side as asked."""


class RunData(NamedTuple):
    """What is read of one run."""

    run: RunFolder
    config: dict[str, Any]  # flat: "agent.gamma" -> 0.99
    summary: dict[str, Any]
    rows: list[dict[str, str]]  # metrics.csv

    @property
    def env(self) -> str:
        return str(self.config.get("env.target") or self.config.get("env.id"))

    @property
    def env_steps(self) -> int:
        return int(self.rows[-1]["env_steps"]) if self.rows else 0

    def curve(self, metric: str) -> tuple[Array, Array]:
        """Env steps and values, where the metric was taken."""
        taken = [row for row in self.rows if row.get(metric)]
        return _column(taken, "env_steps"), _column(taken, metric)

    def seconds(self, metric: str) -> Array:
        """Training time so far, where the metric was taken."""
        passed = np.cumsum([float(row.get("time/iteration_seconds") or 0) for row in self.rows])
        return passed[[bool(row.get(metric)) for row in self.rows]]

    def final(self, metric: str) -> float:
        values = self.curve(metric)[1]
        return float(values[-1]) if len(values) else float("nan")

    def steps_per_second(self) -> float:
        seconds = float(_column(self.rows, "time/iteration_seconds").sum())
        first = int(self.rows[0]["env_steps"]) if self.rows else 0
        n_rows = len(self.rows)
        # The steps of the first row are as many as those between two rows.
        steps = (self.env_steps - first) * n_rows / (n_rows - 1) if n_rows > 1 else self.env_steps
        return steps / seconds if seconds else float("nan")


class Group(NamedTuple):
    """Runs that differ by no more than their seeds."""

    label: str
    runs: list[RunData]

    def finals(self, metric: str) -> Array:
        values = np.array([run.final(metric) for run in self.runs])
        return np.asarray(values[np.isfinite(values)])


def read_run(path: Path | str, config: Mapping[str, Any]) -> RunData:
    """``config`` is the run's config as nested plain dicts."""
    run = RunFolder.open(path)
    if not run.metrics.is_file():
        raise RunFolderError(f"{path} has no metrics.csv: it ended before its first iteration")
    rows = read_metrics(run.metrics)
    if not rows:
        raise RunFolderError(f"{path} has no rows in metrics.csv: it has trained nothing yet")
    return RunData(run, _flat(config), run.read_summary(), rows)


def check_one_env(runs: Sequence[RunData]) -> None:
    """Returns of different envs are no quantities of one kind."""
    envs = sorted({run.env for run in runs})
    if len(envs) > 1:
        raise ComparisonError(
            f"these runs are of {len(envs)} envs, whose returns cannot be compared: "
            f"{', '.join(envs)}; name runs of one env"
        )


def chosen_metric(runs: Sequence[RunData], wanted: str | None) -> str:
    """``wanted``, if all runs have it; else evaluation where all have one, else training."""
    known = [{name for row in run.rows for name, value in row.items() if value} for run in runs]
    everywhere = sorted(set.intersection(*known))
    if wanted is None:
        return EVALUATION if EVALUATION in everywhere else TRAINING
    if wanted not in everywhere:
        near = difflib.get_close_matches(wanted, everywhere, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ComparisonError(f"--metric {wanted} is not in metrics.csv of every run{hint}")
    return wanted


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all configs, in the order of the first."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]


def grouped(runs: Sequence[RunData], by: Sequence[str] = ()) -> list[Group]:
    """By the keys ``by``, or by all that differ and can change a result, but for the seed."""
    configs = [run.config for run in runs]
    for key in by:
        if not any(key in config for config in configs):
            known = sorted({name for config in configs for name in config})
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ComparisonError(f"--by {key} is no key of these runs' configs{hint}")
    keys = list(by) or [k for k in differing_keys(configs) if not k.startswith(_NOT_COMPARED)]
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        label = ", ".join(f"{key}={run.config.get(key, '-')}" for key in keys) or "all runs"
        groups.setdefault(label, []).append(run)
    return [Group(label, members) for label, members in groups.items()]


def verdicts(groups: Sequence[Group], metric: str) -> list[str]:
    """What may be claimed of each pair, in one line; of a single group, how sure its figure is."""
    if len(groups) == 1:
        n_runs = len(groups[0].finals(metric))
        return ["one run: no interval can be drawn"] if n_runs == 1 else []
    lines = []
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            finals = group.finals(metric), other.finals(metric)
            lines.append(verdict(group.label, finals[0], other.label, finals[1]))
    return lines


def comparison_table(runs: Sequence[RunData]) -> Table:
    """A row per run; of the configs only the keys that differ."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    differing = differing_keys([run.config for run in runs])
    for title in ("run", "status", *differing):
        table.add_column(title, overflow="fold")
    for title in ("env steps", "mean(100)", "best eval", "last eval", "seconds"):
        table.add_column(title, justify="right")
    for data in runs:
        evals = data.curve(EVALUATION)[1]
        table.add_row(
            str(data.run.path),
            str(data.summary.get("status", "unknown")),
            *(str(data.config.get(key, "-")) for key in differing),
            f"{data.env_steps:,}",
            _shown(data.final(TRAINING)),
            _shown(evals.max() if len(evals) else float("nan")),
            _shown(data.final(EVALUATION)),
            str(data.summary.get("seconds", "-")),
        )
    return table


def groups_table(groups: Sequence[Group], metric: str) -> Table:
    """A row per group: the interquartile mean over its seeds with its interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("group", overflow="fold")
    for title in ("seeds", f"{metric}, IQM", "95 % interval", "env steps/s"):
        table.add_column(title, justify="right")
    for group in groups:
        finals = group.finals(metric)
        shown = ["-", "-"]
        if len(finals):
            value, low, high = with_interval(finals)
            shown = [_shown(float(value)), f"{_shown(float(low))} to {_shown(float(high))}"]
        speed = float(np.median([run.steps_per_second() for run in group.runs]))
        table.add_row(group.label, str(len(group.runs)), *shown, f"{speed:,.0f}")
    return table


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
