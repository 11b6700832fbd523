"""Resuming: the latest checkpoint of a run together with its envs, saved and taken up again."""

from __future__ import annotations

from typing import Any

from ml_pipeline.envs.workers.errors import WorkerError
from ml_pipeline.protocols import StateDict, Trainer
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

# In the place of a token, where the checkpoint itself holds the envs: they are tensors.
_IN_CHECKPOINT = "in the checkpoint"


def save_latest(run: RunFolder, trainer: Trainer) -> None:
    """Save what a resume needs: first the envs, then the checkpoint that refers to them.

    A kill in between leaves the checkpoint before, and the envs that it refers to.
    """
    token = _save_envs(run, trainer)
    if token is None and _is_saved_with_envs(run, trainer.env_steps):
        return  # stopped amid a rollout: what is there is as new, and a resume of it is exact
    save_checkpoint(run, LATEST, {**trainer.state_dict(), "env_snapshots": token})
    sweep_snapshots(run, keep=token)


def _save_envs(run: RunFolder, trainer: Trainer) -> str | None:
    try:
        snapshots = trainer.env_snapshots()
        if snapshots is None:
            return None
        return save_snapshots(run, snapshots) if snapshots else _IN_CHECKPOINT
    except Exception as error:  # whatever the envs or the disk do, the weights are to be saved
        reason = str(error).strip().rpartition("\n")[2]
        say(f"the envs could not be saved; a resume would begin new episodes: {reason}")
        return None


def _is_saved_with_envs(run: RunFolder, env_steps: int) -> bool:
    try:
        state = load_checkpoint(run, LATEST)
    except CheckpointError:
        return False
    return state["env_steps"] == env_steps and state.get("env_snapshots") is not None


def sweep_litter(run: RunFolder, state: StateDict) -> None:
    """Remove what a kill has left of unfinished files; only for whoever holds the folder's lock."""
    run.sweep()
    sweep_snapshots(run, keep=state.get("env_snapshots"))


def resume_episodes(run: RunFolder, trainer: Any, state: StateDict, *, trust: bool) -> str:
    """Let the envs go on in mid-episode; the words that say so, or why they begin anew.

    Snapshots that are there, but not to be trusted, are an error: the next save would replace
    them, and whether they are is for the user to say.
    """
    token = state.get("env_snapshots")  # best.pt has none, and may have been copied
    if token is None:
        return "with new episodes: the envs were not saved with it"
    try:
        snapshots: list[bytes] = []
        if token != _IN_CHECKPOINT:
            snapshots = load_snapshots(run, token, trust=trust)
            n_envs = sum(env.num_envs for env in trainer.envs)
            if len(snapshots) != n_envs:
                raise SnapshotError(f"{len(snapshots)} envs were saved, and there are {n_envs}")
        trainer.resume_episodes(state, snapshots)
    except UntrustedSnapshotError:
        raise
    except (SnapshotError, WorkerError, OSError, ValueError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        return f"with new episodes: {reason}"
    return "in the midst of its episodes"
