"""How much memory a rollout of PPO needs, for the error of a device that has too little."""

from __future__ import annotations

import math

import torch

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.out_of_memory import memory_of, obs_bytes, shown_bytes

_N_FLOATS = 5  # reward, log_prob, value, advantage, value_target
_N_FLAGS = 3  # terminated, truncated, episode_start


def rollout_bytes(agent: Actor, *, n_steps: int, n_envs: int, tensor_envs: bool = False) -> int:
    """Bytes of a rollout, [T, n_envs], and of the noise of its actions."""
    distribution, obs = agent.distribution, obs_bytes(agent.reader)
    action = math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    mask = distribution.mask_size if agent.masks.are_used else 0
    step = obs + action + mask + 4 * _N_FLOATS + _N_FLAGS
    # Of every step the final observation, and the recurrent state before it.
    step += obs + 4 * agent.memory_size if tensor_envs else 0
    noise_row = distribution.draw_noise(1, 1, torch.Generator()).nbytes
    n_rows = 1 + distribution.noise_row(n_steps - 1)
    return n_envs * (n_steps * step + n_rows * noise_row)


def memory_advice(agent: Actor, config: PPOConfig, n_envs: int, tensor_envs: bool) -> str:
    """How much memory a rollout needs and the device has, and which keys reduce the need."""
    n_steps = config.n_steps
    rollout = rollout_bytes(agent, n_steps=n_steps, n_envs=n_envs, tensor_envs=tensor_envs)
    each = shown_bytes(rollout / (n_steps * n_envs))
    needs = (
        f"a rollout of agent.n_steps={n_steps} x n_envs={n_envs} needs about "
        f"{shown_bytes(rollout)}, {each} per env and step"
    )
    if not agent.memory_size and agent.device.type == "cpu":
        needs += ", and as much again while it is shuffled"
    return (
        f"{needs}{memory_of(agent.device)}. Lower n_envs or agent.n_steps for a smaller rollout; "
        f"raise agent.n_minibatches={config.n_minibatches} for smaller minibatches"
    )
