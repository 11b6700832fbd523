"""StudyFolder: what processes and machines that work on one study share, studies/NAME/.

study.yaml says what is searched, journal.log holds the trials (Optuna's), trials/N.lock is held
by whoever trains trial N. A kill releases a lock: a trial that is running by the journal and free
by its lock is dead, and can be taken up.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, TrialState

from ml_pipeline.errors import UserError
from ml_pipeline.runs.run_folder import write_text

STUDY_ROOT = Path("studies")
HOST = platform.node()

_BEAT_SECONDS = 10.0
# Of a trial on another machine, whose locks may not be seen here: then it is dead.
_SILENT_SECONDS = 60.0
_LOCK_SECONDS = 30.0
_HOPELESS = 3  # failures


class StudyError(UserError):
    """A study that is not there, or is not what this command takes it for."""


class StudySettings(NamedTuple):
    """What study.yaml holds."""

    overrides: list[str]  # of every trial
    space: dict[str, dict[str, Any]]
    n_trials: int
    seed: int
    objective: str


class StudyFolder:
    """The files of one study, by name."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[\w-]+", name):
            raise StudyError(f"a study's name has letters, digits, _ and - only, got {name!r}")
        self.name = name
        self.path = STUDY_ROOT / name
        self.settings = self.path / "study.yaml"
        self.journal = self.path / "journal.log"
        self.trials = self.path / "trials"
        self.logs = self.path / "logs"

    @classmethod
    def open(cls, name: str) -> StudyFolder:
        """An existing study, or one line that says which there are."""
        folder = cls(name)
        if not folder.settings.is_file():
            known = ", ".join(each.name for each in all_studies()) or "none yet"
            raise StudyError(f"there is no study {name} in {STUDY_ROOT}/; there are: {known}")
        return folder

    def read(self) -> StudySettings:
        try:
            return StudySettings(**yaml.safe_load(self.settings.read_text(encoding="utf-8")))
        except (OSError, TypeError, yaml.YAMLError) as error:
            raise StudyError(f"{self.settings} cannot be read: {error}") from error

    def write(self, settings: StudySettings) -> None:
        text = yaml.safe_dump(settings._asdict(), sort_keys=False, width=1000)
        write_text(self.settings, text)

    def make(self) -> None:
        try:
            for folder in (self.trials, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"cannot make the study folder {self.path}: {error}") from error

    def storage(self) -> JournalStorage:
        lock: BaseJournalFileLock
        if sys.platform == "win32":  # which knows no flock
            lock = JournalFileOpenLock(str(self.journal))
        else:
            lock = JournalLock(self.journal)
        return JournalStorage(JournalFileBackend(str(self.journal), lock_obj=lock))

    def study(self) -> optuna.Study:
        """The study as all see it; a trial that another process adds or ends is seen, too."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Trials with long rollouts skip points: one that few have reached tells little.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_min_trials=5)
        storage = self.storage()
        try:
            return optuna.load_study(study_name=self.name, storage=storage, pruner=pruner)
        except KeyError:  # it begins; to create it each time would write to the journal
            return optuna.create_study(
                study_name=self.name,
                storage=storage,
                pruner=pruner,
                direction="maximize",
                load_if_exists=True,
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else begins or takes up a trial meanwhile."""
        lock = FileLock(self.path / "claim.lock")
        lock.take(wait=True)
        try:
            yield
        finally:
            lock.release()

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Whether a trial that is running by the journal is so in truth."""
        claim = Claim.of(self, trial)
        if claim is not None:
            claim.release()
        return claim is None


def all_studies() -> list[StudyFolder]:
    return [StudyFolder(each.parent.name) for each in sorted(STUDY_ROOT.glob("*/study.yaml"))]


def finished(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that count: complete, pruned or failed."""
    return [trial for trial in trials if trial.state.is_finished()]


def running(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """By the journal; dead ones among them."""
    return [trial for trial in trials if trial.state == TrialState.RUNNING]


def why_hopeless(trials: Sequence[FrozenTrial], first: int) -> str | None:
    """The reason of the first failure, if the first trials from number ``first`` on all failed."""
    new = [trial for trial in finished(trials) if trial.number >= first]
    failed = [trial for trial in new if trial.state == TrialState.FAIL]
    if len(failed) < _HOPELESS or len(failed) < len(new):
        return None
    return str(failed[0].user_attrs.get("error", "unknown"))


class FileLock:
    """A lock on a file that ends with its process; ``is_known`` tells whether it means anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_known = True  # False: this system or file system has no such locks
        self._descriptor: int | None = None

    def take(self, *, wait: bool) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if sys.platform == "win32":
            self.is_known = False
        else:
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:
                self.is_known = False
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Claim:
    """The right to train a trial, held until ``release`` or the end of this process."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock
        self._released = threading.Event()

    @classmethod
    def of(cls, folder: StudyFolder, trial: FrozenTrial, *, new: bool = False) -> Claim | None:
        """None: someone else trains it; ``new``: nobody can."""
        path = folder.trials / f"{trial.number}.lock"
        last_beat = _modified(path)
        if last_beat is None and trial.datetime_start is not None:
            last_beat = trial.datetime_start.timestamp()
        lock = FileLock(path)
        if not lock.take(wait=new):
            return None
        is_ours = lock.is_known and trial.user_attrs.get("host") == HOST
        if not new and not is_ours and time.time() - (last_beat or 0.0) < _SILENT_SECONDS:
            lock.release()
            return None
        return cls(lock)

    def keep_beating(self) -> None:
        """Show to other machines that this one lives."""

        def beat() -> None:
            while not self._released.wait(_BEAT_SECONDS):
                with suppress(OSError):
                    os.utime(self._lock.path)

        os.utime(self._lock.path)
        threading.Thread(target=beat, daemon=True).start()

    def release(self) -> None:
        self._released.set()
        self._lock.release()


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


class JournalLock(BaseJournalFileLock):
    """One writer at a time, also across machines; a killed one holds nobody up.

    A symlink, made or not, decides among machines, as Optuna's own lock does; the flock before it
    among the processes of one machine. So a symlink of this machine that is met with the flock in
    hand was left by a dead process. Whatever that one had half written is cut off: Optuna cannot
    read beyond it.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._link = journal.with_name(f"{journal.name}.lock")
        self._flock = FileLock(journal.with_name(f"{journal.name}.{HOST}.flock"))

    def acquire(self) -> bool:
        self._flock.take(wait=True)
        try:
            self._link_up()
            self._mend()
        except BaseException:
            self._flock.release()
            raise
        return True

    def release(self) -> None:
        with suppress(OSError):  # another machine has taken this one for dead
            os.unlink(self._link)
        self._flock.release()

    def _link_up(self) -> None:
        mine = f"{HOST}:{secrets.token_hex(4)}"
        met, since = "", 0.0
        while True:
            try:
                os.symlink(mine, self._link)
                return
            except FileExistsError:
                pass
            try:
                other = os.readlink(self._link)
            except OSError:
                continue  # gone meanwhile
            if other != met:
                met, since = other, time.monotonic()
            is_left = self._flock.is_known and other.partition(":")[0] == HOST
            if is_left or time.monotonic() - since > _LOCK_SECONDS:
                with suppress(OSError):
                    os.unlink(self._link)
            else:
                time.sleep(0.005)

    def _mend(self) -> None:
        with self._journal.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            while size > 0:
                file.seek(size - 1)
                if file.read(1) == b"\n":
                    break
                size -= 1
            file.truncate(size)
