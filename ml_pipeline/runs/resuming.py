"""Resuming: save the latest checkpoint of a run together with its envs, and restore both."""

from __future__ import annotations

from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.errors import last_line
from ml_pipeline.protocols import StateDict
from ml_pipeline.runs.checkpoint import (
    LATEST,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from ml_pipeline.runs.console import say
from ml_pipeline.runs.env_snapshots import (
    SnapshotError,
    UntrustedSnapshotError,
    load_snapshots,
    save_snapshots,
    sweep_snapshots,
)
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training.loop import Loop

# Replaces the token of tensor envs, whose state is part of the checkpoint.
_IN_CHECKPOINT = "in the checkpoint"


def save_latest(run: RunFolder, loop: Loop) -> None:
    """Save the envs, then the checkpoint that refers to them.

    A kill between the two leaves the previous checkpoint with its envs.
    """
    token = _save_envs(run, loop)
    if token is None and _is_saved_with_envs(run, loop.env_steps):
        return  # stopped during a rollout: the existing checkpoint has these weights and its envs
    save_checkpoint(run, LATEST, {**loop.state_dict(), "env_snapshots": token})
    sweep_snapshots(run, keep=token)


def _save_envs(run: RunFolder, loop: Loop) -> str | None:
    try:
        snapshots = loop.env_snapshots()
        if snapshots is None:
            return None
        return save_snapshots(run, snapshots) if snapshots else _IN_CHECKPOINT
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
    sweep_snapshots(run, keep=state.get("env_snapshots"))


def resume_episodes(run: RunFolder, loop: Loop, state: StateDict, *, trust: bool) -> str:
    """Continue the saved episodes; returns a phrase for the console, with the reason on failure.

    Untrusted snapshots raise an error: the next save would replace them, so the user must decide.
    """
    token = state.get("env_snapshots")  # a copy of best.pt has none
    if token is None:
        return "with new episodes: the checkpoint was saved without the envs"
    try:
        snapshots: list[bytes] = []
        if token != _IN_CHECKPOINT:
            snapshots = load_snapshots(run, token, trust=trust)
            n_envs = sum(env.num_envs for env in loop.envs)
            if len(snapshots) != n_envs:
                raise SnapshotError(f"the checkpoint has {len(snapshots)} envs, this run {n_envs}")
        loop.resume_episodes(state, snapshots)
    except UntrustedSnapshotError:
        raise
    except (SnapshotError, WorkerError, OSError, ValueError) as error:
        return f"with new episodes: {last_line(error)}"
    return "in the middle of its episodes"
