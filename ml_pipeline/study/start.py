"""Start, join or continue a study: runs workers in parallel until it has all its trials.

This process watches the workers. It reports each trial that ends, forwards stop signals and
replaces workers that die.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from optuna.trial import TrialState

from ml_pipeline.assembly.sweeps import share_of_cores
from ml_pipeline.envs.workers.cores import CORES_VARIABLE, available_cores
from ml_pipeline.metrics import EVAL_RETURN
from ml_pipeline.runs.console import python_command, say
from ml_pipeline.signals import Interrupted, StopSignals
from ml_pipeline.study.database import DatabaseError, hidden, read_address
from ml_pipeline.study.folder import (
    MOST_DEATHS,
    Space,
    StudyError,
    StudyFolder,
    StudySettings,
    finished,
    why_hopeless,
)
from ml_pipeline.study.journal import HOST
from ml_pipeline.study.report import headline, trial_line

_LOOK_SECONDS = 0.5
_OWN_KEYS = ("n_trials", "n_jobs", "space", "storage", "trust")


class Request(NamedTuple):
    """The arguments of ``study start``; None if not given."""

    overrides: list[str]
    space: str | None
    n_trials: int | None
    n_jobs: int
    config_dir: str | None
    trust: bool = False  # the author of an existing study
    storage: str | None = None  # the URL of a database, without its password


def read_request(arguments: Sequence[str]) -> Request:
    """Separate the keys of the study from the overrides of its trials."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", type=os.path.normpath)
    try:
        options, words = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise StudyError("--config-dir: name a folder after it") from error
    own: dict[str, str] = {}
    overrides = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in _OWN_KEYS:
            own[key] = value
        elif key in ("resume", "hydra.mode") or word.startswith("-"):
            raise StudyError(f"{hidden(word)}: not possible in a study; leave it out")
        elif not equals and not word.startswith("~"):
            raise StudyError(f"{hidden(word)}: not an override; write key=value")
        elif near := get_close_matches(key, _OWN_KEYS, n=1, cutoff=0.8):  # no key of a run is near
            raise StudyError(f"{hidden(word)}: unknown key; did you mean {near[0]}?")
        else:
            overrides.append(word)
    return Request(
        overrides,
        space=own.get("space"),
        n_trials=_count("n_trials", own["n_trials"]) if "n_trials" in own else None,
        n_jobs=_count("n_jobs", own.get("n_jobs", "1")),
        config_dir=options.config_dir,
        trust=_is_true(own.get("trust", "false")),
        storage=read_address(own["storage"]) if "storage" in own else None,
    )


