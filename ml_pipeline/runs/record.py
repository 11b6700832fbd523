"""Record: metrics.csv, summary.json, the loggers and the first and last console lines of a run."""

from __future__ import annotations

import math
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, shown_return
from ml_pipeline.runs.checkpoint import LATEST, checkpoint_path
from ml_pipeline.runs.console import ConsoleLogger, is_job, say, typed_training, user_command
from ml_pipeline.runs.loggers import CsvLogger
from ml_pipeline.runs.run_folder import RunFolder, RunFolderError, write_text
from ml_pipeline.runs.source_code import Code, package_code, user_code
from ml_pipeline.training.contracts import Logger


class LastValues:
    """Keeps the last value of each metric; ``rows`` are those of metrics.csv so far."""

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        self.values = {key: float(value) for row in rows for key, value in row.items() if value}

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        self.values |= metrics

    def close(self) -> None:
        """Nothing to close."""


class MetricNames:
    """Reports a config key that names a metric which nothing logs, early in the run.

    Each name is checked once: one in ``eval/`` after the first evaluation, all others once an
    episode has ended. A callback may still log the metric later, so this is not an error.
    """

    def __init__(self, named: Mapping[str, str]) -> None:
        """``named``: the metric of each config key."""
        self._waiting = {
            key: metric for key, metric in named.items() if metric not in (EVAL_RETURN, MEAN_RETURN)
        }
        self._known: set[str] = set()

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        if not self._waiting:
            return
        self._known |= set(metrics)
        for key, metric in list(self._waiting.items()):
            if (EVAL_RETURN if metric.startswith("eval/") else MEAN_RETURN) not in self._known:
                continue
            del self._waiting[key]
            if metric not in self._known:
                close = get_close_matches(metric, sorted(self._known), n=1)
                hint = f"did you mean {close[0]}?" if close else "metrics.csv has all names"
                say(f"{key}={metric}: not logged by env step {env_steps:,}; {hint}")

    def close(self) -> None:
        """Nothing to close."""


