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
from ml_pipeline.runs.run_folder import RunFolder


class TensorBoardLogger:
    """Scalars and histograms in the folder tensorboard/ of the run."""

    def __init__(self, run: RunFolder, env_steps: int) -> None:
        """``env_steps``: where the run resumes; TensorBoard hides older points after it."""
        import_extra("tensorboard", needed_by="logger=tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge = env_steps + 1 if env_steps else None
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)
        shown = run.shown / "tensorboard"
        self.status = f"TensorBoard: {python_command()} -m tensorboard.main --logdir {shown}"

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, env_steps)

    def log_histograms(self, values: Mapping[str, NDArray[Any]], *, env_steps: int) -> None:
        for name, array in values.items():
            if np.isfinite(array).all():
                self._writer.add_histogram(name, array, env_steps)

    def close(self) -> None:
        self._writer.close()


class TrackioLogger:
    """Trackio's local database; ``trackio show`` opens the dashboard."""

    def __init__(
        self,
        run: RunFolder,
        run_config: Mapping[str, Any],
        sweep: str | None,
        project: str = "ml_pipeline",
    ) -> None:
        self._trackio: Any = import_extra("trackio", needed_by="logger=trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # hides a long greeting
            self._run: Any = self._trackio.init(
                project=project,
                name=run.name,
                group=sweep,
                config=dict(run_config),
                resume="allow",
                embed=False,
            )
        command = Path(python_command()).with_name("trackio")
        self.status = f"Trackio: {command} show --project {project}"

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        self._run.log(dict(metrics), step=env_steps)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # after run.finish(), Trackio would finish the run again at exit
