"""Tiny tensor envs; their numbers identify step and env: 10 * step + env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tiny_envs import ForbiddingEnv, MixedEnv
from torch import Tensor

from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv


class Places(TorchVectorEnv):
    """Observation and reward of step t in env i are 10 t + i for any action.

    Env i terminates at step 4, or at step 3 if i is odd.
    """

    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = spaces.Discrete(3)
    n_draws = 1

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        number = torch.arange(self.num_envs, dtype=torch.float32, device=self.device)
        return number, torch.zeros_like(number)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        number, t = state
        t = t + 1.0
        return (number, t), 10.0 * t + number, t >= 4.0 - number % 2.0

    def observe(self, state: EnvState) -> Tensor:
        number, t = state
        return (10.0 * t + number).unsqueeze(1)


class Stages(Places):
    """Reward 1 per step, 10 more to learn from; an episode has ``length`` steps."""

    settings: ClassVar[Mapping[str, float]] = {"length": 2.0}
    length: Tensor

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return self.length, torch.zeros_like(self.length)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        length, t = state
        return (length, t + 1.0), torch.ones_like(t), t + 1.0 >= length

    def shaped(
        self,
        reward: Tensor,
        state: EnvState,
        action: Tensor,
        next_state: EnvState,
        terminated: Tensor,
    ) -> Tensor:
        return reward + 10.0


class Steered(TorchVectorEnv):
    """A side and a force move a place; the reward is minus its distance to 0."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = spaces.Dict(
        force=spaces.Tuple((spaces.Box(0.0, 1.0, (1,), np.float32),)),
        side=spaces.Discrete(2, start=1),
    )
    n_draws = 1
    max_episode_steps = 7

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return (draws[0] - 0.5,)

    def advance(self, state: EnvState, action: Any) -> tuple[EnvState, Tensor, Tensor]:
        (place,) = state
        place = place + (2 * action["side"] - 3) * 0.2 * action["force"][0][:, 0]
        return (place,), -place.abs(), place.abs() > 0.9

    def observe(self, state: EnvState) -> Tensor:
        return state[0].unsqueeze(1)


class Drift(TorchVectorEnv):
    """Actions and a random wind move a place; the reward is minus its distance to 0."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    n_draws = 2
    max_episode_steps = 7

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return draws[0] - 0.5, 0.2 * (draws[1] - 0.5)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        place, wind = state
        place = place + wind + 0.1 * action[:, 0]
        return (place, wind), -place.abs(), place.abs() > 0.6

    def observe(self, state: EnvState) -> Tensor:
        return torch.stack(state, dim=1)


class Breaking(Places):
    """The reward of env 1 is NaN in the second step of each episode."""

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        (number, t), reward, terminated = super().advance(state, action)
        is_broken = (number == 1.0) & (t == 2.0)
        return (number, t), reward.masked_fill(is_broken, torch.nan), terminated


class Masked(Places):
    """Its single env has action masks, which a tensor env cannot have."""

    single_env = ForbiddingEnv  # type: ignore[assignment]


class ManyLeaves(Places):
    """Its single env has a Dict observation, which a tensor env cannot have."""

    single_env = MixedEnv  # type: ignore[assignment]


class Bare(VectorEnv[Any, Any, Any]):
    """One of our tensor envs with the bare interface of a library on a GPU."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, device: str = "cpu", keeps_finals: bool = True) -> None:
        self._env = TorchCartPole(num_envs, device=device, max_episode_steps=15)
        self._keeps_finals = keeps_finals
        self.num_envs = num_envs
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self._env, name))
            setattr(self, f"single_{name}", getattr(self._env, f"single_{name}"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._env.reset(seed=seed)[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert isinstance(actions, torch.Tensor)
        *outcome, infos = self._env.step(actions)
        kept = {"final_obs": infos["final_obs"]} if self._keeps_finals else {}
        return (*outcome, kept)  # type: ignore[return-value]


class Recall(TorchVectorEnv):
    """The first observation is a side; after four steps the action must name it, for a reward of 1.

    Without memory the mean return is 0.5.
    """

    single_observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    single_action_space = spaces.Discrete(2)
    n_draws = 1

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        side = (draws[0] < 0.5).float()
        return side, torch.zeros_like(side)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        side, t = state
        is_last = t >= 3.0
        return (side, t + 1.0), (is_last & (action == side)).float(), is_last

    def observe(self, state: EnvState) -> Tensor:
        side, t = state
        shown = torch.where(t == 0.0, 2.0 * side - 1.0, 0.0)
        return torch.stack([shown, (t == 3.0).float()], dim=1)