class Record:
    """Call ``begin`` before training, ``end`` after it, and always ``close``."""

    def __init__(
        self,
        run: RunFolder,
        *,
        facts: Mapping[str, Any],
        overrides: Sequence[str],
        total_steps: int,
        env_steps: int,
        loggers: Mapping[str, Logger],
        named_metrics: Mapping[str, str],
    ) -> None:
        """``env_steps`` is where the run resumes; ``loggers`` are added to CSV and console.

        ``named_metrics``: the metrics that config keys name.
        """
        self.run = run
        # Found now: an env may call os.chdir.
        self._started_in = Path.cwd()
        self._programs = {name: user_command(name) for name in ("evaluate", "compare")}
        self._programs["train"] = user_command("train", agent=facts["agent"])
        self._facts = dict(facts)
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._what_runs_where = ""
        self._command = typed_training() or f"train({list(overrides)})"
        before = run.read_summary()  # not empty if the run resumes
        try:
            self._seconds_before = float(before.get("seconds") or 0.0)
            self._train_seconds = float(before.get("train_seconds") or 0.0)
            self._commands_before = list(before.get("commands") or [])
            if not math.isfinite(self._seconds_before + self._train_seconds):
                raise ValueError("seconds must be finite")
        except (TypeError, ValueError, OverflowError) as error:
            raise RunFolderError(f"{run.summary} is damaged: {error}") from error
        self._console = ConsoleLogger(total_steps, env_steps=env_steps)
        self._extra_loggers = dict(loggers)
        self._printed_status: set[str] = set()
        self._csv = CsvLogger(run.metrics, from_env_steps=env_steps)
        self._last = LastValues(self._csv.rows)
        # A resume that fails before its first iteration leaves the record as it is.
        self._is_kept = bool(before)
        self.loggers: list[Logger] = [
            self._csv,
            self._last,
            *self._extra_loggers.values(),
            self._console,
            MetricNames(named_metrics),
        ]

    def begin(self, line: str) -> None:
        """Print the first lines and write a summary with the status running."""
        self._is_kept = False
        self._csv.begin()
        self._what_runs_where = line
        self._say_lines([line, f"run folder: {self.run.shown}", *self._new_logger_lines()])
        self.run.update_summary(
            {
                **self._facts,
                "status": "running",
                "what_runs_where": line,
                "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
                "commands": [*self._commands_before, self._command],
                "git_commit": _noted(package_code(), self.run.changes),
                "user_git_commit": _noted(user_code(self._started_in), self.run.user_changes),
                "host": platform.node(),
                "versions": {
                    "python": platform.python_version(),
                    **{name: version(name) for name in ("torch", "numpy", "gymnasium")},
                },
            }
        )
        self._console.start()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measures the training time, without setup and closing."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._train_seconds += time.monotonic() - start

    def end(self, status: str, line: str) -> None:
        """Write the summary, then print the result and the next commands."""
        self._console.close()
        env_steps = int(self._last.values.get("env_steps", 0))
        facts = {
            "status": status,
            "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seconds": round(self._seconds_before + time.monotonic() - self._started, 1),
            "train_seconds": round(self._train_seconds, 3),
            "env_steps": env_steps,
            "mean_reward": _finite(self.mean_reward),
            "metrics": {name: _finite(value) for name, value in self._last.values.items()},
        }
        try:
            if not self._is_kept:
                self.run.update_summary(facts)
        except RunFolderError as error:  # a full disk must not hide how the run ended
            say(str(error))
            with suppress(RunFolderError):  # it was just reported
                self.run.end_in_place(status)
        gained = self.mean_reward
        mean = "" if math.isnan(gained) else f", mean return {shown_return(gained)}"
        result = f"{line} at env step {env_steps:,} of {self._total_steps:,}{mean}"
        is_complete = status == "finished" and env_steps >= self._total_steps
        commands = self._commands(complete=is_complete)
        saved = checkpoint_path(self.run, LATEST).is_file()
        if status == "finished":
            say(result)
            if is_job():  # the sweep prints the commands once
                return
            say(f"run folder: {self.run.shown}")
            for title, facts_of_it in self._sums().items():
                say(f"{title + ':':<11} {facts_of_it}")
            for title, command in commands.items():
                if saved or title == "compare":
                    say(f"{title + ':':<11} {command}")
        elif saved and not is_job() and status == "interrupted" and env_steps >= self._total_steps:
            # Interrupted in the last evaluation: training is complete.
            say(f"{result}; evaluate it with: {commands['evaluate']}")
        elif saved:
            say(result if is_job() else f"{result}; resume with: {commands['resume']}")
        else:
            say(f"{result}; no checkpoint was saved in {self.run.shown}")

    def close(self) -> None:
        """Close every logger and print each ``status``."""
        for logger in reversed(self.loggers):
            try:
                logger.close()
            except Exception as error:  # a user's logger may raise anything; close the others
                say(f"{type(logger).__name__} did not close: {type(error).__name__}: {error}")
        self._say_lines(self._new_logger_lines())

    @property
    def mean_reward(self) -> float:
        """Mean return of the last 100 training episodes; NaN if none has ended."""
        return self.value(MEAN_RETURN)

    def value(self, metric: str) -> float:
        """The last value of a metric; NaN if it was never measured."""
        return self._last.values.get(metric, math.nan)

    def _sums(self) -> dict[str, str]:
        """What the whole run took and reached, also before it was resumed."""
        seconds = round(self._seconds_before + time.monotonic() - self._started)
        wall = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        train_seconds = max(self._train_seconds, 1e-9)
        n_episodes, env_steps = self.value("rollout/total_episodes"), self.value("env_steps")
        speeds = f"{env_steps / train_seconds:,.0f} env steps/s"
        if not math.isnan(n_episodes):
            wall = f"{n_episodes:,.0f} episodes in {wall}"
            speeds += f" and {n_episodes / train_seconds:,.1f} episodes/s"
        took = f"{wall}; {speeds}, evaluations included"
        measured = {
            "last": self.value("rollout/episode_return"),
            "mean of the last 100 episodes": self.mean_reward,
            "evaluation": self.value(EVAL_RETURN),
        }
        returns = [
            f"{what} {shown_return(value)}"
            for what, value in measured.items()
            if not math.isnan(value)
        ]
        sums = {"ran": self._what_runs_where, "took": took, "returns": ", ".join(returns)}
        return {title: text for title, text in sums.items() if text}

    def _commands(self, *, complete: bool) -> dict[str, str]:
        path = shlex.quote(str(self.run.shown))
        # Some characters have a meaning for Hydra unless they are quoted.
        value = path if re.fullmatch(r"[\w./ '-]+", path) else shlex.quote(f'"{self.run.shown}"')
        more = f" total_steps={2 * self._total_steps}" if complete else ""
        siblings = shlex.quote(str(self.run.shown.parent)) + "/*"
        return {
            "evaluate": f"{self._programs['evaluate']} {path} --deterministic",
            "resume": f"{self._programs['train']} resume={value}{more}",
            "compare": f"{self._programs['compare']} {siblings}",
        }

    def _new_logger_lines(self) -> list[str]:
        """The ``status`` of each logger, if new, with its ``hint``: a command to type."""
        lines = []
        for logger in self._extra_loggers.values():
            status = getattr(logger, "status", None)
            if status and status not in self._printed_status:
                self._printed_status.add(status)
                hint = "" if is_job() else getattr(logger, "hint", "")
                lines.append(f"{status}; {hint}" if hint else status)
        return lines

    def _say_lines(self, lines: Sequence[str]) -> None:
        """Print lines; a job of a sweep prints them as one."""
        for line in ["; ".join(lines)] if is_job() and lines else lines:
            say(line)


def _noted(code: Code | None, diff: Path) -> str | None:
    """Write the changes of ``code``, if any, to the file ``diff``; returns its commit."""
    if code is None:
        return None
    if code.changes:
        write_text(diff, code.changes)
    return code.commit


def _finite(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
