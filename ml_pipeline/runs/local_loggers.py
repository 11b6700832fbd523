"""Loggers for local dashboards: TensorBoard and Trackio. Neither needs a network."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.extras import import_extra
from ml_pipeline.runs.console import python_command
from ml_pipeline.runs.run_folder import RunFolder, flat

# How a run is computed and recorded; the rest is a hyperparameter.
_NOT_HYPERPARAMETERS = (
    *("callbacks", "logger", "vec_env", "resume", "trust", "objective", "best_metric"),
    *("device", "cpu_threads", "compile", "env_name", "agent_name"),
    *("name", "notes", "tags", "run_root"),
)


class TensorBoardLogger:
    """Scalars, histograms and hyperparameters in the folder tensorboard/ of the run."""

    def __init__(self, run: RunFolder, run_config: Mapping[str, Any], env_steps: int) -> None:
        """``env_steps``: where the run resumes; TensorBoard hides older points after it."""
        import_extra("tensorboard", needed_by="logger=tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = env_steps + 1 if env_steps else None
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)
        self._write_hyperparameters(run_config)
        shown = run.shown / "tensorboard"
        self.status = f"TensorBoard in {shown}"
        self.hint = f"look with: {python_command()} -m tensorboard.main --logdir {shown}"

    def _write_hyperparameters(self, run_config: Mapping[str, Any]) -> None:
        """Declare them with two metrics; the HPARAMS tab shows the last scalar of each.

        ``add_hparams`` of torch would write them as a second run in a subfolder.
        """
        from torch.utils.tensorboard.summary import hparams

        shown = {key: run_config[key] for key in run_config if key not in _NOT_HYPERPARAMETERS}
        metrics = dict.fromkeys((run_config["objective"], run_config["best_metric"]), 0.0)
        experiment, start, _ = hparams(_accepted(shown), metrics)  # type: ignore[no-untyped-call]
        for summary in (experiment, start):
            self._writer.file_writer.add_summary(summary)

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, env_steps)

    def log_histograms(self, values: Mapping[str, NDArray[np.number]], *, env_steps: int) -> None:
        for name, array in values.items():
            if np.isfinite(array).all():
                self._writer.add_histogram(name, array, env_steps)

    def close(self) -> None:
        self._writer.close()


def _accepted(config: Mapping[str, object]) -> dict[str, str | int | float]:
    """Dotted keys, and only the types that TensorBoard accepts."""
    accepted: dict[str, str | int | float] = {}
    for key, value in flat(config).items():
        if isinstance(value, bool):  # torch would write it as a number
            accepted[key] = str(value).lower()
        elif value is not None and value != {}:
            accepted[key] = value if isinstance(value, (int, float)) else str(value)
    return accepted


class TrackioLogger:
    """Trackio's local database; ``trackio show`` opens the dashboard."""

    def __init__(
        self,
        run: RunFolder,
        run_config: Mapping[str, Any],
        sweep: str | None,
        project: str = "ml_pipeline",
    ) -> None:
        self._trackio = import_extra("trackio", needed_by="logger=trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # hides a long greeting
            self._run = self._trackio.init(
                project=project,
                name=run.name,
                group=sweep,
                config=dict(run_config),
                resume="allow",
                embed=False,
            )
        command = Path(python_command()).with_name("trackio")
        self.status = f"Trackio, project {project}"
        self.hint = f"look with: {command} show --project {project}"

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        self._run.log(dict(metrics), step=env_steps)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # after run.finish(), Trackio would finish the run again at exit
