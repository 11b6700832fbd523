"""TorchHockey: Hockey as a tensor env, with the same physics and scripted opponents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv
from ml_pipeline.worlds.hockey import physics
from ml_pipeline.worlds.hockey.env import (
    GOAL_REWARD,
    N_DRAWS,
    Hockey,
    begin,
    game_spaces,
    steps_of,
    strength_of,
)
from ml_pipeline.worlds.hockey.opponents import STRENGTH, scripted_action


def scripted_actions(strength: float, obs: Tensor) -> Tensor:
    """[n, 18] -> [n, 4]"""
    return torch.stack(scripted_action(torch, obs.unbind(1), strength), dim=1)


class TorchHockey(TorchVectorEnv):
    """State: the numbers of ``hockey_physics``, [n_envs] each.

    Without an opponent, observations are [n_envs, 2, 18] and actions [n_envs, 2, 4].
    """

    scripted_players: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {
        name: partial(scripted_actions, strength) for name, strength in STRENGTH.items()
    }

    def __init__(
        self,
        num_envs: int,
        *,
        opponent: str | None = None,
        mode: str = "normal",
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        self.opponent = opponent
        self.mode = mode
        self._strength = strength_of(opponent)
        self.max_episode_steps = self._max_steps = steps_of(mode)
        self.n_draws = N_DRAWS[mode]
        self.single_observation_space, self.single_action_space = game_spaces(opponent is None)
        super().__init__(num_envs, device=device, seed=seed)

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        return begin(torch, self.mode, draws)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        action = action.clamp(-1.0, 1.0)
        if self._strength is None:
            action_0, action_1 = action[:, 0].unbind(1), action[:, 1].unbind(1)
        else:
            action_0 = action.unbind(1)
            action_1 = scripted_action(torch, physics.view_1(state), self._strength)
        state = physics.advance(torch, state, action_0, action_1)
        winner = physics.winner(torch, state)
        cost = physics.distance_cost(torch, state, self._max_steps)
        return state, cost + GOAL_REWARD * winner, winner != 0.0

    def observe(self, state: EnvState) -> Tensor:
        view = torch.stack(physics.view_0(state), dim=1)
        if self._strength is not None:
            return view
        return torch.stack((view, torch.stack(physics.view_1(state), dim=1)), dim=1)

    def outcome(self, state: EnvState) -> dict[str, Tensor]:
        return {"winner": physics.winner(torch, state).to(torch.int64)}

    @classmethod
    def single_env(cls, **kwargs: Any) -> Hockey:
        return Hockey(**kwargs)
