"""StudyFolder: the files of one study, shared by all its processes: studies/NAME/.

study.yaml holds the settings, journal.log or a database the trials. The process that trains trial N
locks trials/N.lock, and a kill releases the lock. So a trial is dead if the journal says running
and its lock is free: another process can continue it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import yaml
from filelock import FileLock, Timeout
from optuna.pruners import MedianPruner
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ml_pipeline.errors import UserError, first_line, shorten
from ml_pipeline.foreign import TABLE_BYTES, TEXT_BYTES, check_folder, check_size, read_regular
from ml_pipeline.runs.run_folder import check_yaml, write_text
from ml_pipeline.runs.signatures import UntrustedError, is_signed, report_change, sealed
from ml_pipeline.study.database import Database
from ml_pipeline.study.journal import HOST, JournalLock

STUDY_ROOT = Path("studies")
MOST_DEATHS = 5  # of the worker of one trial; a stop signal does not count

_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # a trial on another machine is dead after this time without a heartbeat
_HOPELESS_FAILURES = 3
_PURPOSE = "study"  # of the signature
_SHARED = "study.yaml"  # the attribute of a study in a database that holds the file

# What workers write beside a trial in the journal.
_NOTES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_dir", "host", "error"), (str,)),
    **dict.fromkeys(("pid", "seed", "deaths"), (int,)),
    **dict.fromkeys(("stopped", "pruned"), (bool,)),
    "seconds": (int, float, type(None)),
    "beat": (int, float),
}


class StudyError(UserError):
    """A study does not exist, or does not match this command."""


Rule = dict[str, Any]  # low and high, with log or step; or choices
Space = dict[str, Rule]  # by config key


class StudySettings(NamedTuple):
    """The contents of study.yaml."""

    overrides: list[str]  # of every trial
    space: Space
    n_trials: int
    seed: int
    objective: str
    config_dir: str | None = None  # a folder of the user's own YAML files
    storage: str | None = None  # the URL of a database without its password; None: the journal

    @classmethod
    def checked(cls, values: object) -> StudySettings:
        """Settings from a file, which may hold anything; raises ``ValueError``."""
        if not isinstance(values, dict):
            raise ValueError("not a mapping")
        settings = cls(**values)
        for key, kind in (("overrides", list), ("space", dict), ("objective", str)):
            if not isinstance(getattr(settings, key), kind):
                raise ValueError(f"{key} must be a {kind.__name__}")
        for key in ("n_trials", "seed"):
            if type(getattr(settings, key)) is not int:
                raise ValueError(f"{key} must be an integer")
        words = [*settings.overrides, *settings.space, settings.config_dir or ""]
        words.append(settings.storage or "")
        if not all(isinstance(each, str) for each in words):
            raise ValueError("overrides, keys of the space, config_dir and storage must be texts")
        if not all(isinstance(rule, dict) for rule in settings.space.values()):
            raise ValueError("each key of the space needs a mapping, such as {low: 1, high: 9}")
        return settings


class StudyFolder:
    """The files of one study, by name."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[\w-]+", name):
            raise StudyError(f"study name {name!r}: use only letters, digits, _ and -")
        self.name = name
        self.path = STUDY_ROOT / name
        self.settings = self.path / "study.yaml"
        # Absolute: used while envs run, which may call os.chdir.
        self.journal = self.path.absolute() / "journal.log"
        self.trials = self.path.absolute() / "trials"
        self.logs = self.path / "logs"
        self.storage_url: str | None = None  # of a new study; that of another is in study.yaml
        self.trust = False  # a database that another user's study.yaml names
        self.waits = False  # for a database that has gone away

    @classmethod
    def open(cls, name: str) -> StudyFolder:
        """An existing study."""
        folder = cls(name)
        if not folder.settings.is_file():
            known = ", ".join(each.name for each in all_studies()) or "none"
            raise StudyError(f"study {name} does not exist in {STUDY_ROOT}/; existing: {known}")
        folder.check()
        return folder

    def check(self, *, trust: bool = False) -> None:
        """Refuse links out of the folder unless ``trust``, and files that cannot be read."""
        if self.path.is_dir():
            check_folder(self.path, trust=trust)
        if self.journal.exists():
            check_size(self.journal, most_bytes=TABLE_BYTES)

    def make(self) -> None:
        try:
            for folder in (self.trials, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"cannot create {self.path}: {error}") from error

    def read(self) -> StudySettings:
        try:
            content = read_regular(self.settings, most_bytes=TEXT_BYTES)
            report_change(self.settings, content)
            text = content.decode("utf-8")
            check_yaml(text)
            return StudySettings.checked(yaml.safe_load(text))
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise StudyError(f"cannot read {self.settings}: {first_line(error)}") from error

    def read_own(self, *, trust: bool) -> StudySettings:
        """The settings for a command that uses their overrides as if this user had typed them."""
        if not (trust or is_signed(_PURPOSE, read_regular(self.settings, most_bytes=TEXT_BYTES))):
            raise UntrustedError(
                f"{self.settings}: this user did not write it, or it has changed since, and its "
                "overrides can run any code; if you trust its author, add --trust (with study "
                "start: trust=true)"
            )
        return self.read()

    def write(self, settings: StudySettings) -> None:
        text = yaml.safe_dump(settings._asdict(), sort_keys=False, width=1000)
        write_text(self.settings, sealed(_PURPOSE, text))

    @cached_property
    def database(self) -> Database | None:
        """The database that study.yaml names, or None: the trials are in the journal."""
        url = self.storage_url
        if url is None and self.settings.is_file() and self.read().storage is not None:
            url = self.read_own(trust=self.trust).storage  # another user's server may be hostile
        return None if url is None else Database(url, waits=self.waits)

    @cached_property
    def storage(self) -> BaseStorage:
        if self.database is not None:
            return self.database.storage
        backend = JournalFileBackend(str(self.journal), lock_obj=JournalLock(self.journal))
        return JournalStorage(backend)

    def study(self) -> optuna.Study:
        """The study as Optuna sees it, including later changes by other processes."""
        with self._damage_named():
            return self._study()

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        """Optuna raises many types for a journal with lines that it did not write."""
        if self.database is not None:
            with self.database.errors_named():
                yield
            return
        try:
            yield
        except (Timeout, OSError):
            raise
        except Exception as error:
            reason = shorten(f"{type(error).__name__}: {first_line(error)}")
            raise StudyError(f"{self.journal} is damaged: {reason}") from error

    def _study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = self.storage
        if self.name not in optuna.get_all_study_names(storage):
            # Always writes to the journal, also if the study exists.
            optuna.create_study(
                study_name=self.name, storage=storage, direction="maximize", load_if_exists=True
            )
        # Trials with long rollouts skip points, so few trials may have a value at a point.
        pruner = MedianPruner(n_startup_trials=5, n_min_trials=5)
        return optuna.load_study(study_name=self.name, storage=storage, pruner=pruner)

    def read_trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers; do not change them."""
        with self._damage_named():
            trials = self._study().get_trials(deepcopy=False)
            for trial in trials:
                _check_notes(trial)
        return trials

    def run_dirs(self) -> list[Path]:
        """The run folders of all trials that have begun, in the order of the trials."""
        trials = self.read_trials()
        return [Path(t.user_attrs["run_dir"]) for t in trials if "run_dir" in t.user_attrs]

    def add_trial(self, trial: FrozenTrial) -> Trial:
        """Write a new trial to the journal, in one line: a kill leaves all of it or nothing."""
        with self._damage_named():
            study = self._study()
            study_id = self.storage.get_study_id_from_name(self.name)
            return Trial(study, self.storage.create_new_trial(study_id, template_trial=trial))

    def open_trial(self, number: int) -> Trial:
        """A writable trial, created by any process."""
        with self._damage_named():
            study = self._study()
            study_id = self.storage.get_study_id_from_name(self.name)
            trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
            return Trial(study, trial_id)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from creating or claiming a trial, in a ``with`` block."""
        lock = FileLock(self.path / "claim.lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(lock.acquire())
            except OSError as error:
                raise StudyError(
                    f"cannot lock {lock.lock_file}: {error}; use a file system with file locks"
                ) from error
            if self.database is not None:
                stack.enter_context(self.database.alone(self.name))
            yield

    def share(self) -> None:
        """Show study.yaml to machines that only share the database."""
        if self.database is not None:
            text = read_regular(self.settings, most_bytes=TEXT_BYTES).decode("utf-8")
            with self._damage_named():
                self._study().set_user_attr(_SHARED, text)

    def exists(self) -> bool:
        """Whether the study was started, here or on another machine with the same database."""
        if self.settings.is_file() or self.database is None:
            return self.settings.is_file()
        with self._damage_named():
            studies = {each.study_name: each for each in self.storage.get_all_studies()}
        text = studies[self.name].user_attrs.get(_SHARED) if self.name in studies else None
        if not isinstance(text, str):
            return False
        self.make()
        write_text(self.settings, text)
        return True

    def claim(self, trial: FrozenTrial) -> FileLock | None:
        """The lock of a trial, or None if another process trains the trial."""
        # A file system may hide the locks of other machines.
        if trial.user_attrs.get("host") != HOST and self._silence(trial) < _SILENT_SECONDS:
            return None
        lock = self.trial_lock(trial.number)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def trial_lock(self, number: int) -> FileLock:
        return FileLock(self.trials / f"{number}.lock")

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Whether a process trains this trial, whose state in the journal is running."""
        lock = self.claim(trial)
        if lock is not None:
            lock.release()
        return lock is None

    def _silence(self, trial: FrozenTrial) -> float:
        """Seconds since the last heartbeat."""
        if self.database is not None:
            started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
            beat = max(trial.user_attrs.get("beat", 0.0), started)
            # Nobody could write a beat while the server was away.
            return float(time.time() - max(beat, self.database.answers_since))
        try:
            beat = os.stat(self.trial_lock(trial.number).lock_file).st_mtime
        except OSError:
            beat = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        return time.time() - beat


def _check_notes(trial: FrozenTrial) -> None:
    for key, value in trial.user_attrs.items():
        if key in _NOTES and not isinstance(value, _NOTES[key]):
            raise ValueError(f"trial {trial.number} has {key}={value!r}")


@contextmanager
def held(folder: StudyFolder, trial: Trial, lock: FileLock) -> Iterator[None]:
    """Show other machines a heartbeat during the block, then release the lock of a trial."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            with suppress(OSError):
                os.utime(lock.lock_file)
            if folder.database is not None:
                folder.database.beat(folder.name, trial.number)
            if ended.wait(_BEAT_SECONDS):
                return

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        lock.release()


def all_studies() -> list[StudyFolder]:
    return [StudyFolder(each.parent.name) for each in sorted(STUDY_ROOT.glob("*/study.yaml"))]


def finished(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Complete, pruned and failed trials: those that count towards ``n_trials``."""
    return [trial for trial in trials if trial.state.is_finished()]


def running(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that have begun and not ended; some may be dead."""
    return [trial for trial in trials if trial.state == TrialState.RUNNING]


def why_hopeless(trials: Sequence[FrozenTrial], first: int) -> str | None:
    """The first error, if all trials from number ``first`` on have failed; None if too few."""
    new = [trial for trial in finished(trials) if trial.number >= first]
    failed = [trial for trial in new if trial.state == TrialState.FAIL]
    if len(failed) < _HOPELESS_FAILURES or len(failed) < len(new):
        return None
    return str(failed[0].user_attrs.get("error", "unknown"))
