"""Ideas as a user writes them: functions and classes that a config names."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.algorithms.ppo.loss import Current, LossTerms, Minibatch, Rates, ppo_loss
from ml_pipeline.algorithms.ppo.rollout import Rollout


def with_metrics(now: Current, batch: Minibatch, rates: Rates, config: Any) -> LossTerms:
    terms = ppo_loss(now, batch, rates, config)
    size = now.features.square().mean()
    extra = {"my/features": size, "my/outputs": now.outputs.abs().mean()}
    return terms._replace(total=terms.total + 1e-3 * size, extra=extra)


class Teacher:
    """Imitates a policy that pushes to the right; has a network of its own, as a teacher has."""

    def __init__(self, coef: float = 0.1) -> None:
        self.coef = coef
        self.teacher = torch.nn.Linear(4, 2)
        with torch.no_grad():
            self.teacher.weight.zero_()
            self.teacher.bias.copy_(torch.tensor([-3.0, 3.0]))

    def __call__(self, now: Current, batch: Minibatch, rates: Rates, config: Any) -> LossTerms:
        terms = ppo_loss(now, batch, rates, config)
        aim = self.teacher(batch.inputs.obs.float()).detach().softmax(-1)
        distance = -(aim * now.outputs.log_softmax(-1)).sum(-1).mean()
        extra = {"my/distance": distance}
        return terms._replace(total=terms.total + self.coef * distance, extra=extra)


def of_old_form(
    log_prob: Any, entropy: Any, value: Any, batch: Any, rates: Any, config: Any
) -> Any:
    raise AssertionError("never called")


def one_step(
    reward: Any, value: Any, next_value: Any, ongoing: Any, *, gamma: float, lam: float
) -> Any:
    """TD(0) instead of GAE."""
    return reward + gamma * next_value - value


def with_own_target(
    reward: Any, value: Any, next_value: Any, ongoing: Any, *, gamma: float, lam: float
) -> Any:
    advantage = one_step(reward, value, next_value, ongoing, gamma=gamma, lam=lam)
    return advantage, reward + gamma * next_value


def halved(progress: float) -> float:
    return 0.5


def negative(progress: float) -> float:
    return -1.0


def double_reward(rollout: Rollout, factor: float = 2.0) -> dict[str, float]:
    rollout.reward[:] *= factor
    return {"my/steps": float(rollout.reward.shape[0])}


def replace_reward(rollout: Rollout) -> None:
    rollout.reward = rollout.reward * 2.0


def replace_action(rollout: Rollout) -> None:
    rollout.action = rollout.action * 0


def sum_over_time(
    reward: Any, value: Any, next_value: Any, ongoing: Any, *, gamma: float, lam: float
) -> Any:
    return (reward - value).sum(0)


def broken_estimate(
    reward: Any, value: Any, next_value: Any, ongoing: Any, *, gamma: float, lam: float
) -> Any:
    return reward.nothing


class Counting:
    """Adds the number of rollouts so far to every reward."""

    def __init__(self, agent: Any, context: Any) -> None:
        assert context.world is not None
        assert agent.reader is not None
        self.n_rollouts = 0

    def __call__(self, rollout: Rollout) -> None:
        self.n_rollouts += 1
        rollout.reward[:] += self.n_rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"n_rollouts": self.n_rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_rollouts = int(state["n_rollouts"])


def mirror_cartpole(obs: Tensor) -> Tensor:
    return -obs


def swap_sides(action: Tensor) -> Tensor:
    return 1 - action


def two_speeds(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """The heads learn ten times as slowly."""
    heads = [each for each in parameters if "head" in each[0]]
    others = [each for each in parameters if "head" not in each[0]]
    return torch.optim.SGD([{"params": heads, "lr": lr / 10}, {"params": others}], lr=lr)


class TwoSights(gym.Env[Any, Any]):
    """The reward depends on the action and on ``hidden``, which an actor need not read."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "seen": spaces.Box(-1, 1, (2,), np.float32),
                "hidden": spaces.Box(-1, 1, (1,), np.float32),
            }
        )
        self.action_space = spaces.Discrete(2)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        reward = float(action) + float(self._hidden[0])
        return self._observe(), reward, False, self._step >= 5, {}

    def _observe(self) -> dict[str, Any]:
        self._hidden = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"seen": seen, "hidden": self._hidden}
