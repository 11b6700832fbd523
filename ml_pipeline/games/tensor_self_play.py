"""TensorSelfPlay: a two-player tensor env as one for the agent, against opponents in seats.

A seat holds one opponent. Each episode draws its seat when it starts and keeps it. Games are
counted in the state, so that a step stays a pure function.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ml_pipeline.envs.tensor_env import EnvState, Position, StepResult, TorchVectorEnv
from ml_pipeline.games.two_players import player_space

RESULTS = 3  # wins, draws and losses of the agent


class Seats(Protocol):
    """Opponents on the device; what changes between iterations changes in place."""

    n_seats: int
    chances: Tensor  # [n_seats] float32, cumulative: the last one is 1

    def seat_players(self, obs: Tensor, seat: Tensor) -> Tensor:
        """The actions of everyone in their seats, [n, *obs], [n] -> [n, *act]."""


class TensorSelfPlay(TorchVectorEnv):
    """State: that of the two-player env, the seat [n] int64, and games [n, n_seats * 3] int32.

    An episode starts like the same one of the two-player env.
    """

    def __init__(self, env: TorchVectorEnv, opponents: Seats) -> None:
        self.env = env
        self.opponents = opponents
        self.single_observation_space = player_space(env.single_observation_space)
        self.single_action_space = player_space(env.single_action_space)
        self.max_episode_steps = env.max_episode_steps
        self.n_draws = env.n_draws + 1
        if "winner" not in env.outcome(env.position.state):
            raise ValueError(f"{type(env).__name__}.outcome has no winner; add it")
        super().__init__(env.num_envs, device=env.device, seed=int(env.seeds[0]))

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        *others, draw = draws
        # The last border is left out: rounding must not lead past the last seat.
        seat = (draw[:, None] >= self.opponents.chances[:-1]).sum(dim=1)
        n_games = RESULTS * self.opponents.n_seats
        games = torch.zeros((len(draw), n_games), dtype=torch.int32, device=self.device)
        return (*self.env.begin(tuple(others)), seat, games)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        *inner, seat, games = state
        view = self.env.observe(tuple(inner))[:, 1]
        both = torch.stack((action, self.opponents.seat_players(view, seat)), dim=1)
        after, reward, terminated = self.env.advance(tuple(inner), both)
        return (*after, seat, games), reward, terminated

    def observe(self, state: EnvState) -> Tensor:
        return self.env.observe(state[:-2])[:, 0]

    def outcome(self, state: EnvState) -> dict[str, Tensor]:
        return self.env.outcome(state[:-2])

    def _autoreset(self, position: Position, result: StepResult) -> tuple[Position, StepResult]:
        *_, seat, games = position.state
        done = result.terminated | result.truncated
        kind = RESULTS * seat + 1 - self.outcome(position.state)["winner"]
        won = one_hot(kind, games.shape[1]).to(torch.int32) * done[:, None]
        position, result = super()._autoreset(position, result)
        return position._replace(state=(*position.state[:-1], games + won)), result

    def games(self) -> Tensor:
        """[n_seats, 3]: wins, draws and losses of the agent in every seat since the last reset."""
        return self.position.state[-1].sum(dim=0).reshape(self.opponents.n_seats, RESULTS)

    def players(self) -> Tensor:
        """[n_seats]: how many envs play in every seat."""
        return torch.bincount(self.position.state[-2], minlength=self.opponents.n_seats)
