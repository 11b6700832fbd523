"""Sweeps: the status of each job of a multirun, stored in its folder and printed at the end.

The process of a job writes the job's status at the start and at the end. So the table is complete
with every launcher, and shows a killed job as died.

If jobs run in parallel processes, a stop signal waits until all jobs have saved. Jobs also stop
when the process that started them ends.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, NoneType
from typing import Any, NamedTuple

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from ml_pipeline.errors import UserError, first_line, one_line
from ml_pipeline.extras import missing_extra
from ml_pipeline.foreign import TEXT_BYTES, read_regular
from ml_pipeline.metrics import shown_return
from ml_pipeline.runs.console import plain_table, user_command, wide_console
from ml_pipeline.runs.run_folder import write_text
from ml_pipeline.signals import Interrupted, signals_to_handle

_LAUNCHERS = {
    "local": "hydra_plugins.hydra_joblib_launcher",
    "slurm": "hydra_plugins.hydra_submitit_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
}

_STOPPED = "stopped"  # while this file exists, no further job starts
_STOP_SECONDS = 20.0  # a job needs at most 10
_SAVE_SECONDS = 10.0
_POLL_SECONDS = 1.0


class Job(NamedTuple):
    """One job of a sweep."""

    number: int
    overrides: list[str]
    status: str  # running | finished | interrupted | failed
    pid: int
    run_dir: str | None = None
    objective: float | None = None
    error: str | None = None


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("number", "pid"), (int,)),
    **dict.fromkeys(("run_dir", "error"), (str, NoneType)),
    "overrides": (list,),
    "status": (str,),
    "objective": (int, float, NoneType),
}


class JobNote:
    """Writes the status of one job to the folder of its sweep."""

    def __init__(self, folder: Path, number: int, overrides: Sequence[str]) -> None:
        self._folder = folder
        self._write(Job(number, list(overrides), "running", os.getpid()))

    def started(self, run_dir: Path | str) -> None:
        """``run_dir`` may not exist yet."""
        self._write(self.job._replace(run_dir=str(run_dir)))

    def finished(self, objective: float) -> None:
        value = objective if math.isfinite(objective) else None
        self._write(self.job._replace(status="finished", objective=value))

    def stopped(self) -> None:
        self._write(self.job._replace(status="interrupted"))

    def failed(self, error: BaseException) -> None:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        self._write(self.job._replace(status="failed", error=kind + one_line(error)))

    def _write(self, job: Job) -> None:
        self.job = job
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"job_{job.number}.json"
        write_text(path, json.dumps(job._asdict()) + "\n")


@contextmanager
def noted_job(folder: Path, number: int, overrides: Sequence[str]) -> Iterator[JobNote]:
    """Record the status of a job; the block must call ``finished`` if it succeeds."""
    if (folder / _STOPPED).exists():
        raise KeyboardInterrupt  # the sweep was stopped before this job started
    note = JobNote(folder, number, overrides)
    try:
        yield note
    except KeyboardInterrupt:
        note.stopped()
        raise
    except BaseException as error:
        note.failed(error)
        raise


def read_jobs(folder: Path) -> list[Job]:
    """All jobs of a sweep, ordered by number."""
    jobs = [_read_job(path) for path in folder.glob("job_*.json")]
    return sorted(jobs, key=lambda job: job.number)


def _read_job(path: Path) -> Job:
    try:
        job = Job(**json.loads(read_regular(path, most_bytes=TEXT_BYTES)))
        for name, value in job._asdict().items():
            if not isinstance(value, _KINDS[name]):
                raise ValueError(f"{name}={value!r:.50}")
        if not all(isinstance(each, str) for each in job.overrides):
            raise ValueError("overrides must be texts")
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not the note of a job: {first_line(error)}") from error
    return job


def requeued_run(folder: Path, number: int) -> Path | None:
    """The run to resume if Slurm has started this job again; None: start a new one."""
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) == 0:
        return None
    runs = [job.run_dir for job in read_jobs(folder) if job.number == number]
    paths = [Path(run) for run in runs if run is not None]
    return next((path for path in paths if (path / "checkpoints" / "latest.pt").is_file()), None)


def note_lost_job(folder: Path, number: int, overrides: Sequence[str], reason: str) -> None:
    """Record a job that ended without a word; a job that recorded its own end keeps that."""
    before = next((job for job in read_jobs(folder) if job.number == number), None)
    if before is not None and before.status != "running":
        return
    note = JobNote(folder, number, overrides)
    if before is not None and before.run_dir is not None:
        note.started(before.run_dir)
        reason = f"{reason}; continue with resume={before.run_dir}"
    note.failed(UserError(reason))


def job_runs(folder: Path) -> list[Path]:
    """The run folders of a sweep's jobs; a job that failed early has none on disk."""
    runs = [Path(job.run_dir) for job in read_jobs(folder) if job.run_dir is not None]
    # From another folder: a run is <run_root>/<env>/<name>, the sweep <run_root>/sweeps/<name>.
    root = folder.resolve().parents[1]
    return [run if run.is_dir() else root.joinpath(*run.parts[-2:]) for run in runs]


