"""RolloutBuffer: one on-policy rollout, [T, n_envs], from the first write to the last epoch.

Rows are time, columns are environments. The collector writes host memory; ``finish`` moves the
rollout to the agent's device. Call ``finish`` once between the last write and the first epoch; it
is the only place that knows why episodes end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.contracts import RolloutQuality
from ml_pipeline.algorithms.ppo.records import Minibatch
from ml_pipeline.policy.contracts import Obs, PolicyInput
from ml_pipeline.training.graphs import send
from ml_pipeline.training.returns import explained_variance, gae
from ml_pipeline.training.reward_scaler import RewardScaler

if TYPE_CHECKING:
    from ml_pipeline.algorithms.ppo.agent import PPOAgent

_SCORED_NUMBERS = 2**24  # observation entries per forward pass; limits the memory for images


class FinalStep(NamedTuple):
    """The final observation of an episode that was truncated."""

    row: int
    env: int
    leaves: dict[str, NDArray[Any]]
    memory: Tensor | None  # recurrent state before it


class RolloutBuffer:
    """Filled by a ``Collector``, row by row, one vector env after the other."""

    def __init__(self, n_steps: int, n_envs: int, agent: PPOAgent) -> None:
        self.n_steps = n_steps
        self.n_envs = n_envs
        self._agent = agent
        grid, reader, distribution = (n_steps, n_envs), agent.reader, agent.distribution
        self.obs = {
            name: _zeros((*grid, *reader.shapes[name]), reader.dtypes[name], agent.device)
            for name in reader.leaves
        }
        # torch has no public function from its dtypes to NumPy's.
        action_dtype = torch.empty(0, dtype=distribution.action_dtype).numpy().dtype
        self.action = np.zeros((*grid, *distribution.action_shape), dtype=action_dtype)
        mask_shape = (*grid, distribution.mask_size)
        self.action_mask = np.ones(mask_shape, dtype=bool) if agent.masks.are_used else None
        self.episode_start = np.zeros(grid, dtype=bool)
        self.memory = agent.new_memory(n_envs)  # recurrent state before the first row
        self.reward = np.zeros(grid, dtype=np.float32)
        self.terminated = np.zeros(grid, dtype=bool)
        self.truncated = np.zeros(grid, dtype=bool)
        self.final_steps: list[FinalStep] = []
        self.value = self.advantage = self.value_target = np.zeros(grid, dtype=np.float32)
        self._finished: Minibatch | None = None  # [T, n_envs, ...] on the device
        self._flat: Minibatch | None = None  # views of it, as ``finished`` returns them
        self._orders: Sequence[Tensor] | Tensor | None = None

    def begin(self, memory: Tensor | None) -> None:
        """Call before the first row of a new rollout."""
        self.final_steps = []
        self.memory = memory

    def write_seen(
        self,
        t: int,
        columns: slice,
        leaves: dict[str, NDArray[Any]],
        action_mask: NDArray[np.bool_] | None,
        episode_start: NDArray[np.bool_],
    ) -> None:
        """Write the policy's input in row ``t`` of these columns."""
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
        """Write the results of the actions in row ``t`` of these columns."""
        self.reward[t, columns] = reward
        self.terminated[t, columns] = terminated
        self.truncated[t, columns] = truncated

    def finish(
        self,
        last: PolicyInput,
        *,
        gamma: float,
        lam: float,
        scaler: RewardScaler[NDArray[Any]] | None = None,
    ) -> None:
        """Score the rollout and compute its advantages; ``last`` is the input after its end."""
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
        ongoing = (~done).astype(np.float32)
        self.advantage = gae(reward, self.value, next_value, ongoing, gamma=gamma, lam=lam)
        self.value_target = self.advantage + self.value
        targets = torch.from_numpy(np.stack([self.advantage, self.value_target])).to(agent.device)
        self._keep(Minibatch(inputs, action, log_prob, value, *targets))

    def _keep(self, rollout: Minibatch) -> None:
        """Keep ``rollout``; on a GPU at a fixed address, where a captured update reads it."""
        if self._finished is None or self._agent.device.type == "cpu":
            self._finished = self._flat = rollout
            if self.memory is None:
                self._flat = rollout.mapped(lambda field: field.flatten(0, 1), None)
            return
        for held, new in zip(self._finished.tensors(), rollout.tensors(), strict=True):
            held.copy_(new)

    def finished(self) -> Minibatch:
        """The rollout to learn from: flat, [N, ...]; [T, n_envs, ...] for a recurrent policy."""
        if self._flat is None:
            raise RuntimeError("the rollout is not finished; call finish first")
        return self._flat

    def shuffle(self, generator: torch.Generator, n_orders: int) -> None:
        """Draw one order per epoch, on the host, so that it does not depend on the device."""
        n_items = self.n_envs if self.memory is not None else self.n_steps * self.n_envs
        orders = [self.new_order(n_items, generator) for _ in range(n_orders)]
        if self._agent.device.type == "cpu":
            self._orders = orders
            return
        stacked = torch.stack(orders)
        if not isinstance(self._orders, Tensor) or len(self._orders) != n_orders:
            self._orders = torch.empty_like(stacked, device=self._agent.device)
        send(stacked, self._orders)

    def order(self, epoch: int) -> Tensor:
        """The shuffled transitions, or envs of a recurrent policy, for one epoch."""
        if self._orders is None:
            raise RuntimeError("the rollout is not shuffled; call shuffle first")
        return self._orders[epoch]

    def new_order(self, n: int, generator: torch.Generator) -> Tensor:
        """0 .. n - 1, shuffled as ``order`` is."""
        return torch.randperm(n, generator=generator)

    def quality(self) -> RolloutQuality:
        """``is_finite`` is always True: the collector checks every step."""
        explained = explained_variance(self.value, self.value_target)
        return RolloutQuality(float(np.float32(explained)), is_finite=True)

    def observations(self) -> Obs:
        """[T, n_envs, ...] on the device, after ``finish``."""
        if self._finished is None:
            raise RuntimeError("the rollout is not finished; call finish first")
        return self._finished.inputs.obs

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, for histograms."""
        return {"rollout/actions": self.action, "rollout/advantages": self.advantage}

    def _inputs(self) -> PolicyInput:
        inputs = self._agent.inputs(self.obs, self.action_mask, self.memory)
        if self.memory is None:
            return inputs
        start = torch.from_numpy(self.episode_start).to(self._agent.device)
        return inputs._replace(episode_start=start)

    def _final_inputs(self) -> PolicyInput:
        steps, agent = self.final_steps, self._agent
        leaves = {name: np.stack([step.leaves[name] for step in steps]) for name in self.obs}
        if steps[0].memory is None:
            return agent.inputs(leaves)
        memory = torch.stack([step.memory for step in steps if step.memory is not None])
        start = torch.zeros(len(steps), dtype=torch.bool, device=agent.device)
        return agent.inputs(leaves, None, memory, start)

    def _scores(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of every step, [T, n_envs]."""
        if self.memory is not None:
            return self._agent.score_batch(inputs, action)
        flat = inputs.mapped(lambda field: field.flatten(0, 1), None)
        flat_action = action.flatten(0, 1)
        numbers = sum(leaf[0, 0].size for leaf in self.obs.values())
        size = max(_SCORED_NUMBERS // numbers, 1)
        scores = []
        for begin in range(0, len(flat_action), size):
            part = slice(begin, begin + size)
            some = flat.mapped(lambda field: field[part], None)  # noqa: B023
            scores.append(self._agent.score_batch(some, flat_action[part]))
        log_prob, value = (torch.cat(each) for each in zip(*scores, strict=True))
        return log_prob.view(self.n_steps, -1), value.view(self.n_steps, -1)


def _zeros(shape: tuple[int, ...], dtype: Any, device: torch.device) -> NDArray[Any]:
    """An array of zeros; pinned for a GPU, so that copies to it are asynchronous."""
    zeros = np.zeros(shape, dtype=dtype)
    return torch.from_numpy(zeros).pin_memory().numpy() if device.type == "cuda" else zeros
