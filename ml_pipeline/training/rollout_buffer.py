"""RolloutBuffer: one on-policy rollout, [T, n_envs], from the first write to the last minibatch.

Rows are time, columns are environments. ``finish`` must be called once between the last
``write`` and the first ``minibatches``; it is the only place that knows why episodes end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ml_pipeline.protocols import Minibatch, PolicySample
from ml_pipeline.training.returns import gae


class Outcome(NamedTuple):
    """What the envs answered to one batch of actions."""

    reward: Tensor  # [n_envs]
    terminated: Tensor  # [n_envs] bool
    truncated: Tensor  # [n_envs] bool
    final_value: Tensor  # [n_envs], V(final observation) where truncated, else anything


class RolloutBuffer:
    """Every field is [T, n_envs, ...] on ``device``."""

    def __init__(
        self,
        n_steps: int,
        n_envs: int,
        *,
        obs_shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.n_steps = n_steps
        self.n_envs = n_envs
        self.device = device
        grid = (n_steps, n_envs)
        self.obs = torch.zeros(*grid, *obs_shape, device=device)
        self.action: Tensor | None = None  # its shape and dtype are those of the first sample
        self.log_prob = torch.zeros(grid, device=device)
        self.value = torch.zeros(grid, device=device)
        self.reward = torch.zeros(grid, device=device)
        self.terminated = torch.zeros(grid, dtype=torch.bool, device=device)
        self.truncated = torch.zeros(grid, dtype=torch.bool, device=device)
        self.final_value = torch.zeros(grid, device=device)
        self.advantage = torch.zeros(grid, device=device)
        self.value_target = torch.zeros(grid, device=device)

    def write(self, t: int, obs: Tensor, sample: PolicySample, outcome: Outcome) -> None:
        """Store row ``t``: what was seen, what was done, what came of it."""
        if self.action is None:
            shape = (self.n_steps, *sample.action.shape)
            self.action = torch.zeros(shape, dtype=sample.action.dtype, device=self.device)
        self.obs[t] = obs
        self.action[t] = sample.action
        self.log_prob[t] = sample.log_prob
        self.value[t] = sample.value
        self.reward[t] = outcome.reward
        self.terminated[t] = outcome.terminated
        self.truncated[t] = outcome.truncated
        self.final_value[t] = outcome.final_value

    def finish(self, last_value: Tensor, *, gamma: float, lam: float) -> None:
        """Compute advantages; ``last_value`` [n_envs] is the value of what follows the last row."""
        following = torch.cat([self.value[1:], last_value.unsqueeze(0)])
        next_value = torch.where(self.truncated, self.final_value, following)
        next_value = next_value.masked_fill(self.terminated, 0.0)
        done = self.terminated | self.truncated
        self.advantage = gae(self.reward, self.value, next_value, done, gamma=gamma, lam=lam)
        self.value_target = self.advantage + self.value

    def minibatches(self, n_minibatches: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """The whole rollout once, shuffled, in equal parts."""
        size = self.n_steps * self.n_envs
        if size % n_minibatches:
            raise ValueError(
                f"rollout of {self.n_steps} x {self.n_envs} = {size} transitions cannot be cut "
                f"into {n_minibatches} equal minibatches; choose n_minibatches from the divisors"
            )
        if self.action is None:
            raise RuntimeError("minibatches of a rollout that was never written")
        order = torch.randperm(size, generator=generator).to(self.device)
        flat = Minibatch(
            obs=self.obs.flatten(0, 1),
            action=self.action.flatten(0, 1),
            log_prob=self.log_prob.flatten(),
            advantage=self.advantage.flatten(),
            value_target=self.value_target.flatten(),
        )
        for rows in order.chunk(n_minibatches):
            yield Minibatch(*(field[rows] for field in flat))