def jobs_table(jobs: Sequence[Job], *, running: str = "died") -> Table:
    """A row per job, with the overrides that not all jobs share.

    ``running`` is shown for jobs that have not recorded their end. When a sweep is over, they died.
    """
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    table = plain_table("job", "overrides", "status", "objective", "run folder or error")
    for job in jobs:
        table.add_row(
            str(job.number),
            " ".join(each for each in job.overrides if each not in common),
            running if job.status == "running" else job.status,
            "-" if job.objective is None else shown_return(job.objective),
            job.error or job.run_dir or "-",
        )
    return table


class SweepReport(Callback):
    """Hydra callback that stores the folder of a multirun; ``tell`` prints its table."""

    # On the class: Hydra makes the instance.
    _folder: Path | None = None
    _running = "died"  # what a job is that has not recorded its end

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = SweepReport._folder = Path(config.hydra.sweep.dir)
        if str(config.hydra.launcher._target_).endswith(".SlurmLauncher"):
            from ml_pipeline.assembly.slurm import use_queue_launcher

            use_queue_launcher(on_lost=partial(note_lost_job, folder))
            SweepReport._running = "running"  # jobs continue without this process
        if "n_jobs" in config.hydra.launcher:
            for number in signals_to_handle():
                signal.signal(number, self._stop_jobs)

    def _stop_jobs(self, number: int, frame: FrameType | None) -> None:
        """Let every job save and end, then end the sweep; a second signal ends it at once."""
        for each in signals_to_handle():
            signal.signal(each, signal.SIG_DFL)
        folder = SweepReport._folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _STOPPED).touch()
            signalled: set[int] = set()
            deadline = time.monotonic() + _STOP_SECONDS
            while (running := _running_jobs(folder)) and time.monotonic() < deadline:
                for job in running:
                    if job.pid not in signalled:
                        os.kill(job.pid, number)
                        signalled.add(job.pid)
                time.sleep(0.1)
        raise Interrupted(number)

    @staticmethod
    def tell() -> bool:
        """Print the table and the next commands; returns whether every job has finished."""
        folder = SweepReport._folder
        jobs = read_jobs(folder) if folder is not None else []
        if not jobs:
            return True
        console = wide_console()
        finished = [job for job in jobs if job.status == "finished"]
        console.print(f"\nsweep {folder}: {len(finished)} of {len(jobs)} jobs finished")
        console.print(jobs_table(jobs, running=SweepReport._running))
        for title, command in _commands(folder, jobs).items():
            console.print(f"{title + ':':<11} {command}", soft_wrap=True)
        return len(finished) == len(jobs)


def _commands(folder: Path | None, jobs: Sequence[Job]) -> dict[str, str]:
    """What to type after a sweep; ``evaluate`` names the job with the best objective."""
    commands = {}
    finished = [job for job in jobs if job.status == "finished"]
    if finished:
        best = max(finished, key=lambda job: -math.inf if job.objective is None else job.objective)
        run = shlex.quote(str(best.run_dir))
        commands["compare"] = f"{user_command('compare')} {shlex.quote(str(folder))}"
        commands["evaluate"] = f"{user_command('evaluate')} {run} --deterministic"
    if any(job.status == "interrupted" for job in jobs):
        commands["resume"] = f"{user_command('train')} resume=RUN, with a run folder of the table"
    return commands


def _running_jobs(folder: Path) -> list[Job]:
    return [job for job in read_jobs(folder) if job.status == "running" and _is_alive(job.pid)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends; otherwise it would keep training."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVE_SECONDS)
        os._exit(143)  # joblib would wait for jobs that never arrive

    threading.Thread(target=watch, daemon=True).start()


def check_launcher(arguments: Sequence[str]) -> None:
    """Refuse a launcher that is not installed, with the install command, which Hydra omits.

    Also refuse Slurm without its commands, and several ranks, which would all start the sweep.
    """
    if {"-m", "--multirun"} & set(arguments) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("-m: torchrun starts one run, not a sweep; call torchrun once per run")
    for argument in arguments:
        key, _, name = argument.partition("=")
        module = _LAUNCHERS.get(name) if key == "sweep" else None
        if module is not None and not _is_installed(module):
            raise missing_extra(argument, UserError(module))
        if argument == "sweep=slurm":
            from ml_pipeline.assembly.slurm import check_slurm

            check_slurm(argument)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def share_of_cores(n_jobs: int, n_cores: int) -> int:
    """The number of cores for each of ``n_jobs``; as in joblib, -1 means one job per core."""
    return max(n_cores // (n_jobs if n_jobs > 0 else n_cores), 1)
