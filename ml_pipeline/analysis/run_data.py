"""RunData: the config and the metrics of a run, and the checks before several are compared."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ml_pipeline.analysis.settings import is_class
from ml_pipeline.analysis.statistics import Array
from ml_pipeline.errors import UserError
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, PHASE
from ml_pipeline.moved import moved
from ml_pipeline.runs.loggers import Column, Columns, read_columns
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, flat

_OF_THE_MACHINE = ("time/", "workers/", "gpu/")  # metrics that differ between equal runs
_ITERATION_SECONDS = "time/iteration_seconds"
_AUTO = "ml_pipeline.policy.auto_network.auto"  # chooses a network by the observation
_ALWAYS_READ = ("env_steps", _ITERATION_SECONDS, EVAL_RETURN, MEAN_RETURN, PHASE)


class ComparisonError(UserError):
    """These runs cannot be compared in this way."""


class RunData(NamedTuple):
    """The config and the metrics of one run."""

    run: RunFolder
    config: dict[str, object]  # flat: "agent.gamma" -> 0.99
    summary: dict[str, object]
    metrics: Columns  # of metrics.csv

    @property
    def env(self) -> str:
        return str(self.config.get("env.target") or self.config.get("env.id"))

    @property
    def env_name(self) -> str:
        """The same, of a class without its module."""
        target = self.config.get("env.target")
        return str(target).rpartition(".")[2] if target else str(self.config.get("env.id"))

    @property
    def best_metric(self) -> str:
        return str(self.config.get("best_metric", EVAL_RETURN))

    @property
    def env_steps(self) -> int:
        return int(self.metrics.read["env_steps"].values[-1])

    def shares_seed(self, other: RunData) -> bool:
        """Whether both runs have the same seed, or began as the same run.

        A copied run folder can be resumed with another seed; its first iteration stays.
        """
        if self.config.get("seed") == other.config.get("seed"):
            return True
        first = self._first_iteration()
        return any(key.startswith("loss/") for key in first) and first == other._first_iteration()

    def _first_iteration(self) -> dict[str, str]:
        row = self.metrics.first_row
        return {k: v for k, v in row.items() if v and not k.startswith(_OF_THE_MACHINE)}

    def curve(self, metric: str) -> tuple[Array, Array]:
        """Env steps and values of the rows that have the metric."""
        values, measured = self._column(metric)
        return self.metrics.read["env_steps"].values[measured], values[measured]

    def seconds(self, metric: str) -> Array:
        """Training time so far, of the rows that have the metric; nan if it was not logged."""
        passed = np.nancumsum(self._column(_ITERATION_SECONDS).values)
        passed[passed == 0.0] = np.nan
        return passed[self._column(metric).measured]

    def final(self, metric: str) -> float:
        values = self.curve(metric)[1]
        return float(values[-1]) if len(values) else float("nan")

    def steps_per_second(self) -> float:
        seconds = float(np.nansum(self._column(_ITERATION_SECONDS).values))
        steps = self.metrics.read["env_steps"].values
        n_rows = len(steps)
        # The first row does not say where it started; assume the mean of the other rows.
        gained = (steps[-1] - steps[0]) * n_rows / (n_rows - 1) if n_rows > 1 else steps[-1]
        return float(gained / seconds) if seconds else float("nan")

    def known_metrics(self) -> set[str]:
        """The columns, without those that were read and have no value."""
        read = self.metrics.read
        return {
            name for name in self.metrics.names if name not in read or read[name].measured.any()
        }

    def _column(self, metric: str) -> Column:
        """A column that was read; without values if no row has it."""
        n_rows = len(self.metrics.read["env_steps"].values)
        nothing = Column(np.full(n_rows, np.nan), np.zeros(n_rows, dtype=bool))
        return self.metrics.read.get(metric, nothing)


def read_run(
    path: Path | str,
    config: Mapping[str, object],
    metric: str | None = None,
    *,
    trust: bool = False,
) -> RunData:
    """``config`` is the run's config as nested plain dicts; ``metric`` is also read."""
    run = RunFolder.open(path, trust=trust)
    if not run.metrics.is_file():
        raise RunFolderError(f"{path} has no metrics.csv: the run ended before its first iteration")
    metrics = read_columns(
        run.metrics, {*_ALWAYS_READ, str(config.get("best_metric")), metric or ""}
    )
    if not metrics.first_row:
        raise RunFolderError(f"{path} has no rows in metrics.csv: no iteration has finished")
    values = {
        key: moved(str(each)) if _is_path(key, each) else each for key, each in flat(config).items()
    }
    return RunData(run, values, run.read_summary(), metrics)


def _is_path(key: str, value: object) -> bool:
    return value is not None and (is_class(key) or key in ("env.target", "eval_env.target"))


def with_chosen_networks(runs: Sequence[RunData]) -> list[RunData]:
    """The runs, with the network that was chosen in place of network=auto.

    ``summary.json`` has it; without it, that of a run with the same env and network settings.
    """
    chosen = {
        _env_and_network(run.config): network
        for run in runs
        if isinstance(network := run.summary.get("network"), dict) and "_target_" in network
    }
    return [_with_network(run, chosen.get(_env_and_network(run.config))) for run in runs]


def _env_and_network(config: Mapping[str, object]) -> str:
    parts = "env.", "network.", "agent.action_mask"
    return str(sorted((key, each) for key, each in config.items() if key.startswith(parts)))


def _with_network(run: RunData, network: Mapping[str, object] | None) -> RunData:
    if network is None or run.config.get("network._target_") != _AUTO:
        return run
    others = {key: each for key, each in run.config.items() if not key.startswith("network.")}
    return run._replace(config={**others, **flat(network, "network.")})


def chosen_metric(runs: Sequence[RunData], wanted: str | None) -> str:
    """``wanted``, or the first ``best_metric`` that all runs have, or the training return."""
    everywhere = sorted(set.intersection(*(run.known_metrics() for run in runs)))
    if wanted is None:
        return next((r.best_metric for r in runs if r.best_metric in everywhere), MEAN_RETURN)
    if wanted not in everywhere:
        hint = did_you_mean(wanted, everywhere)
        raise ComparisonError(f"--metric {wanted}: not in metrics.csv of every run{hint}")
    return wanted


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of an error message about an unknown name."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; did you mean {' or '.join(near)}?" if near else ""
