"""Explains out-of-memory errors in one line: what training needs, and how to reduce it.

The numbers are estimates; libraries and caches need memory too.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ml_pipeline.agents.distributions import Distribution
from ml_pipeline.agents.observations import ObservationReader
from ml_pipeline.config.off_policy import OffPolicyConfig
from ml_pipeline.device import held_memory, total_memory
from ml_pipeline.errors import UserError
from ml_pipeline.training.contracts import Actor

_N_FLOATS = 5  # reward, log_prob, value, advantage, value_target
_N_FLAGS = 3  # terminated, truncated, episode_start

# Not every library has an exception class for it. In this order: CUDA, HIP and MPS; the CPU; one
# tensor that is too large for Metal; cuBLAS; sizes that no machine has.
_WORDS = (
    "out of memory",
    "DefaultCPUAllocator",
    "Invalid buffer size",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Storage size calculation overflowed",
    "array is too big",
    "Maximum allowed dimension exceeded",
)

NETWORK_ADVICE = (
    "the network alone does not fit, or other programs use the memory; use a smaller network or "
    "another device"
)


class DeviceMemoryError(UserError):
    """The device or the machine has too little memory."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether torch or NumPy could not allocate memory, on any device."""
    if isinstance(error, UserError):  # already explained
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_candidate = isinstance(error, (RuntimeError, ValueError))
    return is_candidate and any(words in str(error) for words in _WORDS)


@contextmanager
def memory_explained(device: torch.device | str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into one line: the fact, then ``advice()``."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        # A kept error, as in a sweep, would keep all tensors of its frames alive.
        traceback.clear_frames(error.__traceback__)
        asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
        size = f" (tried to allocate {asked[1]})" if asked else ""
        raise DeviceMemoryError(f"out of memory on {device}{size}: {advice()}") from error


def step_bytes(reader: ObservationReader, distribution: Distribution, *, is_masked: bool) -> int:
    """Bytes in a rollout per step of one env."""
    action = math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    mask = distribution.mask_size if is_masked else 0
    return obs_bytes(reader) + action + mask + 4 * _N_FLOATS + _N_FLAGS


def obs_bytes(reader: ObservationReader) -> int:
    return sum(
        math.prod(shape) * reader.dtypes[name].itemsize for name, shape in reader.shapes.items()
    )


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


def activation_bytes(agent: Actor, model: nn.Module, leaves: dict[str, NDArray[Any]]) -> int:
    """Bytes that a forward pass keeps per transition for the backward pass.

    ``leaves`` is one observation, [1, ...] each, as the agent's reader returns it.
    """

    def kept(n: int) -> int:
        sizes: dict[int, int] = {}  # by address: layers may share a tensor

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        batch = {name: np.repeat(leaf, n, axis=0) for name, leaf in leaves.items()}
        start = None
        if agent.memory_size:  # a sequence of one step
            batch = {name: leaf[np.newaxis] for name, leaf in batch.items()}
            start = torch.zeros(1, n, dtype=torch.bool, device=agent.device)
        inputs = agent.inputs(batch, None, agent.new_memory(n), start)
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = model(inputs)
        del outputs  # not earlier: a new tensor could get the address of a freed one
        return sum(sizes.values())

    # The difference cancels the weights, which are kept once. A batch of one is avoided, since
    # BatchNorm refuses it.
    return (kept(4) - kept(2)) // 2


def memory_advice(
    agent: Actor,
    per_transition: int | None,
    *,
    n_steps: int,
    n_envs: int,
    n_minibatches: int,
    keeps_final_obs: bool = False,
) -> str:
    """How much memory training needs and the device has, and which config keys reduce the need.

    ``per_transition`` comes from ``activation_bytes``; None: unknown.
    """
    rollout = rollout_bytes(agent, n_steps=n_steps, n_envs=n_envs, keeps_final_obs=keeps_final_obs)
    each = shown_bytes(rollout / (n_steps * n_envs))
    needs = (
        f"a rollout of agent.n_steps={n_steps} x n_envs={n_envs} needs about "
        f"{shown_bytes(rollout)}, {each} per env and step"
    )
    if not agent.memory_size and agent.device.type == "cpu":
        needs += ", and as much again while it is shuffled"
    if per_transition is not None:
        size = n_steps * n_envs // n_minibatches
        needs += (
            f", a minibatch of {size} about {shown_bytes(size * per_transition)} in the network"
        )
    return (
        f"{needs}{_memory_of(agent.device)}. Lower n_envs or agent.n_steps for a smaller rollout; "
        f"raise agent.n_minibatches={n_minibatches} for smaller minibatches"
    )


def replay_advice(agent: Actor, config: OffPolicyConfig, n_envs: int, tensor_envs: bool) -> str:
    """The same for agents with replay, which stores each frame of a stack once."""
    distribution, size = agent.distribution, int(config.buffer_size)
    each = obs_bytes(agent.reader) / config.stacked_frames + 4 + _N_FLAGS  # 4 of the reward
    each += math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    each += distribution.mask_size if agent.masks.are_used else 0
    return (
        f"a replay buffer of agent.buffer_size={size} needs about {shown_bytes(size * each)}, "
        f"{shown_bytes(each)} per transition{_memory_of(agent.device)}. Lower agent.buffer_size; "
        f"lower agent.batch_size={config.batch_size} for smaller updates"
    )


def _memory_of(device: torch.device) -> str:
    total, held = total_memory(device), held_memory(device)
    if total is None:
        return ""
    part = "" if held is None else f", of which this process held {shown_bytes(held)}"
    return f"; {device} has {shown_bytes(total)}{part}"


def shown_bytes(n_bytes: float) -> str:
    """2_500_000 -> "2.5 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"
