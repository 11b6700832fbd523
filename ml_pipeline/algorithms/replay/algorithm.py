"""replay_algorithm: the ``Algorithm`` of an agent that learns from replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Actor, Algorithm
from ml_pipeline.training.old_weights import load_parts
from ml_pipeline.training.out_of_memory import memory_of, obs_bytes, shown_bytes

_N_FLAGS = 3  # terminated, truncated, episode_start


def replay_algorithm(
    config: type[OffPolicyConfig], agent: Callable[..., ReplayAgent[Any, Any, Any]]
) -> Algorithm:
    """``agent`` is a subclass of ``ReplayAgent``, whose settings are a ``config``."""
    return Algorithm(
        config,
        agent,
        OffPolicyTrainer,
        replay_advice,
        start_from,
        trains_on_ranks=True,
        state_of_rank=state_of_rank,
    )


def start_from(agent: ReplayAgent[Any, Any, Any], state: StateDict) -> None:
    """Load all that another agent has learnt; optimisers, noise and replay stay new."""
    load_parts(agent, state, ("spaces", *agent.parts))


def replay_advice(agent: Actor, config: OffPolicyConfig, n_envs: int, tensor_envs: bool) -> str:
    """How much memory a replay buffer needs, which stores each frame of a stack once."""
    distribution, size = agent.distribution, int(config.buffer_size)
    each = obs_bytes(agent.reader) / config.stacked_frames + 4 + _N_FLAGS  # 4 of the reward
    each += math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    each += distribution.mask_size if agent.masks.are_used else 0
    return (
        f"a replay buffer of agent.buffer_size={size} needs about {shown_bytes(size * each)}, "
        f"{shown_bytes(each)} per transition{memory_of(agent.device)}. Lower agent.buffer_size; "
        f"lower agent.batch_size={config.batch_size} for smaller updates"
    )
