"""ConsoleLogger: the progress of a run; a live display on a terminal, lines in a pipe."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from ml_pipeline.errors import printable
from ml_pipeline.metrics import EVAL_RETURN, MEAN_RETURN, shown_return

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_LINES_OF_A_JOB = 10.0  # several jobs share the output
_BAR_WIDTH = 38
_UNKNOWN = "-"  # the ETA of DQN and SAC until an iteration with updates has ended
_TRAIN = " train"  # commands/train.py adds it to the program's name in sys.argv

# Title, metric, how to show it; a missing metric is shown as a dash.
_FIGURES = (
    ("iteration", "iteration", "{:.0f}".format),
    ("return", "rollout/episode_return", shown_return),
    ("length", "rollout/episode_length", "{:.1f}".format),
    ("mean(100)", MEAN_RETURN, shown_return),
    ("episodes", "rollout/total_episodes", "{:.0f}".format),
    ("eval", EVAL_RETURN, shown_return),
    ("steps/s", "time/env_steps_per_second", "{:,.0f}".format),
)
# Shown if the terminal is wide enough.
_MORE_FIGURES = (
    ("KL", "policy/approx_kl", "{:.4f}".format),
    ("entropy", "policy/entropy", "{:.3f}".format),
    ("explained", "value/explained_variance", "{:.2f}".format),
)
_WIDTH_OF_ALL = 120


class _SafeStdout:
    """Standard output that ignores a closed pipe (``| head``) or terminal."""

    def __init__(self) -> None:
        self._file: TextIO = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, stays open

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _PlainConsole(Console):
    """Shows every text as it is: a text of a file may look like markup or move the cursor."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


def wide_console() -> Console:
    """A console for tables; wide if the output is a pipe, so that rows do not wrap."""
    console = _PlainConsole(highlight=False)
    if not console.is_terminal:
        console.width = 250
    return console


