"""TensorOpponentPool: an opponent pool whose players act on the device, for tensor envs.

A few past selves have a seat at a time. Between two iterations one seat after the other is closed;
when its last game has ended, another past self takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.games.opponent_pool import Member, OpponentPool, tensors_of
from ml_pipeline.games.tensor_self_play import TensorSelfPlay
from ml_pipeline.records import StateDict

_N_SEATS = 4  # of past selves; each acts for all envs, so more seats cost more

Player = Callable[[Tensor], Tensor]  # [n, *obs] -> [n, *act]


class _OnDevice(nn.Module):
    """A greedy policy whose actions are computed as in training: compiled, and without float64."""

    def __init__(self, greedy: nn.Module) -> None:
        super().__init__()
        self.greedy: Any = greedy

    def forward(self, obs: Tensor) -> Tensor:
        features, _ = self.greedy.features({"obs": obs})
        distribution = self.greedy.distribution
        action: Tensor = distribution.to_torch_env(distribution.mode(self.greedy.head(features)))
        return action


class TensorOpponentPool(OpponentPool):
    """Seats of past selves come first, then one for each scripted player."""

    def __init__(
        self,
        greedy: nn.Module,
        config: OpponentConfig,
        scripted: Mapping[str, Player],
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(greedy, config, dict.fromkeys(scripted), seed=seed)
        self.env: TensorSelfPlay | None = None  # set by the run
        self.n_seats = _N_SEATS + len(scripted)
        self.chances = torch.zeros(self.n_seats, device=device)
        self._players = list(scripted.values())
        self._seated: list[Member] = []
        self._closed: int | None = None  # a seat whose games come to an end
        self._counted = torch.zeros(self.n_seats, 3, dtype=torch.int64)
        self._on_device = _OnDevice(deepcopy(greedy).to(device))
        self._weights = {
            name: torch.stack([each] * _N_SEATS)
            for name, each in tensors_of(self._on_device).items()
        }

    def add(self, greedy: nn.Module, env_steps: int) -> None:
        super().add(greedy, env_steps)
        if not self._seated:
            self._seated = [self.selves[0]] * _N_SEATS
            for seat in range(_N_SEATS):
                self._sit_down(seat, self.selves[0])
            self._set_chances()

    def set_mix(self, shares: Mapping[str, float]) -> None:
        super().set_mix(shares)
        self._set_chances()

    def seat_players(self, obs: Tensor, seat: Tensor) -> Tensor:
        """The actions of everyone in their seats, [n, *obs], [n] -> [n, *act]."""

        def one(weights: dict[str, Tensor]) -> Tensor:
            action: Tensor = functional_call(self._on_device, weights, (obs,))
            return action

        every = [*vmap(one)(self._weights).unbind(), *(each(obs) for each in self._players)]
        chosen = every[0]
        for number, action in enumerate(every[1:], start=1):
            mask = (seat == number).reshape(-1, *[1] * (action.dim() - 1))
            chosen = torch.where(mask, action, chosen)
        return chosen

    def between_iterations(self) -> None:
        """Count the games, and let past selves change seats; waits for the device."""
        if self.env is None:
            return
        games = self.env.games().to("cpu", torch.int64)
        members = [*self._seated, *self.scripted.values()]
        for member, new in zip(members, (games - self._counted).tolist(), strict=True):
            self.count(member, new)
        self._counted = games
        if self._closed is None:
            self._closed = 0
        elif self.env.players()[self._closed] == 0:
            which = torch.rand((), dtype=torch.float64, generator=self._generator).item()
            self._seated[self._closed] = self._self_at(which)
            self._sit_down(self._closed, self._seated[self._closed])
            self._closed = (self._closed + 1) % _N_SEATS
        self._set_chances()

    def _sit_down(self, seat: int, member: Member) -> None:
        # In place: a captured CUDA graph reads the weights at this address.
        for name, each in member.weights.items():
            self._weights[f"greedy.{name}"][seat].copy_(each)

    def _set_chances(self) -> None:
        """In place, for the same reason."""
        open_seats = [seat for seat in range(_N_SEATS) if seat != self._closed]
        rest = max(1.0 - sum(self.shares.values()), 0.0)
        shares = [rest / len(open_seats) if s in open_seats else 0.0 for s in range(_N_SEATS)]
        shares += [self.shares.get(name, 0.0) for name in self.scripted]
        self.chances.copy_(torch.tensor(shares, dtype=torch.float64).cumsum(0))

    def state_dict(self) -> StateDict:
        state = super().state_dict()
        leaving = [each for each in self._seated if each not in self.selves]
        members = [*self.selves, *dict.fromkeys(leaving)]
        state["selves"] = [each.state_dict() for each in members]
        state["seated"] = [members.index(each) for each in self._seated]
        state["closed"] = self._closed
        state["counted"] = self._counted.clone()
        return state

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        members = [*self.selves, *map(Member.from_state, state["selves"][len(self.selves) :])]
        self._seated = [members[number] for number in state["seated"]]
        for seat, member in enumerate(self._seated):
            self._sit_down(seat, member)
        self._closed = state["closed"]
        self._counted = state["counted"].clone()
        self._set_chances()
