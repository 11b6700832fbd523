"""Start a study, join it, or go on with it: workers side by side until it has all its trials.

The process that was started watches: it tells of each trial that ends, passes on stop signals,
and puts a new worker in the place of one that died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from ml_pipeline.callbacks.pruning import METRIC
from ml_pipeline.envs.workers.cores import CORES_VARIABLE, available_cores
from ml_pipeline.runs.console import python_command, say
from ml_pipeline.signals import Interrupted
from ml_pipeline.study.folder import (
    HOST,
    FileLock,
    StudyError,
    StudyFolder,
    StudySettings,
    finished,
    why_hopeless,
)
from ml_pipeline.study.report import headline, trial_line
from ml_pipeline.sweeps import share_of_cores

_LOOK_SECONDS = 0.5
_MOST_DEATHS = 3  # of workers, with no trial ended in between
_DEFAULT_SPACE = "ppo"


class Request(NamedTuple):
    """What a command line asks of a study; None where it says nothing."""

    overrides: list[str]
    space: str | None
    n_trials: int | None
    n_jobs: int


def read_request(arguments: Sequence[str]) -> Request:
    """n_trials=, n_jobs= and space= are the study's; all else goes to every trial."""
    own: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key in ("n_trials", "n_jobs", "space"):
            own[key] = value
        elif key in ("resume", "hydra.mode") or argument.startswith("-"):
            raise StudyError(f"{argument} has no place in a study; its trials are whole runs")
        elif not equals and not argument.startswith("~"):
            raise StudyError(f"{argument} is no override; write key=value")
        else:
            overrides.append(argument)
    numbers = {key: _count(key, own[key]) for key in ("n_trials", "n_jobs") if key in own}
    return Request(overrides, own.get("space"), numbers.get("n_trials"), numbers.get("n_jobs", 1))


