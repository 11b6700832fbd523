"""RolloutBuffer: one on-policy rollout, [T, n_envs], from the first write to the last epoch.

Rows are time, columns are environments. The collector writes arrays in host memory, and ``finish``
moves them to the agent's device; tensor envs write tensors that are there already. Call ``finish``
once between the last write and the first epoch; it is the only place that knows why episodes end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.ppo.loss import Minibatch
from ml_pipeline.algorithms.ppo.reports import (
    RolloutQuality,
    device_quality,
    merged_quality,
    quality_part,
)
from ml_pipeline.policy.contracts import Obs, PolicyInput
from ml_pipeline.policy.observations import map_obs
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.training.env_batch import (
    ArrayOrTensor,
    FinalObservation,
    Row,
    Seen,
    new_table,
    torch_dtype,
)
from ml_pipeline.training.fast_gae import estimate
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.returns import Estimator, RolloutOutcome, explained_variance, gae
from ml_pipeline.training.reward_scaler import RewardScaler

if TYPE_CHECKING:
    from ml_pipeline.algorithms.ppo.agent import PPOAgent

_SCORED_NUMBERS = 2**24  # observation entries per forward pass; limits the memory for images


@dataclass
class Rollout:
    """What a rollout collected, as ``agent.on_rollout`` sees it: arrays, or tensors of tensor envs.

    Rewards may be changed or replaced. An observation after the end of an episode is the first of
    the next one.
    """

    obs: dict[str, ArrayOrTensor]  # [T + 1, n_envs, ...] by leaf; a single observation is ""
    action: ArrayOrTensor  # [T, n_envs, ...]
    reward: ArrayOrTensor  # [T, n_envs]
    terminated: ArrayOrTensor  # [T, n_envs], bool
    truncated: ArrayOrTensor
    is_reset: NDArray[np.bool_] | None = None  # steps that only reset an env: no transitions


class RolloutBuffer:
    """Filled by a ``Collector``, row by row, one vector env after the other."""

    def __init__(
        self,
        n_steps: int,
        n_envs: int,
        agent: PPOAgent,
        programs: Programs | None = None,
        world: World = ALONE,
    ) -> None:
        """With ``programs`` its tensors are on the agent's device, as tensor envs need them.

        They keep their addresses, so that CUDA graphs can write and read them.
        """
        self.n_steps = n_steps
        self.n_envs = n_envs
        self.agent = agent
        self.on_host = programs is None
        self._programs = programs
        self._world = world
        reader, distribution = agent.reader, agent.distribution

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> ArrayOrTensor:
            return new_table((shape[0], n_envs, *shape[1:]), dtype, agent.device, self.on_host)

        # What the policy sees has one more row: the input after the last step.
        self.obs = {
            name: zeros(n_steps + 1, *reader.shapes[name], dtype=torch_dtype(reader.dtypes[name]))
            for name in reader.leaves
        }
        self.action_mask: ArrayOrTensor | None = None
        if agent.masks.are_used:
            self.action_mask = zeros(n_steps + 1, distribution.mask_size, dtype=torch.bool)
        self.episode_start: ArrayOrTensor | None = None
        if agent.memory_size:
            self.episode_start = zeros(n_steps + 1, dtype=torch.bool)
        self.memory = agent.new_memory(n_envs)  # recurrent state before the first row
        self.last_memory = agent.new_memory(n_envs)  # and after the last one
        action_shape, action_dtype = distribution.action_shape, distribution.action_dtype
        self.action = zeros(n_steps, *action_shape, dtype=action_dtype)
        self.reward = zeros(n_steps)
        self.terminated = zeros(n_steps, dtype=torch.bool)
        self.truncated = zeros(n_steps, dtype=torch.bool)
        # Steps that only reset an env, [T, n_envs]: nothing is learned from them.
        self.is_reset: NDArray[np.bool_] | None = None
        # Before the autoreset: those of tensor envs at every step, others where truncated.
        self.final_obs: dict[str, Tensor] | None = None
        if programs is not None:
            self.final_obs = {
                name: torch.zeros_like(torch.as_tensor(leaf[:n_steps]))
                for name, leaf in self.obs.items()
            }
        self.final_memory: Tensor | None = None  # of tensor envs: the recurrent state before them
        if programs is not None and agent.memory_size:
            self.final_memory = zeros(n_steps, agent.memory_size)
        # Final observations by (row, column), of the episodes that were truncated.
        self.final_steps: dict[tuple[int, int], FinalObservation] = {}
        self.value = self.advantage = self.value_target = zeros(n_steps)
        self._scaled_reward = zeros(n_steps)  # always in the same place, for ``recompute``
        self._finished: Minibatch | None = None  # [T, n_envs, ...] on the device
        self._flat: Minibatch | None = None  # views of it, as ``finished`` returns them
        self._programs_of: dict[str, Callable[[], None]] = {}
        self._quality = torch.zeros(len(RolloutQuality._fields), device=agent.device)
        if programs is not None:
            self._measure = programs.compiled(device_quality, "the quality of the rollout")

    @property
    def n_items(self) -> int:
        """What an epoch shuffles: transitions, or the envs of a recurrent policy."""
        return self.n_envs if self.memory is not None else self.n_steps * self.n_envs

    def begin(self, memory: Tensor | None) -> None:
        """Before the first row of a new rollout; ``memory`` is the recurrent state."""
        self.final_steps = {}
        self.memory = self._in_place(self.memory, memory)

    def _in_place(self, held: Tensor | None, new: Tensor | None) -> Tensor | None:
        """``new``; of tensor envs at the address of ``held``."""
        if self.on_host or held is None or new is None:
            return new
        return held.copy_(new)

    def seen(self, t: int, columns: slice) -> Seen:
        """Where the policy's input of row ``t`` goes."""
        return Seen(
            {name: leaf[t, columns] for name, leaf in self.obs.items()},
            None if self.action_mask is None else self.action_mask[t, columns],
            None if self.episode_start is None else self.episode_start[t, columns],
        )

    def row(self, t: int, columns: slice) -> Row:
        """Where the actions in row ``t`` and their results go."""
        final = None
        if self.final_obs is not None:  # its masks are not needed: a value has none
            leaves = {name: leaf[t, columns] for name, leaf in self.final_obs.items()}
            final = Seen(leaves, None, None)
        return Row(
            self.action[t, columns],
            self.reward[t, columns],
            self.terminated[t, columns],
            self.truncated[t, columns],
            final,
            None if self.final_memory is None else self.final_memory[t, columns],
            self.seen(t + 1, columns),
        )

    def end(self, memory: Tensor | None) -> None:
        """After the last row; ``memory`` is the recurrent state."""
        self.last_memory = self._in_place(self.last_memory, memory)

    def rollout(self) -> Rollout:
        """What was collected; between ``end`` and ``finish``."""
        outcome = self.reward, self.terminated, self.truncated
        return Rollout(self.obs, self.action, *outcome, self.is_reset)

    def transitions_in(self, order: Tensor) -> Tensor:
        """``order``, an epoch, without steps that only reset an env; others come twice instead.

        So the size of a minibatch does not change.
        """
        if self.is_reset is None:
            return order
        is_reset = torch.from_numpy(self.is_reset.reshape(-1))[order]
        others = order[~is_reset]
        # As if the next epoch began early; the order is random, so all are equally likely.
        again = torch.arange(int(is_reset.sum())) % len(others)
        filled = order.clone()
        filled[is_reset] = others[again]
        return filled

    def _transitions(self, table: ArrayOrTensor) -> ArrayOrTensor:
        """A table [T, n_envs, ...] without steps that only reset an env: [1, N, ...]."""
        if self.is_reset is None:
            return table
        is_kept = ~self.is_reset
        return table[torch.from_numpy(is_kept) if isinstance(table, Tensor) else is_kept][None]

    def finish(
        self,
        *,
        gamma: float,
        lam: float,
        scaler: RewardScaler[ArrayOrTensor] | None = None,
        estimator: Estimator = gae,
    ) -> None:
        """Score the rollout and compute its advantages.

        A graph captures the arguments of the first call, so all calls must pass the same.
        """
        score = partial(self._score, estimator, gamma, lam, scaler)
        self._run(score, "the end of a rollout")

    def recompute(self, *, gamma: float, lam: float, estimator: Estimator = gae) -> None:
        """Advantages and targets by the newest critic; log_prob stays that of the sampling."""
        self._run(partial(self._rescore, estimator, gamma, lam), "new advantages")

    def _run(self, work: Callable[[], None], name: str) -> None:
        """As a captured program on a device."""
        if self._programs is None:
            work()
            return
        if name not in self._programs_of:
            self._programs_of[name] = self._programs.captured(work, name)
        self._programs_of[name]()

    def _score(
        self,
        estimator: Estimator,
        gamma: float,
        lam: float,
        scaler: RewardScaler[ArrayOrTensor] | None,
    ) -> None:
        inputs = self._inputs(slice(self.n_steps), self.memory)
        action = torch.as_tensor(self.action).to(self.agent.device)
        log_prob, value = self._scores(inputs, action)
        self.value = self._home(value)
        reward = self.reward
        if scaler is not None:
            counted = None
            if self.is_reset is not None:
                counted = ~self.is_reset
                reward = reward * counted  # a hook may have added to it
            reward = scaler.scaled(reward, self.terminated | self.truncated, counted)
        self._scaled_reward[:] = reward
        estimates = self._estimates(value, estimator, gamma, lam)
        self.advantage, self.value_target = estimates
        self._keep(Minibatch(inputs, action, log_prob, value, *map(self._there, estimates)))
        if not self.on_host:
            seen = list(self.obs.values()), self._has_choice()
            self._quality.copy_(self._measure(value, self.value_target, self.reward, *seen))

    def _has_choice(self) -> Tensor:
        """Whether each action mask allows an action; True without masks."""
        if self.action_mask is None:
            return torch.ones(1, dtype=torch.bool, device=self.agent.device)
        return self.agent.distribution.has_choice(torch.as_tensor(self.action_mask))

    def _rescore(self, estimator: Estimator, gamma: float, lam: float) -> None:
        if self._finished is None:
            raise RuntimeError("the rollout is not finished; call finish first")
        before = self._finished
        _, value = self._scores(before.inputs, before.action)
        estimates = self._estimates(value, estimator, gamma, lam)
        advantage, target = map(self._there, estimates)
        self._keep(before._replace(value=value, advantage=advantage, value_target=target))

    def _estimates(
        self, value: Tensor, estimator: Estimator, gamma: float, lam: float
    ) -> tuple[ArrayOrTensor, ArrayOrTensor]:
        """Advantages and targets of the critic, where the rollout was collected."""
        last_value = self.agent.value_batch(self._inputs(self.n_steps, self.last_memory))
        outcome = RolloutOutcome(
            self._scaled_reward,
            self._home(value),
            self._home(last_value),
            self._final_values(),
            self.terminated,
            self.truncated,
        )
        return estimate(outcome, estimator, gamma=gamma, lam=lam)

    def _inputs(self, rows: slice | int, memory: Tensor | None) -> PolicyInput:
        """The policy's inputs in some rows, on the agent's device."""
        leaves = {name: leaf[rows] for name, leaf in self.obs.items()}
        mask = None if self.action_mask is None else self.action_mask[rows]
        if not self.on_host:
            start = None if self.episode_start is None else self.episode_start[rows]
            return PolicyInput(self.agent.reader.joined(leaves), mask, memory, start)
        start = None
        if self.episode_start is not None:
            start = torch.from_numpy(self.episode_start[rows]).to(self.agent.device)
        return self.agent.inputs(leaves, mask, memory, start)

    def _scores(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        """log_prob and value of every step, [T, n_envs]."""
        if inputs.memory is not None:
            return self.agent.score_batch(inputs, action)
        flat = inputs.mapped(lambda field: field.flatten(0, 1), None)
        flat_action = action.flatten(0, 1)
        scores = []
        for part in self._parts():
            some = flat.mapped(lambda field: field[part], None)  # noqa: B023
            scores.append(self.agent.score_batch(some, flat_action[part]))
        log_prob, value = (torch.cat(each) for each in zip(*scores, strict=True))
        return log_prob.view(self.n_steps, -1), value.view(self.n_steps, -1)

    def _parts(self) -> list[slice]:
        """Slices of all steps of all envs that fit into one forward pass."""
        numbers = sum(math.prod(leaf.shape[2:]) for leaf in self.obs.values())
        size = max(_SCORED_NUMBERS // numbers, 1)
        n_steps = self.n_steps * self.n_envs
        return [slice(begin, begin + size) for begin in range(0, n_steps, size)]

    def _final_values(self) -> ArrayOrTensor:
        """Values of the final observations, [T, n_envs]; any number where nothing was truncated."""
        agent = self.agent
        if self.final_obs is not None:
            flat = {name: leaf.flatten(0, 1) for name, leaf in self.final_obs.items()}
            cut, found = self.truncated.flatten(), []
            memory = start = None
            if self.final_memory is not None:
                memory, start = self.final_memory.flatten(0, 1), torch.zeros_like(cut)
            final = PolicyInput(agent.reader.joined(flat), None, None, start)
            for part in self._parts():
                recalled = None if memory is None else memory[part]
                some = final.mapped(lambda field: field[part], recalled)  # noqa: B023
                found.append(agent.value_batch(some, wanted=cut[part]))
            return torch.cat(found).view_as(self.reward)
        values = np.zeros_like(self.reward)
        if not self.final_steps:
            return values
        steps = list(self.final_steps.values())
        leaves = {name: np.stack([step.leaves[name] for step in steps]) for name in self.obs}
        memory = start = None
        if steps[0].memory is not None:
            memory = torch.stack([step.memory for step in steps if step.memory is not None])
            start = torch.zeros(len(steps), dtype=torch.bool, device=agent.device)
        rows, envs = zip(*self.final_steps, strict=True)
        final_value = agent.value_batch(agent.inputs(leaves, None, memory, start))
        values[rows, envs] = self._home(final_value)
        return values

    def _home(self, tensor: Tensor) -> ArrayOrTensor:
        """A result of the agent, where the rollout was collected."""
        return tensor.cpu().numpy() if self.on_host else tensor

    def _there(self, numbers: ArrayOrTensor) -> Tensor:
        """On the agent's device."""
        return torch.as_tensor(numbers).to(self.agent.device)

    def _keep(self, rollout: Minibatch) -> None:
        """Keep ``rollout``; on a GPU at a fixed address, where a captured update reads it."""
        if self._finished is None or self.agent.device.type == "cpu":
            self._finished = self._flat = rollout
            if self.memory is None:
                self._flat = rollout.mapped(lambda field: field.flatten(0, 1), None)
            return
        for held, new in zip(self._finished.tensors(), rollout.tensors(), strict=True):
            if held.data_ptr() != new.data_ptr():
                held.copy_(new)

    def finished(self) -> Minibatch:
        """The rollout to learn from: flat, [N, ...]; [T, n_envs, ...] for a recurrent policy."""
        if self._flat is None:
            raise RuntimeError("the rollout is not finished; call finish first")
        return self._flat

    def quality(self) -> RolloutQuality:
        """That of the rollouts of all ranks; waits for the device."""
        if self.on_host:
            # Every step was checked, unless steps that are not finite are allowed.
            both_kept = self._transitions(self.value), self._transitions(self.value_target)
            explained = float(np.float32(explained_variance(*both_kept)))
            own = RolloutQuality(explained, is_finite=True, has_choices=True)
        else:
            explained, is_finite, has_choices = self._quality.tolist()
            own = RolloutQuality(explained, bool(is_finite), bool(has_choices))
        # Empty for one rank.
        both = torch.as_tensor(self.value), torch.as_tensor(self.value_target)
        parts = self._world.parts(lambda: quality_part(*both, own))
        return merged_quality(parts) if parts else own

    def observations(self) -> Obs:
        """Those of all transitions, [T, n_envs, ...] on the device, after ``finish``."""
        if self._finished is None:
            raise RuntimeError("the rollout is not finished; call finish first")
        return map_obs(self._transitions, self._finished.inputs.obs)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, for histograms."""
        named = {"rollout/actions": self.action, "rollout/advantages": self.advantage}
        return {
            name: torch.as_tensor(self._transitions(each)).cpu().numpy()
            for name, each in named.items()
        }
