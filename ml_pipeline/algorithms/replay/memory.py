"""How much memory a replay buffer needs, for the error of a device that has too little."""

from __future__ import annotations

import math

from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.out_of_memory import memory_of, obs_bytes, shown_bytes

_N_FLAGS = 3  # terminated, truncated, episode_start


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
