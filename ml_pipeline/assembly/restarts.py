"""Restarts by torchrun: the same command continues the run of the ranks that died.

With ``--max-restarts``, rank 0 notes its run folder in a file under ``run_root``. The name of the
file identifies the process of torchrun: its restarts have the same one, other runs another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from ml_pipeline.assembly.compose import checked_config, resumed_folder
from ml_pipeline.errors import UserError
from ml_pipeline.ranks.rendezvous import is_launched, launched_rank, meet
from ml_pipeline.runs.console import say
from ml_pipeline.runs.run_folder import RunFolder, remove, write_text

_LOCK_SECONDS = 20.0  # how long workers of the rank that died may keep the folder locked


class Start(NamedTuple):
    """How a command begins: as it was typed, or as the resume of its own run."""

    cfg: DictConfig
    overrides: Sequence[str]
    folder: RunFolder | None  # of a new run; None: any, or that of the resumed run
    is_complete: bool = False  # there is nothing left to do


class _Decision(NamedTuple):
    """What rank 0 tells all ranks."""

    resume: str | None = None  # the run to resume; None: the command runs as it was typed
    new: str | None = None  # the folder of a new run
    is_complete: bool = False


def find_start(cfg: DictConfig, overrides: Sequence[str]) -> Start:
    """All ranks call this before anything else; rank 0 decides for them."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return Start(cfg, overrides, None)
    if cfg.resume is None:
        checked_config(cfg)  # a mistake stops all ranks here
    decision = _Decision()
    if launched_rank() == 0:
        decision = _decide(cfg, _Note(Path(cfg.run_root)))
    if is_launched():
        answer = meet(json.dumps(decision), float(cfg.rank_timeout_seconds))[1]
        decision = _Decision(*json.loads(answer))
    if decision.resume is None:
        return Start(cfg, overrides, RunFolder(Path(decision.new)) if decision.new else None)
    cfg = cfg.copy()
    cfg.resume = decision.resume
    # The folder has the config of the whole command, also of experiment= and init_from=.
    quoted = str(cfg.resume).replace("'", "\\'")  # for Hydra, whose strings escape only the quote
    return Start(cfg, [f"resume='{quoted}'"], None, decision.is_complete)


def _decide(cfg: DictConfig, note: _Note) -> _Decision:
    from ml_pipeline.assembly.plan import new_folder
    from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint

    before = note.read()
    number = 0 if before is None else int(before["restarts"]) + 1
    if before is not None:
        run = RunFolder(Path(before["run"]))
        title = f"restart {number} of torchrun: "
        if _saved(run) != before["saved"]:
            note.write(before["run"], before["saved"], number)
            _wait_for_workers(run)
            is_complete = run.read_summary().get("status") == "finished"
            env_steps = int(load_checkpoint(run, LATEST)["env_steps"])
            rest = "is complete" if is_complete else f"from env step {env_steps:,}"
            say(f"{title}{'' if is_complete else 'resuming '}{run.path} {rest}")
            return _Decision(resume=before["run"], is_complete=is_complete)
        say(f"{title}{run.path} has no new checkpoint yet, so the command starts again")
    if cfg.resume is not None:
        run, new = resumed_folder(str(cfg.resume)), None
    else:
        run = new_folder(checked_config(cfg))
        new = str(run.path)
    note.write(str(run.path), _saved(run), number)
    return _Decision(new=new)


def _saved(run: RunFolder) -> list[int] | None:
    """Changes with every save of the latest checkpoint; None without one."""
    from ml_pipeline.runs.checkpoint import LATEST, checkpoint_path

    try:
        status = checkpoint_path(run, LATEST).stat()
    except FileNotFoundError:
        return None
    return [status.st_mtime_ns, status.st_size]


def _wait_for_workers(run: RunFolder) -> None:
    """Workers of a killed rank may hold its lock for a moment."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while run.is_locked() and time.monotonic() < deadline:
        time.sleep(0.1)


class _Note:
    """The run of this torchrun: its folder, its checkpoint at the start, and the restarts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._launcher = _process(str(os.getppid()))
        text = json.dumps([os.environ.get("TORCHELASTIC_RUN_ID"), *self._launcher])
        self._file = root / f".torchrun-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[str, Any] | None:
        """None if this torchrun has not noted a run."""
        content = _content(self._file)
        return content if content and content.get("launcher") == self._launcher else None

    def write(self, run: str, saved: list[int] | None, restarts: int) -> None:
        values = {"launcher": self._launcher, "run": run, "saved": saved, "restarts": restarts}
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_root={self._root}: cannot be created: {error}") from error
        self._sweep()
        write_text(self._file, json.dumps(values) + "\n")

    def _sweep(self) -> None:
        """Remove the notes of launchers on this machine that have ended."""
        for file in self._root.glob(".torchrun-*.json"):
            launcher: list[str] = (_content(file) or {}).get("launcher", [])
            is_of_here = launcher[:2] == self._launcher[:2]
            if is_of_here and launcher != _process(str(launcher[2])):
                remove(file)


def _content(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or not a note
        return None
    return content if isinstance(content, dict) else None


def _process(pid: str) -> list[str]:
    """The machine, its last boot, the process and its start; unknown parts are empty."""
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    started = stat[19] if len(stat) > 19 else ""
    return [platform.node(), _read("/proc/sys/kernel/random/boot_id").strip(), pid, started]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # the process has ended, or the system has no /proc
        return ""
