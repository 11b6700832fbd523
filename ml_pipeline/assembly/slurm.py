"""QueueLauncher: the jobs of a sweep as one Slurm array; waits for them and prints their output.

It replaces submitit's launcher for Hydra. That one asks Slurm's accounting database whether a job
has ended: without the database it waits without end for a job that was cancelled or killed.
"""

from __future__ import annotations

import io
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from submitit import AutoExecutor, Job
from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from ml_pipeline.errors import UserError, one_line
from ml_pipeline.runs.console import say

_LOOK_SECONDS = 1.0
_ASK_SLURM_SECONDS = 30
_LATE_FILE_SECONDS = 10.0  # other machines may see a file late
_GONE = "GONE"  # Slurm forgets a job some minutes after its end
_RULE = "-" * 22  # submitit writes it before and after a traceback
_PACKAGE = Path(__file__).resolve().parents[2]
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
    _GONE,
}

OnLost = Callable[[int, Sequence[str], str], None]


def use_queue_launcher(on_lost: OnLost) -> None:
    """Let Hydra start Slurm jobs with ``QueueLauncher``.

    ``on_lost`` gets the number, overrides and Slurm's reason of a job that ended without a result.
    """
    QueueLauncher.on_lost = staticmethod(on_lost)
    # Hydra accepts only plugins below hydra_plugins.
    name = f"{SlurmLauncher.__module__}.{SlurmLauncher.__name__}"
    Plugins.instance().class_name_to_class[name] = QueueLauncher


def check_slurm(key: str) -> None:
    """Refuse ``key`` on a machine that cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"{key}: no sbatch on the PATH; call it on a machine of a Slurm cluster, or use "
            "sweep=local"
        )


class QueueLauncher(SlurmLauncher):  # type: ignore[misc]  # has no types
    """Submits jobs with submitit and waits until each has a result or has left the queue."""

    on_lost: ClassVar[OnLost]

    def __call__(self, *args: Any) -> JobReturn:
        """One job, in its own process."""
        # submitit has a handler of its own; Hydra's would print its lines again.
        logging.getLogger("submitit").propagate = False
        result: JobReturn = super().__call__(*args)
        return result

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        check_slurm("hydra.launcher=submitit_slurm")
        overrides = dict(enumerate(map(list, job_overrides), initial_job_idx))
        jobs = self._submitted(overrides)
        array = str(next(iter(jobs.values())).job_id).partition("_")[0]
        try:
            runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
            say(f"Slurm job {array}: {runs}; squeue --jobs={array} shows its state")
            return self._awaited(jobs, overrides)
        except KeyboardInterrupt:
            say(f"the runs continue in Slurm; to save and stop them: scancel {array}")
            raise

    def _submitted(self, overrides: dict[int, list[str]]) -> dict[int, Job[JobReturn]]:
        assert self.config is not None
        SlurmJob.watcher = _Queue(delay_s=_ASK_SLURM_SECONDS)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        if not {"site-packages", "dist-packages"} & set(_PACKAGE.parts):
            # Jobs import the package of this clone, also if another one is installed.
            paths = [str(_PACKAGE), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        state = Singleton.get_state()
        arguments = [
            (each, "hydra.sweep.dir", number, f"job_id_for_{number}", state)
            for number, each in overrides.items()
        ]
        try:
            with redirect_stderr(io.StringIO()):  # the error below has the same lines
                jobs = self._executor().map_array(self, *zip(*arguments, strict=True))
        except (FailedJobError, FailedSubmissionError) as error:
            raise UserError(f"sbatch refused the jobs: {one_line(error)}") from error
        return dict(zip(overrides, jobs, strict=True))

    def _executor(self) -> AutoExecutor:
        """submitit's executor with the options of hydra.launcher."""
        options = dict(self.params)
        executor = AutoExecutor(
            folder=options.pop("submitit_folder"),
            cluster="slurm",
            slurm_max_num_timeout=options.pop("max_num_timeout"),
        )
        if options.get("cpus_per_task") is not None:  # Slurm 22.05: srun does not ask sbatch
            options["srun_args"] = [f"--cpus-per-task={options['cpus_per_task']}"]
        shared = BaseQueueConf.__dataclass_fields__
        executor.update_parameters(
            **{key if key in shared else f"slurm_{key}": each for key, each in options.items()}
        )
        return executor

    def _awaited(
        self, jobs: dict[int, Job[JobReturn]], overrides: dict[int, list[str]]
    ) -> list[JobReturn]:
        """The results of all jobs; prints their output while they run."""
        results: dict[int, JobReturn] = {}
        ended: dict[int, float] = {}
        outputs = {number: _Output(number, job) for number, job in jobs.items()}
        while len(results) < len(jobs):
            for number, job in jobs.items():
                if number in results:
                    continue
                is_done = job.done()
                outputs[number].print_new()
                if is_done:
                    since = time.monotonic() - ended.setdefault(number, time.monotonic())
                    if job.paths.result_pickle.is_file() or since > _LATE_FILE_SECONDS:
                        results[number] = self._result(number, job, overrides[number])
                else:
                    ended.pop(number, None)  # Slurm has queued it again
            time.sleep(_LOOK_SECONDS)
        return [results[number] for number in jobs]

    def _result(self, number: int, job: Job[JobReturn], overrides: list[str]) -> JobReturn:
        try:
            if not job.paths.result_pickle.is_file():
                raise UncompletedJobError
            return job.results()[0]
        except FailedJobError as error:  # before or after the run, which reports its own errors
            trace = str(error).split(_RULE)[1]
            reason = f"Slurm job {job.job_id}: {trace.strip().splitlines()[-1]}"
        except UncompletedJobError:
            state = job.get_info("force").get("State", _GONE)
            reason = f"Slurm ended job {job.job_id} ({state})"
        type(self).on_lost(number, overrides, reason)
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
        result.return_value = math.nan
        return result


class _Queue(SlurmInfoWatcher):
    """The states of this user's jobs, from squeue."""

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode) in _ENDED

    def _make_command(self) -> list[str]:
        words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"]
        return [*words, "--format=%i|%T"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string if isinstance(string, str) else string.decode()
        states = dict(line.strip().split("|") for line in text.splitlines())
        return {each: {"State": states.get(each, _GONE)} for each in self._registered}


class _Output:
    """The lines that one job has printed, from the files to which Slurm writes them."""

    def __init__(self, number: int, job: Job[JobReturn]) -> None:
        self._prefix = f"job {number}: ".encode()  # other lines are those of submitit
        self._paths = [job.paths.stdout, job.paths.stderr]
        self._ends = [0, 0]

    def print_new(self) -> None:
        for index, path in enumerate(self._paths):
            if not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(self._ends[index])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._ends[index] += len(line)
                    if line.startswith(self._prefix):
                        say(line.decode(errors="replace").rstrip("\n"))
