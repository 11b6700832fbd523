"""Resuming: save the latest checkpoint of a run together with its envs, and restore both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

import yaml

from ml_pipeline.config.train import EnvConfig
from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.errors import last_line
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    drop_numbered,
    load_checkpoint,
    misfit_explained,
    numbered_name,
    numbered_steps,
    save_checkpoint,
)
from ml_pipeline.runs.console import say
from ml_pipeline.runs.env_snapshots import (
    SnapshotError,
    load_snapshots,
    save_snapshots,
    sweep_snapshots,
)
from ml_pipeline.runs.large_files import save_files, sweep_files
from ml_pipeline.runs.run_folder import RunFolder, check_yaml
from ml_pipeline.training.contracts import RunningLoop
from ml_pipeline.training.loop import Loop

# Replaces the token of tensor envs, whose state is part of the checkpoint.
_IN_CHECKPOINT = "in the checkpoint"


def save_latest(run: RunFolder, loop: RunningLoop, *, keep: int = 0) -> None:
    """Save the envs, then the checkpoint that refers to them.

    A kill between the two leaves the previous checkpoint with its envs. With ``keep``, the same
    state also becomes a numbered checkpoint; then all but the last ``keep`` of them are removed.
    """
    if not loop.can_save:
        return  # a rank failed; the last checkpoint has the replay of all ranks
    token = _save_envs(run, loop, numbered=loop.env_steps if keep else None)
    if token is None and _is_saved_with_envs(run, loop.env_steps):
        return  # stopped during a rollout: the existing checkpoint has these weights and its envs
    save_files(run, loop.trainer)
    state = {**loop.state_dict(), "env_snapshots": token}
    save_checkpoint(run, LATEST, state)
    if keep:
        save_checkpoint(run, numbered_name(loop.env_steps), state)
        drop_numbered(run, keep=keep, last=loop.env_steps)
    others = [each for each in numbered_steps(run) if not keep or each != loop.env_steps]
    sweep_snapshots(run, keep=token, numbered=others)
    sweep_files(run, loop.trainer, state)


def _save_envs(run: RunFolder, loop: RunningLoop, *, numbered: int | None) -> str | None:
    try:
        snapshots = loop.env_snapshots()
        if snapshots is None:
            return None
        return save_snapshots(run, snapshots, numbered=numbered) if snapshots else _IN_CHECKPOINT
    except CheckpointError:  # a rank could not write its replay
        raise
    except Exception as error:  # the weights must be saved even if the envs cannot be
        say(f"could not save the envs; a resume will start new episodes: {last_line(error)}")
        return None


def _is_saved_with_envs(run: RunFolder, env_steps: int) -> bool:
    try:
        state = load_checkpoint(run, LATEST)
    except CheckpointError:
        return False
    return state["env_steps"] == env_steps and state.get("env_snapshots") is not None


def sweep_litter(run: RunFolder, state: StateDict) -> None:
    """Remove unfinished files of a killed process; the caller must hold the folder's lock."""
    run.sweep()
    numbered = numbered_steps(run)
    if state["env_steps"] not in numbered:  # otherwise latest may need snapshots of its own
        sweep_snapshots(run, keep=state.get("env_snapshots"), numbered=numbered)


class SavedEpisodes(NamedTuple):
    """The envs of a checkpoint, or the reason why a resumed run starts new episodes."""

    snapshots: list[bytes]  # empty if the envs are in the checkpoint itself
    why_not: str  # empty: the episodes can continue


def read_episodes(
    run: RunFolder, state: StateDict, env: Mapping[str, object], *, trust: bool
) -> SavedEpisodes:
    """Call it before the resume changes a file; ``env`` is the config of the env.

    Untrusted snapshots raise an error: the next save would replace them, so the user must decide.
    """
    token = state.get("env_snapshots")  # a copy of best.pt has none
    if _saved_env(run, state) != env:
        return SavedEpisodes([], "the env's settings have changed")
    if token is None:
        return SavedEpisodes([], "the checkpoint was saved without the envs")
    if token == _IN_CHECKPOINT:
        return SavedEpisodes([], "")
    try:
        return SavedEpisodes(load_snapshots(run, token, trust=trust), "")
    except (SnapshotError, OSError) as error:
        return SavedEpisodes([], last_line(error))


def _saved_env(run: RunFolder, state: StateDict) -> object:
    with misfit_explained(run):
        check_yaml(state["config"])
        saved = (yaml.safe_load(state["config"]) or {}).get("env")
    # An older run lacks the keys that are new since; it used what is their default.
    return {**asdict(EnvConfig()), **saved} if isinstance(saved, Mapping) else saved


def resume_episodes(run: RunFolder, loop: Loop, state: StateDict, saved: SavedEpisodes) -> str:
    """Continue the saved episodes; returns a phrase for the console, with the reason on failure."""
    if saved.why_not:
        return f"with new episodes: {saved.why_not}"
    try:
        n_envs = sum(env.num_envs for env in loop.envs)
        if saved.snapshots and len(saved.snapshots) != n_envs:
            n_saved = len(saved.snapshots)
            raise SnapshotError(f"the checkpoint has {n_saved} envs, this run {n_envs}")
        with misfit_explained(run, passes=(WorkerError, OSError, ValueError)):
            loop.resume_episodes(state, saved.snapshots)
    except (SnapshotError, WorkerError, OSError, ValueError) as error:
        return f"with new episodes: {last_line(error)}"
    return "in the middle of its episodes"
