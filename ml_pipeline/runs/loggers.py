"""Loggers: metrics.csv, which every run has, and Weights & Biases.

A service that does not answer must never block or stop training.
"""

from __future__ import annotations

import csv
import gc
import http.client
import io
import netrc
import os
import shlex
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple
from urllib.parse import urlparse

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import first_line
from ml_pipeline.foreign import TABLE_BYTES, read_regular
from ml_pipeline.runs.console import python_command
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, write_text

_NUMBER, _COMMA, _NEWLINE, _OTHER = range(4)  # the kinds of bytes in a row
_KINDS = bytearray([_OTHER] * 256)
_KINDS[ord(",")], _KINDS[ord("\n")] = _COMMA, _NEWLINE
for _byte in b"0123456789+-.einfa":
    _KINDS[_byte] = _NUMBER
_WANDB_MODES = ("auto", "online", "offline", "disabled")


class CsvLogger:
    """metrics.csv: a row per iteration; a new metric adds a column.

    ``begin`` drops the rows after ``from_env_steps``: a resumed run trains these iterations again.
    """

    def __init__(self, path: Path, *, from_env_steps: int = 0) -> None:
        self._path = path
        self._is_resumed = path.exists()
        rows = read_metrics(path) if self._is_resumed else []
        self._columns: list[str] = list(rows[0]) if rows else []
        self.rows = [row for row in rows if int(row["env_steps"]) <= from_env_steps]
        self._file = self._opened()

    def begin(self) -> None:
        """Call it before ``log`` if the file is that of a resumed run."""
        if self._is_resumed:
            self._rewrite(self.rows)

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        row = {"env_steps": env_steps, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite(read_metrics(self._path))
        # One write per row, so a kill truncates at most the last row.
        try:
            self._file.write(self._text([row], header=False))
            self._file.flush()
        except OSError as error:
            raise RunFolderError(f"could not write {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: Sequence[Mapping[str, object]]) -> None:
        self._file.close()
        write_text(self._path, self._text(rows, header=bool(self._columns)))
        self._file = self._opened()

    def _opened(self) -> IO[str]:
        try:
            return self._path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"could not write {self._path}: {error}") from error

    def _text(self, rows: Sequence[Mapping[str, object]], *, header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv as text; an empty cell means that the metric was not measured.

    A last row that a kill has truncated is left out; any other damage is an error.
    """
    try:
        text = read_regular(path, most_bytes=TABLE_BYTES).decode("utf-8")
        complete = text[: text.rfind("\n") + 1]
        rows = list(csv.DictReader(io.StringIO(complete)))
        for row in rows:
            float(int(row["env_steps"]))
            for value in row.values():
                float(value or 0.0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise RunFolderError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return rows


class Column(NamedTuple):
    """A metric in all rows of a metrics.csv."""

    values: NDArray[np.float64]  # NaN where it was not measured
    measured: NDArray[np.bool_]  # a measured value may be NaN, too


class Columns(NamedTuple):
    """Some columns of a metrics.csv, as arrays."""

    names: list[str]  # of all columns
    first_row: dict[str, str]  # as text; of all columns
    read: dict[str, Column]


def read_columns(path: Path, wanted: Collection[str]) -> Columns:
    """Some columns of a metrics.csv; much faster than ``read_metrics``."""
    try:
        content = read_regular(path, most_bytes=TABLE_BYTES)
        start = (content.find(b"\n") + 1) or len(content)
        names = content[:start].removesuffix(b"\n").decode("utf-8").split(",")
        body = content[start : max(content.rfind(b"\n") + 1, start)]
        if {'"', "\r"} & set("".join(names)):
            raise ValueError("not as CsvLogger writes it")
        starts, ends = _cells(body, n_columns=len(names))
        read = {
            name: _column(body, starts[:, i], ends[:, i], int if name == "env_steps" else float)
            for i, name in enumerate(names)
            if name in wanted
        }
        if not read["env_steps"].measured.all():
            raise ValueError("a row without env_steps")
        first = body.partition(b"\n")[0].decode("utf-8").split(",")
        return Columns(names, dict(zip(names, first, strict=True)) if body else {}, read)
    except (OSError, ValueError, KeyError, OverflowError):
        return as_columns(read_metrics(path), wanted)  # it says what is damaged


def _cells(body: bytes, *, n_columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each cell starts and ends, both [rows, columns].

    100 runs of 5,000 rows have millions of cells: only those that are wanted become objects.
    """
    kinds = np.frombuffer(body.translate(_KINDS), dtype=np.uint8)
    places = np.flatnonzero(kinds != _NUMBER)  # faster than of the bytes
    if len(places) % n_columns:
        raise ValueError("a row has another number of cells than the header")
    starts = np.concatenate([[0], places[:-1] + 1])[: len(places)].reshape(-1, n_columns)
    ends = places.reshape(-1, n_columns)
    expected = [_COMMA] * (n_columns - 1) + [_NEWLINE]
    if (kinds[ends] != expected).any():
        raise ValueError("not as CsvLogger writes it")
    return starts, ends


def _column(
    body: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], parse: Callable[[bytes], float]
) -> Column:
    measured = starts < ends
    places = zip(starts[measured].tolist(), ends[measured].tolist(), strict=True)
    values = np.full(len(starts), np.nan)
    values[measured] = [parse(body[start:end]) for start, end in places]
    return Column(values, measured)


def as_columns(rows: Sequence[Mapping[str, str]], wanted: Collection[str]) -> Columns:
    """Some columns of ``rows``, which ``read_metrics`` returns."""
    first_row = dict(rows[0]) if rows else {}
    names = list(dict.fromkeys(name for row in rows for name in row))
    read = {}
    for name in names:
        if name in wanted:
            cells = [row.get(name) or "" for row in rows]
            values = np.array([float(cell or "nan") for cell in cells])
            read[name] = Column(values, np.array([cell != "" for cell in cells]))
    return Columns(names, first_row, read)


class WandbLogger:
    """Weights & Biases: online if an API key exists, otherwise offline; it never prompts."""

    def __init__(
        self,
        run: RunFolder,
        run_config: Mapping[str, Any],
        sweep: str | None,
        mode: str = "auto",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        timeout_seconds: float = 20.0,
    ) -> None:
        """``group`` defaults to the name of the sweep, or to env and agent for a single run.

        W&B's variables (WANDB_PROJECT, ...) replace the defaults, but not the arguments.
        """
        if mode not in _WANDB_MODES:
            raise ValueError(f"mode must be {' | '.join(_WANDB_MODES)}, got {mode}")
        for name, value in (("project", project), ("entity", entity), ("group", group)):
            if not isinstance(value, str | None):
                raise ValueError(f"{name} must be a string, got {value!r}")
        # Hides W&B's prompt to log in; ``status`` has the important part.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # takes half a second

        self._timeout_seconds = timeout_seconds
        self._sync = f"{python_command()} -m wandb sync {shlex.quote(str(run.shown / 'wandb'))}"
        env_name, agent = str(run_config["env_name"]), str(run_config["agent_name"])
        typed = os.environ.get("WANDB_TAGS", "").split(",")  # as W&B reads it
        all_tags = [env_name, agent, *run_config.get("tags", ()), *(tags or ()), *typed]
        arguments = {
            "project": project or os.environ.get("WANDB_PROJECT") or "ml_pipeline",
            "entity": entity or os.environ.get("WANDB_ENTITY"),
            "group": group or os.environ.get("WANDB_RUN_GROUP") or sweep or f"{env_name}-{agent}",
            "tags": list(dict.fromkeys(filter(None, all_tags))),
            "notes": run_config.get("notes") or os.environ.get("WANDB_NOTES"),
            "job_type": "train",
            "name": run_config.get("name") or os.environ.get("WANDB_NAME") or run.name,
            "id": run.name,  # a resumed run keeps its id
            "resume": "allow",
            "reinit": "create_new",  # jobs of a sweep must not share a run
            "config": dict(run_config),
            # Absolute: W&B's own process may run in another folder.
            "dir": str(run.path.absolute()),
            "settings": wandb.Settings(
                silent=True,
                console="off",
                login_timeout=5,
                init_timeout=timeout_seconds,
                finish_timeout=timeout_seconds,
            ),
        }
        self.hint = ""
        self.wandb_run: Any = None  # None: W&B did not start
        self.mode = mode
        try:
            self._start(wandb, arguments, timeout_seconds)
        except Exception as error:  # W&B refuses some settings
            self.status = f"W&B off: {first_line(error)}"

    def _start(
        self, wandb: ModuleType, arguments: Mapping[str, object], timeout_seconds: float
    ) -> None:
        """Start a run in the requested mode; if that fails, offline; if that fails, not at all."""
        self.mode = self._resolved(self.mode)
        modes, trouble = [self.mode, "offline"], ""
        if self.mode == "online":
            # Check before W&B does: a failed attempt by W&B also delays the exit.
            url = wandb.setup().settings.base_url
            if not server_answers(url, seconds=min(5.0, timeout_seconds)):
                modes.remove("online")
                trouble = ", its server does not answer"
        for mode in dict.fromkeys(modes):
            try:
                self._set_global_mode(wandb, mode)
                self.wandb_run = wandb.init(mode=mode, **arguments)
                self.wandb_run.define_metric("*", step_metric="env_steps")
            except Exception as error:  # W&B may raise anything; training continues
                trouble = trouble or f", {mode} failed: {first_line(error)}"
                wandb.teardown()  # the failed run still owns the id
                continue
            self.status = f"W&B {mode}{trouble}"
            if mode == "offline":
                self.hint = f"upload later with: {self._sync}/offline-*"
            self.mode = mode
            return
        self.status = f"W&B off{trouble}"

    @staticmethod
    def _set_global_mode(wandb: ModuleType, mode: str) -> None:
        """Set the mode of W&B itself, not only of the run.

        Otherwise even an offline run contacts the server at exit, and waits up to 10 seconds.
        """
        if wandb.run is None and wandb.setup().settings.mode != mode:
            wandb.teardown()
            wandb.setup(wandb.Settings(mode=mode))

    def log(self, metrics: Mapping[str, object], *, env_steps: int) -> None:
        if self.wandb_run is None:
            return
        try:
            self.wandb_run.log({**metrics, "env_steps": env_steps})
        except Exception as error:  # W&B's process may have died
            self.status = f"W&B stopped at env step {env_steps:,}: {first_line(error)}"
            self._give_up()

    def log_histograms(self, values: Mapping[str, Any], *, env_steps: int) -> None:
        if self.wandb_run is None:
            return
        import wandb

        finite = {name: array for name, array in values.items() if np.isfinite(array).all()}
        shown = {name: wandb.Histogram(array) for name, array in finite.items()}
        self.log(shown, env_steps=env_steps)

    def log_file(self, path: Path, *, kind: str, env_steps: int) -> None:
        """Log a checkpoint as an artifact, or a video next to the curves."""
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
            self.status = f"W&B could not log {path.name}: {first_line(error)}"

    def close(self) -> None:
        """Upload for at most ``timeout_seconds``; the rest stays on disk."""
        if self.wandb_run is None:
            return
        errors: list[Exception] = []

        def finish() -> None:
            try:
                self.wandb_run.finish()
            except Exception as error:  # as in log
                errors.append(error)

        # In a thread: W&B's own time limit needs its process to answer.
        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(self._timeout_seconds + 5.0)
        if thread.is_alive():
            reason = f"no answer for {self._timeout_seconds + 5.0:.0f} s"
            _kill_wandb_process()
        elif errors:
            reason = first_line(errors[0])
        else:
            return
        self.status = f"W&B did not finish ({reason})"
        self.hint = f"upload with: {self._sync}/*"
        self._give_up()

    def _give_up(self) -> None:
        """Shut W&B down after its process died; otherwise it tries to contact it at exit."""
        import wandb

        self.wandb_run = None
        with suppress(Exception):  # W&B may raise anything
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
    """Whether an HTTP server answers at ``url``, with any status."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # W&B has its own certificates
    except (OSError, http.client.HTTPException):
        return False
    return True


def _kill_wandb_process() -> None:
    """Kill wandb-core, which W&B would otherwise contact again when the program exits.

    W&B has no public way to it, but the garbage collector knows every process we started.
    """
    for each in gc.get_objects():
        if isinstance(each, subprocess.Popen) and "wandb-core" in str(each.args):
            each.kill()


def has_wandb_key() -> bool:
    """Whether W&B can log in without a prompt: a key in the environment or the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
