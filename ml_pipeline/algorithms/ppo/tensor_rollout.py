"""TensorBuffer: one on-policy rollout, [T, n_envs], that never leaves its device.

It is the ``RolloutBuffer`` of tensor envs. Its tensors keep their addresses, so that CUDA graphs
can write and read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.algorithms.ppo.contracts import RolloutQuality
from ml_pipeline.algorithms.ppo.records import Minibatch
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.training.fast_gae import advantages_of
from ml_pipeline.training.graphs import Programs, send
from ml_pipeline.training.returns import RolloutOutcome, explained_variance
from ml_pipeline.training.reward_scaler import RewardScaler

if TYPE_CHECKING:
    from ml_pipeline.algorithms.ppo.agent import PPOAgent


class TensorBuffer:
    """Filled by a ``TensorCollector``, row by row."""

    def __init__(self, n_steps: int, n_envs: int, agent: PPOAgent, programs: Programs) -> None:
        self.n_steps = n_steps
        self.n_envs = n_envs
        self._agent = agent
        grid, distribution, device = (n_steps, n_envs), agent.distribution, agent.device
        obs_shape, obs_dtype = agent.reader.shapes[""], _torch_dtype(agent.reader.dtypes[""])

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.obs = zeros(n_steps + 1, n_envs, *obs_shape, dtype=obs_dtype)  # with the next obs
        self.final_obs = zeros(*grid, *obs_shape, dtype=obs_dtype)  # before the autoreset
        self.action = zeros(*grid, *distribution.action_shape, dtype=distribution.action_dtype)
        self.reward = zeros(*grid)
        self.terminated = zeros(*grid, dtype=torch.bool)
        self.truncated = zeros(*grid, dtype=torch.bool)
        self.advantage = zeros(*grid)
        self._log_prob, self._value, self._target = zeros(*grid), zeros(*grid), zeros(*grid)
        self._quality = zeros(len(RolloutQuality._fields))
        fields = (self.action, self._log_prob, self._value, self.advantage, self._target)
        inputs = PolicyInput(self.obs[:n_steps].flatten(0, 1), None, None, None)
        self._finished = Minibatch(inputs, *(field.flatten(0, 1) for field in fields))
        self._keys = zeros(1, dtype=torch.int64)  # one per epoch
        self._permutation = programs.compiled(counter_random.permutation, "the shuffle")
        self._measure = programs.compiled(_quality_of, "the quality of the rollout")
        self._programs = programs
        self._finish: Any = None

    def finish(
        self,
        last: PolicyInput,
        *,
        gamma: float,
        lam: float,
        scaler: RewardScaler[Tensor] | None = None,
    ) -> None:
        """Score the rollout and compute its advantages; ``last`` holds the last row of ``obs``.

        A graph captures the arguments of the first call, so all calls must pass the same.
        """
        if self._finish is None:

            def finish() -> None:
                self._score(last, gamma, lam, scaler)

            self._finish = self._programs.captured(finish, "the end of a rollout")
        self._finish()

    def _score(
        self, last: PolicyInput, gamma: float, lam: float, scaler: RewardScaler[Tensor] | None
    ) -> None:
        agent, rollout = self._agent, self._finished
        log_prob, value = agent.score_batch(rollout.inputs, rollout.action)
        rollout.log_prob.copy_(log_prob)
        rollout.value.copy_(value)
        last_value = agent.value_batch(last)
        cut = self.truncated.flatten()
        final = PolicyInput(self.final_obs.flatten(0, 1), None, None, None)
        final_value = agent.value_batch(final, wanted=cut).view_as(self.reward)
        reward = self.reward
        if scaler is not None:
            reward = scaler.scaled(reward, self.terminated | self.truncated)
        outcomes = RolloutOutcome(
            reward, self._value, last_value, final_value, self.terminated, self.truncated
        )
        self.advantage.copy_(advantages_of(outcomes, gamma=gamma, lam=lam))
        torch.add(self.advantage, self._value, out=self._target)
        self._quality.copy_(self._measure(self._value, self._target, self.reward, self.obs))

    def finished(self) -> Minibatch:
        """The rollout to learn from, flat, [N, ...]."""
        return self._finished

    def shuffle(self, generator: torch.Generator, n_orders: int) -> None:
        """Draw one key per epoch; ``order`` computes the order from it."""
        keys = counter_random.draw_keys(n_orders, generator)
        if len(self._keys) != n_orders:
            self._keys = torch.empty_like(keys, device=self._keys.device)
        send(keys, self._keys)

    def order(self, epoch: int) -> Tensor:
        """All transitions, shuffled: the same order on every device."""
        order: Tensor = self._permutation(self.n_steps * self.n_envs, self._keys[epoch])
        return order

    def new_order(self, n: int, generator: torch.Generator) -> Tensor:
        """0 .. n - 1, shuffled as ``order`` is."""
        key = counter_random.draw_keys(1, generator)[0]
        return counter_random.permutation(n, key.to(self._keys.device))

    def quality(self) -> RolloutQuality:
        """Waits for the device."""
        explained, is_finite = self._quality.tolist()
        return RolloutQuality(explained, bool(is_finite))

    def observations(self) -> Tensor:
        """[T, n_envs, ...]"""
        return self.obs[: self.n_steps]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Actions and advantages, for histograms."""
        return {
            "rollout/actions": self.action.cpu().numpy(),
            "rollout/advantages": self.advantage.cpu().numpy(),
        }


def _quality_of(value: Tensor, target: Tensor, reward: Tensor, obs: Tensor) -> Tensor:
    is_finite = torch.isfinite(reward).all() & torch.isfinite(obs).all()
    return torch.stack([explained_variance(value, target), is_finite.float()])


def _torch_dtype(dtype: Any) -> torch.dtype:
    # torch has no public function from NumPy's dtypes to its own.
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
