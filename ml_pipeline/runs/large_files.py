"""LargeFiles: files beside the checkpoints of a run, which name them; each is written once.

A trainer that ``KeepsFiles`` saves here what is too large for a checkpoint, such as a replay
buffer. A file is removed once no checkpoint names it.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ml_pipeline.errors import UserError
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import (
    CheckpointError,
    check_plain,
    load_checkpoint,
    numbered_name,
    numbered_steps,
    read_sealed,
    write_sealed,
)
from ml_pipeline.runs.run_folder import RunFolder, remove
from ml_pipeline.training.contracts import KeepsFiles, NeedsDisk, Trainer
from ml_pipeline.training.out_of_memory import shown_bytes

_NAME = "file"  # of the content: finds files that were exchanged


class LargeFiles:
    """The files of one run; a ``FileStore``."""

    def __init__(self, run: RunFolder, *, salvages: bool = False) -> None:
        self._run = run
        self.salvages = salvages

    def write(self, name: str, content: StateDict) -> None:
        check_plain(content, name)
        self._run.replay.mkdir(exist_ok=True)
        data = io.BytesIO()
        torch.save({**content, _NAME: name}, data)
        write_sealed(self._run.replay / name, data.getvalue())

    def read(self, name: str) -> StateDict:
        """The content of a file; ``name`` comes from a checkpoint and must not leave the folder."""
        try:
            return self._read(name)
        except CheckpointError as error:
            if self.salvages:
                raise
            raise CheckpointError(
                f"{error}; to continue without these transitions, add salvage=true to "
                f"resume={self._run.shown}"
            ) from error

    def _read(self, name: str) -> StateDict:
        path = self._run.replay / name
        if path.parent != self._run.replay or not path.is_file():
            raise CheckpointError(f"{path} is missing; it holds transitions of the checkpoint")
        content = read_sealed(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} does not hold transitions")
        written = content.pop(_NAME, name)  # older files do not have it
        if not isinstance(written, str) or written != name:
            raise CheckpointError(f"{path} was written under another name: files were exchanged")
        return content

    def sweep(self, state: StateDict, names_in: Callable[[StateDict], set[str]]) -> None:
        """Remove the files that no checkpoint names; ``state`` is that of the latest."""
        if not self._run.replay.is_dir():
            return
        kept = names_in(state)
        unused = [path for path in self._run.replay.glob("*.rows") if path.name not in kept]
        for env_steps in numbered_steps(self._run) if unused else ():
            try:
                kept |= names_in(load_checkpoint(self._run, numbered_name(env_steps)))
            except CheckpointError:  # nothing can be resumed from it
                continue
        for path in unused:
            if path.name not in kept:
                remove(path)


@contextmanager
def read_errors_named(run: RunFolder) -> Iterator[None]:
    """Let errors of a trainer's own checks begin with the run folder."""
    try:
        yield
    except CheckpointError:
        raise
    except UserError as error:
        raise CheckpointError(f"{run.path}: {error}") from error


def save_files(run: RunFolder, trainer: Trainer) -> None:
    """Write what is in no file yet; call this before the checkpoint is saved."""
    if isinstance(trainer, KeepsFiles):
        trainer.save_files(LargeFiles(run))


def disk_remark(run: RunFolder, trainer: Trainer, env_steps: int) -> str:
    """A line if the files of a run of this length will not fit the disk, or an empty text."""
    if not isinstance(trainer, NeedsDisk):
        return ""
    needed, fix = trainer.disk_need(env_steps)
    written = sum(path.stat().st_size for path in run.replay.glob("*.rows"))
    free = shutil.disk_usage(run.path).free
    if needed <= free + written:
        return ""
    return (
        f"{run.shown / run.replay.name}: needs {shown_bytes(needed)} for the transitions of this "
        f"run, and its disk has {shown_bytes(free)} free, so saving will fail; {fix}, free some "
        "space, or set run_root to a folder on a larger disk"
    )


def load_files(run: RunFolder, trainer: Trainer, state: StateDict, *, salvage: bool) -> None:
    """Read the files of the checkpoint whose state ``trainer`` has just loaded."""
    if isinstance(trainer, KeepsFiles):
        with read_errors_named(run):
            trainer.load_files(LargeFiles(run, salvages=salvage), state)


def sweep_files(run: RunFolder, trainer: Trainer, state: StateDict) -> None:
    """Remove the files that no checkpoint needs any more."""
    if isinstance(trainer, KeepsFiles):
        LargeFiles(run).sweep(state, trainer.files_in)
