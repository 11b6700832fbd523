"""Advantages and reward scaling of a rollout on a device: ``training.returns`` in torch.

No function waits for the device. On a GPU with Triton, ``gae`` is one kernel.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ml_pipeline.errors import type_and_line
from ml_pipeline.moments import merge_moments
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict


class RolloutOutcome(NamedTuple):
    """How each step of a rollout ended, and the values of its successors; [T, n_envs] each."""

    reward: Tensor
    value: Tensor
    last_value: Tensor  # [n_envs], after the last row
    final_value: Tensor  # of the final observation; used where truncated
    terminated: Tensor  # bool
    truncated: Tensor  # bool


def gae(outcomes: RolloutOutcome, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets, as ``training.returns.gae``."""
    if outcomes.reward.device.type == "cuda" and _kernel_works(outcomes.reward.device):
        from ml_pipeline.training.gae_kernel import gae_in_one_kernel

        return gae_in_one_kernel(*outcomes, gamma=gamma, lam=lam)
    return gae_step_by_step(outcomes, gamma=gamma, lam=lam)


@cache
def _kernel_works(device: torch.device) -> bool:
    """Whether Triton can build kernels: it needs a C compiler and Python's headers."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from ml_pipeline.training.gae_kernel import gae_in_one_kernel

        numbers, flags = torch.zeros(1, 16, device=device), torch.zeros(1, 16, device=device)
        tried = RolloutOutcome(numbers, numbers, numbers[0], numbers, flags.bool(), flags.bool())
        gae_in_one_kernel(*tried, gamma=1.0, lam=1.0)
    except Exception as error:
        why = type_and_line(error)
        warnings.warn(f"GAE launches a kernel per step: {why}", RuntimeWarning, stacklevel=2)
        return False
    return True


def gae_step_by_step(
    outcomes: RolloutOutcome, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    reward, value, last_value, final_value, terminated, truncated = outcomes
    next_value = torch.cat([value[1:], last_value.unsqueeze(0)])
    next_value = torch.where(truncated, final_value, next_value).masked_fill(terminated, 0.0)
    delta = reward + gamma * next_value - value
    carry = gamma * lam * (~(terminated | truncated))
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(last_value)
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + value


class TensorRewardScaler:
    """``RewardScaler`` for tensors.

    It cannot share code with ``RewardScaler``: a graph needs in-place writes without branches, and
    MPS has no float64.
    """

    def __init__(
        self,
        n_envs: int,
        *,
        gamma: float,
        clip: float,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        self.gamma = gamma
        self.clip = clip
        self._world = world
        self._return = torch.zeros(n_envs, device=device)
        self._mean, self._variance, self._count = (
            torch.tensor(each, device=device) for each in (0.0, 1.0, 0.0)
        )

    def scaled(self, reward: Tensor, done: Tensor) -> Tensor:
        """Add a rollout, [T, n_envs], to the moments, then scale it by them."""
        returns = torch.empty_like(reward)
        running = self._return
        for t in range(len(reward)):
            running = running * self.gamma + reward[t]
            returns[t] = running
            running = running.masked_fill(done[t], 0.0)
        self._take_in(returns, running)
        scale = torch.rsqrt(self._variance + 1e-8)
        return (reward * scale).clamp(-self.clip, self.clip)

    def _take_in(self, returns: Tensor, running: Tensor) -> None:
        """In place, for graphs; a non-finite rollout does not change the moments."""
        own = returns.mean(), returns.var(correction=0), returns.numel()
        batch = self._world.moments(*own)
        finite = torch.isfinite(batch[1])
        held = self._mean, self._variance, self._count
        for place, merged in zip(held, merge_moments(*held, *batch), strict=True):
            place.copy_(torch.where(finite, merged, place))
        self._return.copy_(torch.where(finite, running, 0.0))

    def resize(self, n_envs: int) -> None:
        raise TypeError("tensor envs cannot change their number")

    def begin_episodes(self) -> None:
        """Call after all envs were reset."""
        self._return.zero_()

    def state_dict(self) -> StateDict:
        moments = torch.stack([self._mean, self._variance, self._count]).tolist()
        return {"moments": moments, "return": self._return.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        for own, saved in zip(
            (self._mean, self._variance, self._count), state["moments"], strict=True
        ):
            own.fill_(saved)
        if len(state["return"]) == len(self._return):
            self._return.copy_(torch.tensor(state["return"]))
