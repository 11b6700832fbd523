"""Restarts by torchrun: the same command continues the run of the ranks that died.

With ``--max-restarts``, rank 0 notes its run folder in the store of torchrun. The store outlives
the ranks and ends with torchrun, so restarts find the note and other runs do not.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from omegaconf import DictConfig

from ml_pipeline.assembly.compose import checked_config, resumed_folder
from ml_pipeline.ranks.rendezvous import is_launched, launched_rank, launcher_store, meet
from ml_pipeline.runs.console import say
from ml_pipeline.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NOTE = "ml_pipeline/run"  # in the store: the folder, its checkpoint at the start, the restarts
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
    timeout_seconds = float(cfg.rank_timeout_seconds)
    decision = _Decision()
    if launched_rank() == 0:
        decision = _decide(cfg, launcher_store(timeout_seconds))
    if is_launched():
        answer = meet(json.dumps(decision), timeout_seconds)[1]
        decision = _Decision(*json.loads(answer))
    if decision.resume is None:
        return Start(cfg, overrides, RunFolder(Path(decision.new)) if decision.new else None)
    cfg = cfg.copy()
    cfg.resume = decision.resume
    # The folder has the config of the whole command, also of experiment= and init_from=.
    quoted = str(cfg.resume).replace("'", "\\'")  # for Hydra, whose strings escape only the quote
    return Start(cfg, [f"resume='{quoted}'"], None, decision.is_complete)


def _decide(cfg: DictConfig, store: Store) -> _Decision:
    from ml_pipeline.assembly.plan import new_folder
    from ml_pipeline.runs.checkpoint import LATEST, load_checkpoint

    number = 0
    if store.check([_NOTE]):
        before = json.loads(store.get(_NOTE))
        number = int(before["restarts"]) + 1
        run = RunFolder(Path(before["run"]))
        title = f"restart {number} of torchrun: "
        if _saved(run) != before["saved"]:
            store.set(_NOTE, json.dumps({**before, "restarts": number}))
            _wait_for_workers(run)
            is_complete = run.read_summary().get("status") == "finished"
            env_steps = int(load_checkpoint(run, LATEST)["env_steps"])
            rest = "is complete" if is_complete else f"from env step {env_steps:,}"
            say(f"{title}{'' if is_complete else 'resuming '}{run.path} {rest}")
            return _Decision(resume=before["run"], is_complete=is_complete)
        say(f"{title}{run.path} has no new checkpoint yet, so the command starts again")
    if cfg.resume is not None:
        run, new = resumed_folder(str(cfg.resume), trust=cfg.trust), None
    else:
        run = new_folder(checked_config(cfg))
        new = str(run.path)
    note = {"run": str(run.path), "saved": _saved(run), "restarts": number}
    store.set(_NOTE, json.dumps(note))
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