def _count(key: str, text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise StudyError(f"{key} must be a whole number of at least 1, got {text}")
    return int(digits)


def start(name: str, arguments: Sequence[str]) -> None:
    """Train trials until the study has all; returns at once where it has."""
    request = read_request(arguments)
    folder = StudyFolder(name)
    is_new = not folder.settings.is_file()
    settings = _new_settings(name, request) if is_new else folder.read()
    folder.make()
    lock = FileLock(folder.path / "claim.lock")
    lock.take(wait=True)
    try:
        if folder.settings.is_file():  # perhaps made by another process meanwhile
            settings = _joined_settings(folder, request)
        folder.write(settings)
    finally:
        lock.release()
    study = folder.study()
    say(headline(folder, settings, study.get_trials(deepcopy=False)))
    _Crew(folder, study, n_jobs=request.n_jobs).work()


def _new_settings(name: str, request: Request) -> StudySettings:
    """Of a study that begins; whatever could make all of its trials fail is refused here."""
    from ml_pipeline.door.compose import compose_config  # torch takes seconds
    from ml_pipeline.study.space import check_space, hydra_explained, read_space

    if request.n_trials is None:
        raise StudyError(f"study {name} is new: say how many trials it is to have, n_trials=100")
    space = read_space(request.space or _DEFAULT_SPACE)
    fixed = [key for key in space if key.lstrip("+") in _by_key(request.overrides)]
    for key in fixed:
        del space[key]
    if not space:
        raise StudyError(
            "nothing is left to search: every key of the space is fixed by an override"
        )
    check_space(space, request.overrides)
    with hydra_explained():
        seed = int(compose_config(request.overrides).seed)
    objective = _by_key(request.overrides).get("objective", f"objective={METRIC}")
    overrides = [each for each in request.overrides if _key(each) not in ("seed", "objective")]
    if fixed:
        say(f"fixed by the command line, not searched: {', '.join(fixed)}")
    return StudySettings(
        overrides, space, request.n_trials, seed, objective.partition("=")[2].strip("'\"")
    )


def _joined_settings(folder: StudyFolder, request: Request) -> StudySettings:
    """Of a study that is there: only its goal may change."""
    settings = folder.read()
    stored = _by_key(settings.overrides)
    stored |= {"seed": f"seed={settings.seed}", "objective": f"objective={settings.objective}"}
    way_out = "leave it out to go on, or start a study with another name"
    for key, override in _by_key(request.overrides).items():
        if key not in stored:
            raise StudyError(f"study {folder.name} was started without {override}; {way_out}")
        if stored[key] != override:
            raise StudyError(
                f"study {folder.name} was started with {stored[key]}, not {override}; {way_out}"
            )
    if request.space is not None:
        from ml_pipeline.study.space import read_space

        space = {k: v for k, v in read_space(request.space).items() if _key(k) not in stored}
        differing = [
            key for key in [*settings.space, *space] if settings.space.get(key) != space.get(key)
        ]
        if differing:
            raise StudyError(
                f"study {folder.name} was started with another space: {differing[0]} is "
                f"{settings.space.get(differing[0])} there and {space.get(differing[0])} in "
                f"space={request.space}; {way_out}"
            )
    if request.n_trials is not None:
        settings = settings._replace(n_trials=request.n_trials)
    return settings


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    return {_key(override): override for override in overrides}


class _Crew:
    """The workers of this process."""

    def __init__(self, folder: StudyFolder, study: optuna.Study, *, n_jobs: int) -> None:
        self._folder = folder
        self._study = study
        self._n_jobs = n_jobs
        trials = self._trials()
        self._first = len(trials)
        self._told = {trial.number for trial in finished(trials)}
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stop: int | None = None
        self._signalled: set[int] = set()

    def work(self) -> None:
        left = self._folder.read().n_trials - len(self._told)
        before = self._catch_signals()
        try:
            for _ in range(min(self._n_jobs, left)):
                self._workers.append(self._new_worker())
            self._watch()
        finally:
            self._end_workers()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._tell()
        self._say_end()

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _new_worker(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ml_pipeline", "study", "work", self._folder.name]
        command += ["--first", str(self._first), "--parent", str(os.getpid())]
        share = share_of_cores({"n_jobs": self._n_jobs}, available_cores())
        log = self._folder.logs / f"{HOST}_{os.getpid()}_{len(self._workers)}.log"
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                env={**os.environ, CORES_VARIABLE: str(share), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes from here alone
            )

    def _catch_signals(self) -> dict[int, Any]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Under nohup it is ignored: the terminal may close.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        return {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Let every trial save; once more, and it does so sooner."""
        self._stop = number
        self._signalled.clear()
        self._pass_on()

    def _pass_on(self) -> None:
        """Also to a worker that was being started when the signal came."""
        for worker in self._workers:
            if self._stop is not None and worker.pid not in self._signalled:
                self._signalled.add(worker.pid)
                worker.send_signal(self._stop)

    def _watch(self) -> None:
        """Until every worker has ended."""
        deaths = 0
        while any(worker.poll() is None for worker in self._workers):
            time.sleep(_LOOK_SECONDS)
            self._pass_on()
            if self._tell():
                deaths = 0
            for index, worker in enumerate(self._workers):
                code = worker.poll()
                if code in (None, 0, 1) or self._stop is not None:
                    continue
                deaths += 1
                if deaths > _MOST_DEATHS:
                    raise StudyError(
                        f"workers of study {self._folder.name} die, the last one with exit code "
                        f"{code}; see {self._folder.logs}"
                    )
                say(f"a worker died with exit code {code}; another one takes up its trial")
                self._workers[index] = self._new_worker()

    def _end_workers(self) -> None:
        """None is left when this process ends, however it does."""
        for worker in self._workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self._workers:
            worker.wait()

    def _tell(self) -> bool:
        """Say what has ended since the last time, anywhere."""
        trials = self._trials()
        new = [trial for trial in finished(trials) if trial.number not in self._told]
        settings = self._folder.read() if new else None
        for trial in new:
            self._told.add(trial.number)
            if settings is not None:
                say(trial_line(trial, trials, settings, n_told=len(self._told)))
        return bool(new)

    def _say_end(self) -> None:
        name, n_done = self._folder.name, len(self._told)
        settings = self._folder.read()
        command = f"{python_command()} -m ml_pipeline study"
        if self._stop is not None:
            say(
                f"stopped with {n_done} of {settings.n_trials} trials done; nothing is lost, go on "
                f"with: {command} start {name}"
            )
            raise Interrupted(self._stop)
        trials = self._trials()
        reason = why_hopeless(trials, self._first)
        if reason is not None and n_done < settings.n_trials:
            raise StudyError(f"study {name} was stopped: its first trials all failed: {reason}")
        errors = [t.user_attrs.get("error") for t in trials if t.state == TrialState.FAIL]
        if len(errors) == n_done:
            raise StudyError(f"all {n_done} trials of study {name} have failed: {errors[-1]}")
        if any(worker.returncode for worker in self._workers):
            raise StudyError(f"a worker of study {name} failed; see {self._folder.logs}")
        say(f"study {name} has its {settings.n_trials} trials")
        say(f"best:      {command} best {name}")
        say(f"status:    {command} status {name}")
