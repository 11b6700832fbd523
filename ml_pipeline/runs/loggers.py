"""Loggers: where the metrics of a run go. The local record is always on; W&B is never in the way.

Nothing here may block or fail a training because a service is away.
"""

from __future__ import annotations

import csv
import http.client
import io
import netrc
import os
import shlex
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlparse

import numpy as np

from ml_pipeline.errors import first_line
from ml_pipeline.runs.console import python_command
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, write_text

_WANDB_MODES = ("auto", "online", "offline", "disabled")


class CsvLogger:
    """metrics.csv: a row an iteration; a metric that comes later adds its column.

    Rows beyond ``from_env_steps`` are dropped: they were written after the checkpoint that the
    run resumes from, and will be written again.
    """

    def __init__(self, path: Path, *, from_env_steps: int = 0) -> None:
        self._path = path
        self._columns: list[str] = []
        if path.exists():
            rows = read_metrics(path)
            self._columns = list(rows[0]) if rows else []
            kept = [row for row in rows if int(row["env_steps"]) <= from_env_steps]
            write_text(path, self._text(kept, header=bool(rows)))
        self._file = self._opened()

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        row = {"env_steps": env_steps, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        # One write per row, so that a kill cuts at most the last one.
        try:
            self._file.write(self._text([row], header=False))
            self._file.flush()
        except OSError as error:
            raise RunFolderError(f"could not write {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, names: list[str]) -> None:
        self._file.close()
        rows = read_metrics(self._path)
        self._columns += names
        write_text(self._path, self._text(rows, header=True))
        self._file = self._opened()

    def _opened(self) -> IO[str]:
        try:
            return self._path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"could not write {self._path}: {error}") from error

    def _text(self, rows: list[Any], *, header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv as they stand there; an empty cell is a metric not taken.

    A last row that a kill has cut off is left out; any other damage is an error.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = list(csv.DictReader(io.StringIO(whole)))
        for row in rows:
            int(row["env_steps"])
            for value in row.values():
                float(value or 0.0)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise RunFolderError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return rows


def last_values(path: Path) -> dict[str, float]:
    """The last value of each metric in a metrics.csv; empty for a run that begins."""
    rows = read_metrics(path)
    return {name: float(value) for row in rows for name, value in row.items() if value}


class WandbLogger:
    """Weights & Biases: online only if a key is there, offline otherwise, and never a prompt."""

    def __init__(
        self,
        run: RunFolder,
        run_config: Mapping[str, Any],
        sweep: str | None,
        mode: str = "auto",
        project: str = "ml_pipeline",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        timeout_seconds: float = 20.0,
    ) -> None:
        """``group`` None: the name of the sweep, or env and agent for a single run."""
        if mode not in _WANDB_MODES:
            raise ValueError(f"mode must be {' | '.join(_WANDB_MODES)}, got {mode}")
        for name, value in (("project", project), ("entity", entity), ("group", group)):
            if not isinstance(value, str | None):
                raise ValueError(f"{name} must be text, got {value!r}")
        # W&B's own messages ask to log in and name hosts; the console says what matters instead.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # half a second, for those who use it

        self._sync = f"{python_command()} -m wandb sync {shlex.quote(str(run.path / 'wandb'))}"
        env_name, agent = str(run_config["env_name"]), str(run_config["agent_name"])
        arguments: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group or sweep or f"{env_name}-{agent}",
            "tags": [env_name, agent, *(tags or [])],
            "job_type": "train",
            "name": run.name,
            "id": run.name,  # a resumed run goes on under the same id
            "resume": "allow",
            "reinit": "create_new",  # never the run of another job of a sweep
            "config": dict(run_config),
            # Absolute: W&B's own process may have been started in another folder.
            "dir": str(run.path.absolute()),
            "settings": wandb.Settings(
                silent=True,
                console="off",
                login_timeout=5,
                init_timeout=timeout_seconds,
                finish_timeout=timeout_seconds,
            ),
        }
        self.wandb_run: Any = None  # None: W&B could not be started at all
        self.mode = mode
        try:
            self._start(wandb, arguments, timeout_seconds)
        except Exception as error:  # settings of its own that W&B itself refuses
            self.status = f"W&B off: {first_line(error)}"

    def _start(self, wandb: Any, arguments: Mapping[str, Any], timeout_seconds: float) -> None:
        """Begin a run in the mode asked for, or offline where that fails, or not at all."""
        self.mode = self._resolved(self.mode)
        modes, trouble = [self.mode, "offline"], ""
        if self.mode == "online":
            # Asked before W&B is: once it has tried in vain, it also delays the program's exit.
            url = wandb.setup().settings.base_url
            if not server_answers(url, seconds=min(5.0, timeout_seconds)):
                modes.remove("online")
                trouble = ", its server does not answer"
        for mode in dict.fromkeys(modes):
            try:
                self._settle(wandb, mode)
                self.wandb_run = wandb.init(mode=mode, **arguments)
                self.wandb_run.define_metric("*", step_metric="env_steps")
            except Exception as error:  # whatever W&B raises, the training goes on
                trouble = trouble or f", {mode} failed: {first_line(error)}"
                wandb.teardown()  # the failed run still holds the id
                continue
            self.status = f"W&B {mode}{trouble}"
            if mode == "offline":
                self.status += f"; upload later with: {self._sync}/offline-*"
            self.mode = mode
            return
        self.status = f"W&B off{trouble}"

    @staticmethod
    def _settle(wandb: Any, mode: str) -> None:
        """Let the mode hold for W&B as a whole, not for the run alone.

        Otherwise even an offline run reports to the server when the program exits, and waits for
        it: 10 seconds where nothing answers.
        """
        if wandb.run is None and wandb.setup().settings.mode != mode:
            wandb.teardown()
            wandb.setup(wandb.Settings(mode=mode))

    def log(self, metrics: Mapping[str, Any], *, env_steps: int) -> None:
        if self.wandb_run is None:
            return
        try:
            self.wandb_run.log({**metrics, "env_steps": env_steps})
        except Exception as error:  # its own process may have died; the local record goes on
            self.status = f"W&B lost the run at env step {env_steps:,}: {first_line(error)}"
            self._give_up()

    def log_histograms(self, values: Mapping[str, Any], *, env_steps: int) -> None:
        if self.wandb_run is None:
            return
        import wandb

        finite = {name: array for name, array in values.items() if np.isfinite(array).all()}
        shown = {name: wandb.Histogram(array) for name, array in finite.items()}
        self.log(shown, env_steps=env_steps)

    def log_file(self, path: Path, *, kind: str, env_steps: int) -> None:
        """A checkpoint becomes an artifact, a video is shown beside the curves."""
        if self.wandb_run is None:
            return
        import wandb

        try:
            if kind == "video":
                self.wandb_run.log({kind: wandb.Video(str(path)), "env_steps": env_steps})
            else:
                artifact = wandb.Artifact(f"{self.wandb_run.id}-{kind}", type=kind)
                artifact.add_file(str(path))
                self.wandb_run.log_artifact(artifact)
        except Exception as error:  # as in log
            self.status = f"W&B did not take {path.name}: {first_line(error)}"

    def close(self) -> None:
        """Finish the upload within ``timeout_seconds``; what is left stays on the disk."""
        if self.wandb_run is None:
            return
        try:
            self.wandb_run.finish()
        except Exception as error:  # as in log
            self.status = f"W&B did not finish ({first_line(error)}); sync with: {self._sync}/*"
            self._give_up()

    def _give_up(self) -> None:
        """Let go of a W&B whose own process is gone; at exit it would still try to reach it."""
        import wandb

        self.wandb_run = None
        with suppress(Exception):  # whatever it raises: this is the end of it
            wandb.teardown()

    @staticmethod
    def _resolved(mode: str) -> str:
        if mode != "auto":
            return mode
        if os.environ.get("WANDB_MODE") in _WANDB_MODES[1:]:
            return os.environ["WANDB_MODE"]
        if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
            return "disabled"
        return "online" if has_wandb_key() else "offline"


def server_answers(url: str, *, seconds: float) -> bool:
    """Whether anything that speaks HTTP answers at ``url``; what it says does not matter."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # W&B brings certificates of its own
    except (OSError, http.client.HTTPException):
        return False
    return True


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking: a key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
