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
from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv
from ml_pipeline.worlds.hockey.tensor_env import TorchHockey


class Places(TorchVectorEnv):
    """Observation and reward of step t in env i are 10 t + i for any action.

    Env i terminates at step 4, or at step 3 if i is odd.
    """

    single_observation_space: AnySpace = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space: AnySpace = spaces.Discrete(3)
    n_draws = 1

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        number = torch.arange(self.num_envs, dtype=torch.float32, device=self.device)
        return number, torch.zeros_like(number)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        number, t = state
        t = t + 1.0
        return (number, t), 10.0 * t + number, t >= 4.0 - number % 2.0

    def observe(self, state: EnvState) -> Any:
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


class Digits(TorchVectorEnv):
    """Two digits appear; the reward is the share of them that an action of two parts repeats."""

    single_observation_space = spaces.MultiDiscrete([2, 3])
    single_action_space: AnySpace = spaces.MultiDiscrete([2, 3], start=[-1, 4])
    n_draws = 2
    max_episode_steps = 4

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return _whole(draws[0] * 2), _whole(draws[1] * 3)

    def advance(self, state: EnvState, action: Any) -> tuple[EnvState, Tensor, Tensor]:
        first, second = state
        ours, theirs = self.parts_of(action)
        reward = ((ours == first).float() + (theirs == second).float()) / 2.0
        after = (first + second) % 2, (second + 1) % 3
        return after, reward, torch.zeros_like(first, dtype=torch.bool)

    def parts_of(self, action: Any) -> tuple[Tensor, Tensor]:
        return action[:, 0] + 1, action[:, 1] - 4

    def observe(self, state: EnvState) -> Tensor:
        return torch.stack(state, dim=1)


class DigitsInRows(Digits):
    """Each part of the action has a row."""

    single_action_space = spaces.MultiDiscrete([[2], [3]])

    def parts_of(self, action: Any) -> tuple[Tensor, Tensor]:
        return action[:, 0, 0], action[:, 1, 0]


class DigitsInBits(Digits):
    """The second digit has two bits."""

    single_action_space = spaces.MultiBinary(3)

    def parts_of(self, action: Any) -> tuple[Tensor, Tensor]:
        return action[:, 0], action[:, 1] + 2 * action[:, 2]


class DigitsAndForce(Digits):
    """A Dict of a choice, a number from -1 to 1 that is cut into thirds, and a mask.

    The mask forbids the choice 2 of 0, 1 and 2.
    """

    single_action_space = spaces.Dict(
        force=spaces.Tuple((spaces.Box(-1.0, 1.0, (1,), np.float32),)), side=spaces.Discrete(3)
    )

    def parts_of(self, action: Any) -> tuple[Tensor, Tensor]:
        third = ((action["force"][0][:, 0] + 1.0) * 1.5).floor().clamp(0.0, 2.0)
        return action["side"], _whole(third)

    def action_mask(self, state: EnvState) -> Tensor | None:
        return (torch.arange(3, device=self.device) != 2).expand(self.num_envs, 3)


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


class Forbidding(TorchVectorEnv):
    """Forbids one entry per choice, another one each step; to choose it costs 100, others give 1.

    Its episodes have three steps in env 0, four in env 1 and so on, up to six.
    """

    single_observation_space: AnySpace = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space: AnySpace = spaces.Discrete(4)
    sizes: ClassVar[tuple[int, ...]] = (4,)
    n_draws = 1

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        number = torch.arange(self.num_envs, device=self.device)
        return number, torch.zeros_like(number)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        number, t = state
        choices = action.reshape(len(t), -1).unbind(dim=1)
        forbidden = [-(number + t) % size for size in self.sizes]
        pairs = zip(choices, forbidden, strict=True)
        is_forbidden = torch.stack([choice == one for choice, one in pairs]).any(dim=0)
        reward = torch.where(is_forbidden, -100.0, 1.0)
        return (number, t + 1), reward, t + 1 >= 3 + number % 4

    def observe(self, state: EnvState) -> Any:
        return torch.stack(state, dim=1).to(torch.float32)

    def action_mask(self, state: EnvState) -> Tensor | None:
        number, t = state
        entries = [torch.arange(size, device=self.device) for size in self.sizes]
        parts = [(each + (number + t)[:, None]) % len(each) != 0 for each in entries]
        return torch.cat(parts, dim=1)


class ForbiddingInObs(Forbidding):
    """The same with the mask in its observation."""

    single_observation_space = spaces.Dict(
        place=spaces.Box(-np.inf, np.inf, (2,), np.float32), action_mask=spaces.MultiBinary(4)
    )

    def observe(self, state: EnvState) -> Any:
        mask = super().action_mask(state)
        assert mask is not None
        return {"action_mask": mask.to(torch.int8), "place": super().observe(state)}

    def action_mask(self, state: EnvState) -> Tensor | None:
        return None


class ForbiddingTwo(Forbidding):
    """The same with two choices."""

    single_action_space = spaces.MultiDiscrete([2, 3])
    sizes = (2, 3)


class Stuck(Forbidding):
    """Env 1 allows no action in its third step."""

    def action_mask(self, state: EnvState) -> Tensor | None:
        number, t = state
        allowed = super().action_mask(state)
        return None if allowed is None else allowed & ~((number == 1) & (t == 2))[:, None]


class Masked(Places):
    """Its single env has action masks, and the tensor env has none."""

    single_env = ForbiddingEnv  # type: ignore[assignment]


class Leaves(Places):
    """Observes an image, angles, a choice and two kinds; rewards the action that the choice names.

    Its angles grow with the step, so that normalising them matters.
    """

    single_observation_space: AnySpace = spaces.Dict(
        image=spaces.Box(0, 255, (6, 6, 1), np.uint8),
        arm=spaces.Dict(angles=spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        parts=spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 4]))),
    )
    single_action_space: AnySpace = spaces.Discrete(3)
    max_episode_steps = 3

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        (number, t), _, terminated = super().advance(state, action)
        return (number, t), (action == _whole(number + t - 1) % 3).float(), terminated

    def observe(self, state: EnvState) -> Any:
        number, t = state
        place = _whole(number + t)
        pixels = torch.arange(36, device=self.device) == place[:, None] % 36
        return {
            "image": pixels.reshape(-1, 6, 6, 1).to(torch.uint8) * 255,
            "arm": {"angles": torch.stack((10.0 * t + number, -t), dim=1)},
            "parts": (place % 3, torch.stack((place % 2, place % 4), dim=1)),
        }


def _whole(numbers: Tensor) -> Tensor:
    return numbers.to(torch.int64)


class MaskedHockey(TorchHockey):
    """Masks in a game of two players."""

    def action_mask(self, state: EnvState) -> Tensor | None:
        return torch.ones((self.num_envs, 4), dtype=torch.bool, device=self.device)


class OtherLeaves(Places):
    """Its single env observes something else."""

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