def plain_table(*titles: str) -> Table:
    """A table without lines; long cells are folded."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


_is_quiet = False


@contextmanager
def quiet_console(quiet: bool) -> Iterator[None]:
    """With ``quiet``, a run in this block prints nothing."""
    global _is_quiet
    before, _is_quiet = _is_quiet, quiet
    try:
        yield
    finally:
        _is_quiet = before


class _Numbered(io.TextIOBase):
    """Writes complete lines to ``file``, each after ``prefix`` and in a single write."""

    def __init__(self, file: TextIO, prefix: str) -> None:
        self._file = file
        self._prefix = prefix
        self._rest = ""  # a line that has not ended

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._file.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._file.flush()
        return len(text)

    def end_line(self) -> None:
        if self._rest:
            self.write("\n")


_job: int | None = None  # the job of a sweep that prints here


def is_job() -> bool:
    """Whether a job of a sweep prints here: no live display, few lines, no commands."""
    return _job is not None


@contextmanager
def numbered_output(job: int) -> Iterator[None]:
    """In this block every line of output starts with the number of a job of a sweep."""
    global _job
    before, stdout, stderr = _job, sys.stdout, sys.stderr
    out: Any = _Numbered(stdout, _prefix(job))
    err: Any = _Numbered(stderr, _prefix(job))
    _job, sys.stdout, sys.stderr = job, out, err
    all_handlers: list[Any] = logging.root.handlers
    handlers = [each for each in all_handlers if getattr(each, "stream", None) is stdout]
    for handler in handlers:
        handler.setStream(out)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(stdout)
        with suppress(OSError, ValueError):  # a closed output
            out.end_line()
            err.end_line()
        if sys.stdout is out:  # otherwise ``say`` has replaced a closed output
            sys.stdout = stdout
        _job, sys.stderr = before, stderr


def _prefix(job: int) -> str:
    return f"job {job}: "


def say(line: str) -> None:
    """Print a line at once; a closed output must not stop a run."""
    if _is_quiet:
        return
    try:
        print(printable(line), flush=True)
    except (OSError, ValueError):  # a broken pipe, a full disk, a closed terminal
        # Otherwise the interpreter fails again when it flushes stdout at exit.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, stays open


class _PlainBar(ProgressColumn):
    """A bar whose end is visible without colours, as with NO_COLOR."""

    def render(self, task: Task) -> Text:
        done = round(task.percentage / 100 * _BAR_WIDTH)
        return Text(f"[{'#' * done}{'-' * (_BAR_WIDTH - done)}]")


class ConsoleLogger:
    """Shows the progress of one run between ``start`` and ``close``."""

    def __init__(self, total_steps: int, *, env_steps: int = 0, console: Console | None = None):
        stdout = cast("IO[str]", _SafeStdout())
        if console is None:
            console = Console(file=stdout, soft_wrap=True, highlight=False, quiet=_is_quiet)
        self._console = console
        self._total_steps = total_steps
        self._counted_from = time.monotonic(), env_steps  # for the ETA
        self._is_first = True  # until an iteration has ended; for DQN and SAC one with updates
        self._last_line = 0.0
        self._shown: dict[str, float] = {}
        self._unprinted: str | None = None
        self._progress = Progress(
            TextColumn("env steps"),
            _PlainBar() if self._console.no_color else BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "train", total=total_steps, completed=env_steps, eta=_UNKNOWN
        )
        self._live: Live | None = None

    def start(self) -> None:
        """Start the live display; print nothing else until ``close``."""
        self._counted_from = time.monotonic(), self._counted_from[1]
        if is_job():
            self._last_line = self._counted_from[0]  # the run has just printed its first line
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._display(), console=self._console, refresh_per_second=4)
            self._live.start()

    def log(self, metrics: Mapping[str, float], *, env_steps: int) -> None:
        # Evaluations are rare; the display keeps the last result.
        kept = {name: self._shown[name] for name in self._shown if name.startswith("eval/")}
        self._shown = {**kept, **metrics}
        now = time.monotonic()
        eta = self._next_eta(metrics, env_steps, now)
        if self._live is not None:
            completed = min(env_steps, self._total_steps)
            self._progress.update(self._task, completed=completed, eta=eta)
            self._live.update(self._display())
            return
        self._unprinted = self._line(metrics, env_steps, eta)
        if is_job():
            due = now - self._last_line >= _SECONDS_BETWEEN_LINES_OF_A_JOB
        else:
            due = now - self._last_line >= _SECONDS_BETWEEN_LINES or EVAL_RETURN in metrics
            due = due or env_steps >= self._total_steps
        if due:
            self._print_line()
            self._last_line = now

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if not is_job():
            self._print_line()  # the last line of a run that was stopped early

    def _print_line(self) -> None:
        if self._unprinted is not None:
            say(self._unprinted)
            self._unprinted = None

    def _line(self, metrics: Mapping[str, float], env_steps: int, eta: str) -> str:
        parts = [f"env steps {env_steps:,}/{self._total_steps:,}", f"ETA {eta}"]
        for title, name, form in _FIGURES:
            if name in metrics:
                parts.append(f"{title} {form(metrics[name])}")
        return "  ".join(parts)

    def _next_eta(self, metrics: Mapping[str, float], env_steps: int, now: float) -> str:
        """The ETA by the speed since the first iteration; call it once per iteration.

        DQN and SAC step much faster before their first update. Others do not have the metric.
        """
        updates = metrics.get("time/updates_per_second")
        eta = _UNKNOWN if self._is_first and updates is not None else self._eta(env_steps, now)
        if self._is_first:  # the iteration that compiles would distort the ETA
            self._is_first = updates == 0
            self._counted_from = now, env_steps
        return eta

    def _eta(self, env_steps: int, now: float) -> str:
        start, first_steps = self._counted_from
        left = max(self._total_steps - env_steps, 0)
        done = max(env_steps - first_steps, 1)
        seconds = round((now - start) * left / done)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def _display(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        figures = list(_FIGURES)
        if self._console.width >= _WIDTH_OF_ALL:
            figures += [each for each in _MORE_FIGURES if each[1] in self._shown]
        for title, _, _ in figures:
            table.add_column(title, justify="right")
        shown = self._shown
        table.add_row(*(form(shown[n]) if n in shown else "-" for _, n, form in figures))
        return Group(table, self._progress)


def python_command() -> str:
    """``python`` if that is this interpreter, else its path; to print in commands."""
    found = shutil.which("python")
    if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
        return "python"
    relative = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if relative.startswith("..") else relative)


@contextmanager
def say_if_slow(line: str, *, seconds: float = 10.0) -> Iterator[None]:
    """Print ``line`` if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_stopping() -> None:
    """For signal handlers: print is not reentrant, and the terminal may be closed."""
    with suppress(OSError):
        line = "stopping after this iteration; press Ctrl-C again to stop sooner\n"
        os.write(1, f"{'' if _job is None else _prefix(_job)}{line}".encode())


def user_command(name: str, *, python: str | None = None, agent: str | None = None) -> str:
    """The command ``name`` (train, evaluate, ...) as the user of this process types it.

    ``python`` is how the interpreter is called; None: a path that works from this folder.
    ``agent``: which agent to train, if it has a script of its own.
    """
    python = python or python_command()
    program = Path(sys.argv[0].removesuffix(_TRAIN))
    if name == "train" and _is_train_script(program):
        own = program.with_name(f"train_{agent}.py")
        program = own if own.is_file() else program
        shortest = min(os.path.relpath(program), os.path.abspath(program), key=len)
        return f"{_launcher() or python} {shlex.quote(shortest)}"
    if program.stem != "ml-pipeline":
        return f"{python} -m ml_pipeline {name}"
    found = shutil.which(program.name)
    on_path = found is not None and os.path.abspath(found) == os.path.abspath(program)
    return f"{program.name if on_path else shlex.quote(str(program))} {name}"


def _launcher() -> str:
    """The launcher of several ranks on this machine, or an empty text."""
    n_ranks, n_local = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    is_here = n_ranks == n_local and n_ranks not in (None, "1")  # other machines need more options
    return f"torchrun --nproc_per_node={n_ranks}" if is_here else ""


def typed_training() -> str | None:
    """The command line that trains in this process; None if Python code called ``train``."""
    if not _is_train_script(Path(sys.argv[0])) and not sys.argv[0].endswith(_TRAIN):
        return None
    return f"{user_command('train', python='python')} {shlex.join(sys.argv[1:])}".rstrip()


def _is_train_script(program: Path) -> bool:
    return re.fullmatch(r"train_\w+\.py", program.name) is not None
