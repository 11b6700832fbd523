"""RolloutBuffer: one on-policy rollout, [T, n_envs], from the first write to the last minibatch.

Rows are time, columns are environments. It is written in host memory, where the envs are, and
moved to the agent's device as a whole by ``finish``: on the CPU both are the same memory.
``finish`` must be called once between the last write and the first ``minibatches``; it is the
only place that knows why episodes end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.observations import map_obs
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.protocols import Minibatch, Obs, PolicyInput
from ml_pipeline.training.gpu.programs import send
from ml_pipeline.training.returns import RewardScaler, explained_variance, gae

_SCORED_NUMBERS = 2**24  # of observations at a time: a rollout of images would fill the memory


class FinalStep(NamedTuple):
    """The last observation of an episode that was cut by a time limit."""

    row: int
    env: int
    leaves: dict[str, NDArray[Any]]
    state: Tensor | None  # the policy's memory before it


class RolloutBuffer:
    """Filled by a collector, column by column or all at once."""

    def __init__(self, n_steps: int, n_envs: int, agent: PPOAgent) -> None:
        self.n_steps = n_steps
        self.n_envs = n_envs
        self._agent = agent
        grid, reader, distribution = (n_steps, n_envs), agent.reader, agent.distribution
        self.obs = {
            name: _zeros((*grid, *reader.shapes[name]), reader.dtypes[name], agent.device)
            for name in reader.leaves
        }
        # An empty tensor knows the NumPy dtype that goes with its own.
        action_dtype = torch.empty(0, dtype=distribution.action_dtype).numpy().dtype
        self.action = np.zeros((*grid, *distribution.action_shape), dtype=action_dtype)
        mask_shape = (*grid, distribution.mask_size)
        self.action_mask = np.ones(mask_shape, dtype=bool) if agent.is_masked else None
        self.episode_start = np.zeros(grid, dtype=bool)
        self.state = agent.new_memory(n_envs)  # before the first row
        self.reward = np.zeros(grid, dtype=np.float32)
        self.terminated = np.zeros(grid, dtype=bool)
        self.truncated = np.zeros(grid, dtype=bool)
        self.final_steps: list[FinalStep] = []
        self.value = self.advantage = self.value_target = np.zeros(grid, dtype=np.float32)
        self._learned: Minibatch | None = None  # [T, n_envs, ...] on the device
        self._orders: Tensor | None = None

    def begin(self) -> None:
        """Before the first row of a new rollout."""
        self.final_steps = []

    def write_seen(
        self,
        t: int,
        columns: slice,
        leaves: dict[str, NDArray[Any]],
        action_mask: NDArray[np.bool_] | None,
        episode_start: NDArray[np.bool_],
    ) -> None:
        """Row ``t`` of some envs: what the policy saw."""
        for name, leaf in leaves.items():
            self.obs[name][t, columns] = leaf
        if self.action_mask is not None:
            self.action_mask[t, columns] = action_mask
        self.episode_start[t, columns] = episode_start

    def write_outcome(
        self,
        t: int,
        columns: slice,
        reward: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> None:
        """Row ``t`` of some envs: what came of it."""
        self.reward[t, columns] = reward
        self.terminated[t, columns] = terminated
        self.truncated[t, columns] = truncated

    def finish(
        self,
        last: PolicyInput,
        *,
        gamma: float,
        lam: float,
        scaler: RewardScaler | None = None,
    ) -> None:
        """Score the rollout and compute its advantages; ``last`` follows its last row."""
        agent, done = self._agent, self.terminated | self.truncated
        inputs, action = self._inputs(), torch.from_numpy(self.action).to(agent.device)
        log_prob, value = self._scores(inputs, action)
        last_value = agent.value_batch(last).cpu().numpy()
        self.value = value.cpu().numpy()
        next_value = np.concatenate([self.value[1:], last_value[np.newaxis]])
        if self.final_steps:
            rows, envs = zip(*(step[:2] for step in self.final_steps), strict=True)
            next_value[rows, envs] = agent.value_batch(self._final_inputs()).cpu().numpy()
        next_value[self.terminated] = 0.0
        reward = self.reward if scaler is None else scaler.scaled(self.reward, done)
        self.advantage = gae(reward, self.value, next_value, done, gamma=gamma, lam=lam)
        self.value_target = self.advantage + self.value
        self._keep(
            Minibatch(
                inputs,
                action,
                log_prob,
                value,
                torch.from_numpy(self.advantage).to(agent.device),
                torch.from_numpy(self.value_target).to(agent.device),
            )
        )

    def _keep(self, rollout: Minibatch) -> None:
        """On a device always in the same place: a captured update looks for it there."""
        if self._learned is None or self._agent.device.type == "cpu":
            self._learned = rollout
            return
        for held, new in zip(_tensors(self._learned), _tensors(rollout), strict=True):
            held.copy_(new)

    @property
    def learned(self) -> Minibatch:
        """The finished rollout, flat, [N, ...]; of a policy with a memory, [T, n_envs, ...]."""
        if self._learned is None:
            raise RuntimeError("the rollout was never finished")
        if self.state is not None:
            return self._learned
        return self._learned.mapped(lambda field: field.flatten(0, 1), None)

    def shuffle(self, generator: torch.Generator, n_orders: int) -> None:
        """Draw so many orders on the host, so that they are those of a run on the CPU."""
        n_items = self._n_items()
        drawn = [torch.randperm(n_items, generator=generator) for _ in range(n_orders)]
        orders, device = torch.stack(drawn), self._agent.device
        if self._orders is None or len(self._orders) != n_orders:
            self._orders = torch.empty_like(orders, device=device)
        send(orders, self._orders)

    def order(self, number: int) -> Tensor:
        """Rows of ``learned``, or of a policy with a memory its envs, shuffled."""
        if self._orders is None:
            raise RuntimeError("the rollout was never shuffled")
        return self._orders[number]

    def facts(self) -> Tensor:
        """Explained variance, and whether all that the envs gave was finite, as 0 or 1.

        The second is 1 here: a ``Collector`` has looked at each step.
        """
        return torch.tensor([explained_variance(self.value, self.value_target), 1.0])

    def shown(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, for people to look at."""
        return {"rollout/actions": self.action, "rollout/advantages": self.advantage}

    def _n_items(self) -> int:
        return self.n_envs if self.state is not None else self.n_steps * self.n_envs

    def minibatches(self, n_minibatches: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """The whole rollout once, shuffled, in equal parts; whole sequences if it has a memory."""
        if self._learned is None:
            raise RuntimeError("minibatches of a rollout that was never finished")
        is_recurrent, n_items = self.state is not None, self._n_items()
        if n_items % n_minibatches:
            what = "sequences" if is_recurrent else "transitions"
            raise ValueError(
                f"rollout of {self.n_steps} x {self.n_envs}: {n_items} {what} cannot be cut "
                f"into {n_minibatches} equal minibatches; choose n_minibatches from the divisors"
            )
        order = torch.randperm(n_items, generator=generator).to(self._agent.device)
        size = n_items // n_minibatches
        if is_recurrent:
            for begin in range(0, n_items, size):
                yield self._learned.rows(order[begin : begin + size])
            return
        # Shuffled once per epoch: the minibatches are then slices, without a copy of their own.
        shuffled = self.learned.rows(order)
        for begin in range(0, n_items, size):
            yield shuffled.mapped(lambda field: field[begin : begin + size], None)  # noqa: B023

    def obs_tensors(self) -> Obs:
        """[T, n_envs, ...] on the device, once finished."""
        if self._learned is None:
            raise RuntimeError("the rollout was never finished")
        return self._learned.inputs.obs

    def _inputs(self) -> PolicyInput:
        device = self._agent.device
        inputs = self._agent.inputs(self.obs, self.action_mask, self.state)
        if self.state is None:
            return inputs
        return inputs._replace(episode_start=torch.from_numpy(self.episode_start).to(device))

    def _final_inputs(self) -> PolicyInput:
        steps, agent = self.final_steps, self._agent
        leaves = {name: np.stack([step.leaves[name] for step in steps]) for name in self.obs}
        if steps[0].state is None:
            return agent.inputs(leaves)
        state = torch.stack([step.state for step in steps if step.state is not None])
        start = torch.zeros(len(steps), dtype=torch.bool, device=agent.device)
        return agent.inputs(leaves, None, state, start)

    def _scores(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of every step, [T, n_envs]."""
        if self.state is not None:
            return self._agent.score_batch(inputs, action)
        mask = inputs.action_mask
        flat = PolicyInput(
            map_obs(lambda leaf: leaf.flatten(0, 1), inputs.obs),
            None if mask is None else mask.flatten(0, 1),
            None,
            None,
        )
        flat_action = action.flatten(0, 1)
        numbers = sum(leaf[0, 0].size for leaf in self.obs.values())
        size = max(_SCORED_NUMBERS // numbers, 1)
        parts = [
            self._agent.score_batch(_part(flat, slice(i, i + size)), flat_action[i : i + size])
            for i in range(0, len(flat_action), size)
        ]
        log_prob, value = (torch.cat(each) for each in zip(*parts, strict=True))
        return log_prob.view(self.n_steps, -1), value.view(self.n_steps, -1)


def _zeros(shape: tuple[int, ...], dtype: Any, device: torch.device) -> NDArray[Any]:
    """In pinned memory where the device is a GPU: it then fetches them without a wait."""
    zeros = np.zeros(shape, dtype=dtype)
    return torch.from_numpy(zeros).pin_memory().numpy() if device.type == "cuda" else zeros


def _part(inputs: PolicyInput, rows: slice) -> PolicyInput:
    mask = inputs.action_mask
    obs = map_obs(lambda leaf: leaf[rows], inputs.obs)
    return PolicyInput(obs, None if mask is None else mask[rows], None, None)


def _tensors(rollout: Minibatch) -> list[Tensor]:
    obs, *rest = rollout.inputs
    leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
    return [*leaves, *(each for each in rest if each is not None), *rollout[1:]]
