"""load_replay_buffer: the transitions of a run, read for the command ``replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ml_pipeline.algorithms.replay.buffer import ReplayBuffer
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.files import read_replay, replay_names
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.algorithms.replay.trainer import load_position
from ml_pipeline.assembly.compose import ConfigError, stored_config
from ml_pipeline.assembly.load import load_agent
from ml_pipeline.envs.factory import close_env
from ml_pipeline.ranks.world import ALONE
from ml_pipeline.records import StateDict
from ml_pipeline.runs.checkpoint import LATEST, CheckpointError, load_checkpoint, misfit_explained
from ml_pipeline.runs.large_files import LargeFiles, read_errors_named
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.training import loop


def load_replay_buffer(
    path: Path | str, *, trust: bool = False
) -> tuple[ReplayBuffer, int, list[int]]:
    """The transitions of a run's latest checkpoint on the CPU, its env steps, and file sizes.

    The buffer has the envs of all ranks. A run that is training may save while its files are read,
    and remove some of them; then the newer checkpoint is read.
    """
    run = RunFolder.open(path, trust=trust)
    config = stored_config(run)
    settings = config.agent
    if not isinstance(settings, OffPolicyConfig):
        raise ConfigError(
            f"agent.algorithm={settings.algorithm}: {run.path} has no replay buffer; "
            "choose a run of an off-policy agent"
        )
    trained = load_agent(path, LATEST, trust=trust)
    close_env(trained.env)
    saved = load_checkpoint(run, LATEST)
    while True:
        try:
            buffer = _read_buffer(run, saved, trained.agent, settings, int(config.n_envs))
            sizes = [(run.replay / name).stat().st_size for name in replay_names(saved)]
            return buffer, int(saved["env_steps"]), sizes
        except (CheckpointError, FileNotFoundError):
            newer = load_checkpoint(run, LATEST)
            if newer["env_steps"] == saved["env_steps"]:
                raise
            saved = newer


def _read_buffer(
    run: RunFolder, saved: StateDict, agent: Any, settings: OffPolicyConfig, n_envs: int
) -> ReplayBuffer:
    """The transitions of a checkpoint; ``n_envs``: of one rank."""
    own, parts = loop.state_of_rank(saved, ALONE)
    n_envs = own["n_ranks"] * n_envs
    buffer = ReplayBuffer(
        int(settings.buffer_size),
        n_envs,
        agent.reader,
        agent.distribution,
        n_step=settings.n_step,
        gamma=settings.gamma,
        device=torch.device("cpu"),
        has_masks=agent.masks.are_used,
        priority_exponent=settings.replay_exponent,
        stacked_frames=settings.stacked_frames,
    )
    with misfit_explained(run), read_errors_named(run):
        state = state_of_rank(own, parts, ALONE, n_envs)
        load_position(buffer, state)
        read_replay(LargeFiles(run), buffer, state.get("rank_segments"))
    return buffer