def _is_true(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise StudyError(f"trust={text}: must be true or false")
    return text.lower() == "true"


def _count(key: str, text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise StudyError(f"{key}={text}: must be an integer of at least 1")
    return int(digits)


def start(name: str, arguments: Sequence[str]) -> None:
    """Train trials until the study has all of them."""
    request = read_request(arguments)
    folder = StudyFolder(name)
    folder.storage_url, folder.trust = request.storage, request.trust
    folder.check(trust=request.trust)
    settings = None if folder.exists() else _new_settings(name, request)
    folder.make()
    with folder.alone():
        # Another process may have created the study in the meantime.
        if settings is None or folder.exists():
            settings = _joined_settings(folder, request)
        folder.write(settings)
    folder.share()
    say(headline(folder, settings, folder.read_trials()))
    _Workers(folder, n_jobs=request.n_jobs).train()


def _new_settings(name: str, request: Request) -> StudySettings:
    """Settings of a new study; refuses settings with which trials would fail."""
    # Importing torch takes seconds; joining a study does not need it.
    from ml_pipeline.assembly.agent import agent_name
    from ml_pipeline.assembly.compose import checked_config, compose_config, with_config_dir
    from ml_pipeline.study.judging import check_selection
    from ml_pipeline.study.space import check_space, read_space

    if request.n_trials is None:
        raise StudyError(f"study {name} is new; say how many trials it gets: n_trials=100")
    searched = with_config_dir(request.config_dir)
    cfg = compose_config([f"objective={EVAL_RETURN}", *request.overrides, *searched])
    config = checked_config(cfg)
    check_selection(config)
    all_keys = read_space(request.space or agent_name(config), request.config_dir)
    space = _searched(all_keys, _by_key(request.overrides))
    if not space:
        raise StudyError("overrides fix every key of the space; leave one out to search it")
    check_space(space, cfg, [*request.overrides, *searched])
    fixed = [key for key in all_keys if key not in space]
    if fixed:
        say(f"fixed by overrides, not searched: {', '.join(fixed)}")
    return StudySettings(
        overrides=[each for each in request.overrides if _key(each) not in ("seed", "objective")],
        space=space,
        n_trials=request.n_trials,
        seed=config.seed,
        objective=config.objective,
        config_dir=request.config_dir,
        storage=request.storage,
    )


def _joined_settings(folder: StudyFolder, request: Request) -> StudySettings:
    """Settings of an existing study; only ``n_trials`` may change."""
    settings = folder.read_own(trust=request.trust)
    difference = _difference(settings, request)
    if difference is not None:
        raise StudyError(
            f"study {folder.name} was started {difference}; leave it out to continue, or start a "
            "study with another name"
        )
    return settings._replace(n_trials=request.n_trials or settings.n_trials)


def _difference(settings: StudySettings, request: Request) -> str | None:
    """How an argument contradicts the study, or None."""
    own = [f"seed={settings.seed}", f"objective={settings.objective}"]
    stored = _by_key([*settings.overrides, *own])
    for key, override in _by_key(request.overrides).items():
        if key not in stored:
            return f"without {override}"
        if stored[key] != override:
            return f"with {stored[key]}, not {override}"
    if request.config_dir not in (None, settings.config_dir):
        had = settings.config_dir
        return "without --config-dir" if had is None else f"with --config-dir {had}"
    if request.storage not in (None, settings.storage):
        had = settings.storage
        return "without storage=" if had is None else f"with storage={had}"
    if request.space is not None:
        from ml_pipeline.study.space import read_space

        space = _searched(read_space(request.space, settings.config_dir), stored)
        for key in [*settings.space, *space]:
            old, new = settings.space.get(key), space.get(key)
            if old != new:
                return f"with another space, {key}: {old}, not {new} as in space={request.space}"
    return None


def _searched(space: Space, given: Mapping[str, str]) -> Space:
    """The space without the keys that overrides fix."""
    return {key: rule for key, rule in space.items() if _key(key) not in given}


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    return {_key(override): override for override in overrides}


class _Workers:
    """The worker processes of this start."""

    def __init__(self, folder: StudyFolder, *, n_jobs: int) -> None:
        self._folder = folder
        self._n_jobs = n_jobs
        trials = folder.read_trials()
        self._first = len(trials)
        self._reported = {trial.number for trial in finished(trials)}
        self._n_workers = min(n_jobs, folder.read().n_trials - len(self._reported))
        self._workers: list[subprocess.Popen[bytes]] = []
        self._deaths = 0  # since the last trial that ended
        self._is_away = False  # the database

    def train(self) -> None:
        with StopSignals() as signals:
            try:
                stop = self._watch(signals)
            finally:
                for worker in self._workers:
                    worker.terminate()  # no effect on one that has ended
                for worker in self._workers:
                    worker.wait()
        self._report_ended()
        self._report_result(stop)

    def _new_worker(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ml_pipeline.study", self._folder.name]
        command += [str(self._first), str(os.getpid())]
        share = share_of_cores(self._n_jobs, available_cores())
        log = self._folder.logs / f"{HOST}_{os.getpid()}_{index}.log"
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                env={**os.environ, CORES_VARIABLE: str(share), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal sends Ctrl-C to this process only
            )

    def _watch(self, signals: StopSignals) -> Interrupted | None:
        """Wait until all workers have ended; return the stop signal, if one came."""
        stop: Interrupted | None = None
        passed_on: Interrupted | None = None
        while True:
            try:
                with signals.shielded():  # an interrupt must not lose track of a new worker
                    if stop is not None and stop is not passed_on:
                        for worker in self._workers:
                            worker.send_signal(signal.Signals[stop.signal_name])
                        passed_on = stop
                    self._report_if_possible()
                    if stop is None:
                        self._start_workers()
                if all(worker.poll() is not None for worker in self._workers):
                    return stop
                time.sleep(_LOOK_SECONDS)
            except Interrupted as error:  # a second signal makes workers stop sooner
                signals.arrived()
                stop = error

    def _start_workers(self) -> None:
        """Start the first workers, later those that replace dead ones."""
        while len(self._workers) < self._n_workers:
            self._workers.append(self._new_worker(len(self._workers)))
        for index, worker in enumerate(self._workers):
            code = worker.poll()
            if code in (None, 0, 1):  # it trains, is done, or has logged its error
                continue
            self._deaths += 1
            if self._deaths > MOST_DEATHS * self._n_jobs:  # the trials should have failed by now
                raise StudyError(
                    f"study {self._folder.name}: workers keep dying, the last with exit code "
                    f"{code}; see {self._folder.logs}"
                )
            say(f"a worker died with exit code {code}; a new worker continues its trial")
            self._workers[index] = self._new_worker(index)

    def _report_if_possible(self) -> None:
        """Report ended trials, unless the database is away; the workers wait for it."""
        try:
            self._report_ended()
            if self._is_away:
                say("the database answers again")
            self._is_away = False
        except DatabaseError as error:
            if not self._is_away:
                say(f"{error}; the trials continue when it answers, nothing is lost")
            self._is_away = True

    def _report_ended(self) -> None:
        """Print the trials that ended since the last call, in any process."""
        trials = self._folder.read_trials()
        new = [trial for trial in finished(trials) if trial.number not in self._reported]
        if not new:
            return
        self._deaths = 0
        settings = self._folder.read()
        for trial in new:
            self._reported.add(trial.number)
            say(trial_line(trial, trials, settings, n_done=len(self._reported)))

    def _report_result(self, stop: Interrupted | None) -> None:
        name = self._folder.name
        n_done = len(self._reported)
        trials = self._folder.read_trials()
        settings = self._folder.read()
        command = f"{python_command()} -m ml_pipeline study"
        if stop is not None:
            say(f"stopped after {n_done} of {settings.n_trials} trials; nothing is lost")
            say(f"continue:  {command} start {name}")
            raise stop
        reason = why_hopeless(trials, self._first)
        if reason is not None and n_done < settings.n_trials:
            raise StudyError(f"study {name}: stopped, as its first trials all failed: {reason}")
        errors = [t.user_attrs.get("error") for t in trials if t.state == TrialState.FAIL]
        if errors and len(errors) == n_done:
            raise StudyError(f"study {name}: all {n_done} trials failed: {errors[-1]}")
        if any(worker.returncode for worker in self._workers):
            raise StudyError(f"study {name}: a worker failed; see {self._folder.logs}")
        say(f"study {name} has all {settings.n_trials} trials")
        say(f"best:      {command} best {name}")
        say(f"status:    {command} status {name}")
        say(f"compare:   {python_command()} -m ml_pipeline compare {self._folder.path}")
