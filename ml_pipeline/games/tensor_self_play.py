"""TensorSelfPlay: a two-player tensor env as one for the agent, against opponents in seats.

A seat holds one opponent, who acts on the device. Each episode draws its seat when it starts and
keeps it. Games are counted in the state, so that a step stays a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import one_hot

from ml_pipeline.envs.tensor_env import EnvState, Position, StepResult, TorchVectorEnv
from ml_pipeline.games.opponent_pool import N_SEATS, Member, OpponentPool, tensors_of
from ml_pipeline.games.two_players import player_space
from ml_pipeline.policy.actor_critic import GreedyPolicy

RESULTS = 3  # wins, draws and losses of the agent


class _OnDevice(nn.Module):
    """A greedy policy whose actions are computed as in training: compiled, and without float64."""

    def __init__(self, greedy: GreedyPolicy) -> None:
        super().__init__()
        self.greedy = greedy

    def forward(self, obs: Tensor) -> Tensor:
        features, _ = self.greedy.features({"obs": obs})
        distribution = self.greedy.distribution
        return distribution.to_torch_env(distribution.mode(self.greedy.head(features)))


class TensorSelfPlay(TorchVectorEnv):
    """State: that of the two-player env, the seat [n] int64, and games [n, n_seats * 3] int32.

    An episode starts like the same one of the two-player env. The env has the ``Seats`` of the
    pool ``opponents``. They change in place: a captured CUDA graph reads them at their addresses.
    """

    def __init__(self, env: TorchVectorEnv, opponents: OpponentPool) -> None:
        self.env = env
        self.opponents = opponents
        self.single_observation_space = player_space(env.single_observation_space)
        self.single_action_space = player_space(env.single_action_space)
        self.max_episode_steps = env.max_episode_steps
        self.n_draws = env.n_draws + 1
        if "winner" not in env.outcome(env.position.state):
            raise ValueError(f"{type(env).__name__}.outcome has no winner; add it")
        self._n_seats = N_SEATS + len(env.scripted_players)
        self._chances = torch.zeros(self._n_seats, device=env.device)  # cumulative
        self._on_device = _OnDevice(deepcopy(opponents.greedy).to(env.device))
        self._weights = {
            name: torch.stack([each] * N_SEATS)
            for name, each in tensors_of(self._on_device).items()
        }
        opponents.use_seats(self)
        super().__init__(env.num_envs, device=env.device, seed=int(env.seeds[0]))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        self.opponents.begin_counting()
        return super().reset(seed=seed, options=options)

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        *others, draw = draws
        # The last border is left out: rounding must not lead past the last seat.
        seat = (draw[:, None] >= self._chances[:-1]).sum(dim=1)
        n_games = RESULTS * self._n_seats
        games = torch.zeros((len(draw), n_games), dtype=torch.int32, device=self.device)
        return (*self.env.begin(tuple(others)), seat, games)

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        *inner, seat, games = state
        view = self.env.observe(tuple(inner))[:, 1]
        both = torch.stack((action, self.act_in_seats(view, seat)), dim=1)
        after, reward, terminated = self.env.advance(tuple(inner), both)
        return (*after, seat, games), reward, terminated

    def act_in_seats(self, obs: Tensor, seat: Tensor) -> Tensor:
        """The actions of the opponents in their seats, [n, *obs], [n] -> [n, *act]."""

        def one(weights: dict[str, Tensor]) -> Tensor:
            action: Tensor = functional_call(self._on_device, weights, (obs,))
            return action

        scripted = [player(obs) for player in self.env.scripted_players.values()]
        every = [*vmap(one)(self._weights).unbind(), *scripted]
        chosen = every[0]
        for number, action in enumerate(every[1:], start=1):
            mask = (seat == number).reshape(-1, *[1] * (action.dim() - 1))
            chosen = torch.where(mask, action, chosen)
        return chosen

    def observe(self, state: EnvState) -> Tensor:
        views: Tensor = self.env.observe(state[:-2])
        return views[:, 0]

    def outcome(self, state: EnvState) -> dict[str, Tensor]:
        return self.env.outcome(state[:-2])

    def _autoreset(self, position: Position, result: StepResult) -> tuple[Position, StepResult]:
        *_, seat, games = position.state
        done = result.terminated | result.truncated
        kind = RESULTS * seat + 1 - self.outcome(position.state)["winner"]
        won = one_hot(kind, games.shape[1]).to(torch.int32) * done[:, None]
        position, result = super()._autoreset(position, result)
        return position._replace(state=(*position.state[:-1], games + won)), result

    def sit_down(self, seat: int, member: Member) -> None:
        for name, each in member.weights.items():
            self._weights[f"greedy.{name}"][seat].copy_(each)

    def set_chances(self, chances: Sequence[float]) -> None:
        self._chances.copy_(torch.tensor(chances, dtype=torch.float64).cumsum(0))

    def games(self) -> Tensor:
        """[n_seats, 3]: wins, draws and losses of the agent in every seat since the last reset."""
        return self.position.state[-1].sum(dim=0).reshape(self._n_seats, RESULTS)

    def players(self) -> Tensor:
        """[n_seats]: how many envs play in every seat."""
        return torch.bincount(self.position.state[-2], minlength=self._n_seats)
