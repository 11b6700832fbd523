"""How much memory a rollout of PPO needs, for the error of a device that has too little."""

from __future__ import annotations

import math

import torch

from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.training.contracts import Actor
from ml_pipeline.training.out_of_memory import memory_of, obs_bytes, shown_bytes

_N_FLOATS = 5  # reward, log_prob, value, advantage, value_target
_N_FLAGS = 3  # terminated, truncated, episode_start


def step_bytes(reader: ObservationReader, distribution: Distribution, *, is_masked: bool) -> int:
    """Bytes in a rollout per step of one env."""
    action = math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    mask = distribution.mask_size if is_masked else 0
    return obs_bytes(reader) + action + mask + 4 * _N_FLOATS + _N_FLAGS


def rollout_bytes(agent: Actor, *, n_steps: int, n_envs: int, keeps_final_obs: bool = False) -> int:
    """Bytes of a rollout, [T, n_envs], and of the noise of its actions.

    ``keeps_final_obs``: the rollout of tensor envs has a final observation at every step.
    """
    distribution = agent.distribution
    step = step_bytes(agent.reader, distribution, is_masked=agent.masks.are_used)
    step += obs_bytes(agent.reader) if keeps_final_obs else 0
    noise_row = distribution.draw_noise(1, 1, torch.Generator()).nbytes
    n_rows = 1 + distribution.noise_row(n_steps - 1)
    return n_envs * (n_steps * step + n_rows * noise_row)


def memory_advice(
    agent: Actor,
    *,
    n_steps: int,
    n_envs: int,
    n_minibatches: int,
    keeps_final_obs: bool = False,
) -> str:
    """How much memory a rollout needs and the device has, and which keys reduce the need."""
    rollout = rollout_bytes(agent, n_steps=n_steps, n_envs=n_envs, keeps_final_obs=keeps_final_obs)
    each = shown_bytes(rollout / (n_steps * n_envs))
    needs = (
        f"a rollout of agent.n_steps={n_steps} x n_envs={n_envs} needs about "
        f"{shown_bytes(rollout)}, {each} per env and step"
    )
    if not agent.memory_size and agent.device.type == "cpu":
        needs += ", and as much again while it is shuffled"
    return (
        f"{needs}{memory_of(agent.device)}. Lower n_envs or agent.n_steps for a smaller rollout; "
        f"raise agent.n_minibatches={n_minibatches} for smaller minibatches"
    )
