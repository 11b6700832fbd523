"""Out of memory: told in one line, with what the rollout and a minibatch take and how to take less.

The numbers are estimates: libraries and caches take their share besides.
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
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ml_pipeline.agents.distributions import Distribution
from ml_pipeline.agents.observations import ObservationReader
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.device import held_memory, total_memory
from ml_pipeline.errors import UserError

_N_FLOATS = 5  # reward, log_prob, value, advantage, value_target
_N_FLAGS = 3  # terminated, truncated, episode_start

# Each library has its own words for it, and only some have a class. In this order: CUDA, HIP and
# MPS; the CPU; one tensor that is too large for Metal; cuBLAS; sizes beyond any machine.
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
    "the network alone does not fit, or other programs hold the memory; use a smaller network, "
    "or another device"
)


class DeviceMemoryError(UserError):
    """The device, or the machine, has too little memory."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether torch or NumPy found no memory, on whatever device."""
    if isinstance(error, UserError):  # an env's own, which is told already
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    told = isinstance(error, (RuntimeError, ValueError))
    return told and any(words in str(error) for words in _WORDS)


@contextmanager
def memory_explained(device: torch.device | str, advice: Callable[[], str]) -> Iterator[None]:
    """Let running out of memory end in one line: the fact, and then ``advice()``."""
    try:
        yield
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        # Whoever keeps the error, as a sweep does, would keep all tensors of its frames alive.
        traceback.clear_frames(error.__traceback__)
        asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
        size = f", which was asked for {asked[1]}" if asked else ""
        raise DeviceMemoryError(f"out of memory on {device}{size}: {advice()}") from error


def step_bytes(reader: ObservationReader, distribution: Distribution, *, is_masked: bool) -> int:
    """What is kept of one step of one env until it is learned from."""
    action = math.prod(distribution.action_shape) * distribution.action_dtype.itemsize
    mask = distribution.mask_size if is_masked else 0
    return obs_bytes(reader) + action + mask + 4 * _N_FLOATS + _N_FLAGS


def obs_bytes(reader: ObservationReader) -> int:
    return sum(
        math.prod(shape) * reader.dtypes[name].itemsize for name, shape in reader.shapes.items()
    )


def rollout_bytes(
    agent: PPOAgent, *, n_steps: int, n_envs: int, keeps_final_obs: bool = False
) -> int:
    """A whole rollout, [T, n_envs], and the noise that its actions were drawn with.

    ``keeps_final_obs``: envs that are tensors have one at every step, wherever episodes end.
    """
    distribution = agent.distribution
    step = step_bytes(agent.reader, distribution, is_masked=agent.is_masked)
    step += obs_bytes(agent.reader) if keeps_final_obs else 0
    noise_row = distribution.draw_noise(1, 1, torch.Generator()).nbytes
    n_rows = 1 + distribution.noise_row(n_steps - 1)
    return n_envs * (n_steps * step + n_rows * noise_row)


def activation_bytes(agent: PPOAgent, leaves: dict[str, NDArray[Any]]) -> int:
    """What a forward pass keeps of each transition for the backward pass.

    ``leaves`` is one observation, [1, ...] each, as the agent's reader read it.
    """

    def kept(n: int) -> int:
        sizes: dict[int, int] = {}  # by address: several layers may keep the same tensor

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        batch = {name: np.repeat(leaf, n, axis=0) for name, leaf in leaves.items()}
        start = None
        if agent.state_size:  # a sequence of one step
            batch = {name: leaf[np.newaxis] for name, leaf in batch.items()}
            start = torch.zeros(1, n, dtype=torch.bool, device=agent.device)
        inputs = agent.inputs(batch, None, agent.new_memory(n), start)
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = agent.model(inputs)
        del outputs  # not sooner: what is freed gives its address to the next
        return sum(sizes.values())

    # The weights are kept too, once however large the batch is. Not of one: a network that
    # mixes the items of a batch may not take it.
    return (kept(4) - kept(2)) // 2


def memory_advice(
    agent: PPOAgent,
    per_transition: int | None,
    *,
    n_steps: int,
    n_envs: int,
    n_minibatches: int,
    keeps_final_obs: bool = False,
) -> str:
    """What training takes, what there is, and which numbers of the config to change.

    ``per_transition`` is from ``activation_bytes``; None: it is not known.
    """
    rollout = rollout_bytes(agent, n_steps=n_steps, n_envs=n_envs, keeps_final_obs=keeps_final_obs)
    each = shown_bytes(rollout / (n_steps * n_envs))
    needs = (
        f"a rollout of agent.n_steps={n_steps} x n_envs={n_envs} takes about "
        f"{shown_bytes(rollout)}, {each} per env and step"
    )
    if not agent.state_size and agent.device.type == "cpu":
        needs += ", and as much again while it is shuffled"  # elsewhere a minibatch at a time
    if per_transition is not None:
        size = n_steps * n_envs // n_minibatches
        needs += (
            f", a minibatch of {size} about {shown_bytes(size * per_transition)} in the network"
        )
    total, held = total_memory(agent.device), held_memory(agent.device)
    if total is not None:
        needs += f"; {agent.device} has {shown_bytes(total)}"
        needs += "" if held is None else f", of which this process held {shown_bytes(held)}"
    return (
        f"{needs}. For a smaller rollout lower n_envs or agent.n_steps, for smaller minibatches "
        f"raise agent.n_minibatches={n_minibatches}"
    )


def shown_bytes(n_bytes: float) -> str:
    """2_500_000 -> "2.5 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} TB"
