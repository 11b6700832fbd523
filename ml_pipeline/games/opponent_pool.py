"""OpponentPool: past selves of the agent and scripted players, who play against it.

The pool decides who plays, counts the results, and owns everything that a resume needs. It does not
act: ``ArrayOpponents`` and ``TensorSelfPlay`` compute the actions of its members. A member that
leaves the pool finishes its games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.config.opponent import OpponentConfig, check_shares
from ml_pipeline.games.two_players import Scripted
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.records import StateDict

AGENT = "agent"  # its name in the games since it last joined the pool
N_SEATS = 4  # of past selves in tensor envs; each acts for all envs, so more seats cost more

_PRIOR_GAMES = 2  # drawn games that every score starts with
_MOST_GAMES = 200  # results are halved from here on, so that a score follows the agent


@dataclass(eq=False)
class Member:
    """One opponent and the agent's recent results against it."""

    name: str  # "weak", or "self at 50000"
    weights: dict[str, Tensor] = field(default_factory=dict)  # of a past self
    player: Scripted | None = None
    results: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # wins, draws, losses

    def state_dict(self) -> StateDict:
        return {"name": self.name, "weights": self.weights, "results": list(self.results)}

    @classmethod
    def from_state(cls, state: StateDict) -> Member:
        return cls(state["name"], dict(state["weights"]), None, list(state["results"]))

    @property
    def score(self) -> float:
        """The agent's share of the points; 0.5 before the first game."""
        wins, draws, _ = self.results
        return (wins + 0.5 * draws + 0.5 * _PRIOR_GAMES) / (sum(self.results) + _PRIOR_GAMES)


class Seats(Protocol):
    """The opponents of tensor envs: past selves in ``N_SEATS`` seats, then the scripted players.

    Each episode draws its seat on the device, so one seat has games in many envs.
    """

    def sit_down(self, seat: int, member: Member) -> None:
        """The games of a seat are against ``member`` from now on."""

    def set_chances(self, chances: Sequence[float]) -> None:
        """How often an episode draws each seat."""

    def games(self) -> Tensor:
        """[n_seats, 3]: wins, draws and losses of the agent in every seat since the last reset."""

    def players(self) -> Tensor:
        """[n_seats]: how many envs play in every seat."""


class OpponentPool:
    """``greedy`` is a policy of the agent's form: it computes the actions of all past selves."""

    def __init__(
        self,
        greedy: GreedyPolicy,
        config: OpponentConfig,
        scripted: Mapping[str, Scripted | None],
        *,
        seed: int,
    ) -> None:
        """``scripted`` has at least the players whose shares the config names.

        They are None if they act on a device.
        """
        self.greedy = greedy
        self.config = config
        self.selves: list[Member] = []  # from the oldest to the newest
        self.scripted = {name: Member(name, player=each) for name, each in scripted.items()}
        self.shares = dict(config.scripted)
        self.games: dict[tuple[str, str], list[int]] = {}  # (agent's name, opponent) -> results
        self.playing: dict[int, Member] = {}  # of host envs, by the number of the env
        self.seated: list[Member] = []  # of tensor envs
        self._seats: Seats | None = None
        self._closed: int | None = None  # a seat whose games come to an end
        self._counted = torch.zeros(N_SEATS + len(scripted), 3, dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, greedy: nn.Module, env_steps: int) -> None:
        """A copy of the agent joins; the oldest leaves if the pool is full."""
        name = f"self at {env_steps}"
        weights = {key: each.detach().clone() for key, each in tensors_of(greedy).items()}
        self.selves = [*self.selves, Member(name, weights)][-self.config.capacity :]
        # What the agent has played so far are the games of this copy.
        for agent, opponent in list(self.games):
            if agent == AGENT:
                self.games[name, opponent] = self.games.pop((agent, opponent))

    def set_mix(self, shares: Mapping[str, float]) -> None:
        """Change the scripted players' shares of the games that start from now on."""
        unknown = [name for name in shares if name not in self.scripted]
        if unknown:
            known = ", ".join(self.scripted) or "none"
            raise ValueError(f"{unknown[0]!r}: this env has no such player, only {known}")
        check_shares("shares", dict(shares))
        self.shares = dict(shares)
        self._set_chances()

    @property
    def anchor(self) -> str:
        """The opponent with 1000 points: a scripted player, or the oldest past self."""
        met = dict.fromkeys(opponent for _, opponent in self.games)
        return next((name for name in met if name in self.scripted), next(iter(met)))

    def results(self) -> tuple[int, int, int]:
        """The agent's wins, draws and losses since a copy of it last joined."""
        own = [each for (agent, _), each in self.games.items() if agent == AGENT]
        wins, draws, losses = (sum(each[i] for each in own) for i in range(3))
        return wins, draws, losses

    def choose(self, envs: Sequence[int]) -> None:
        """Draw an opponent for each of ``envs``, whose episodes start."""
        for env in envs:
            self.playing[env] = self._drawn()

    def _drawn(self) -> Member:
        """A member at random; draws two numbers whatever the settings are."""
        kind, which = torch.rand(2, dtype=torch.float64, generator=self._generator).tolist()
        for name, share in self.shares.items():
            if kind < share:
                return self.scripted[name]
            kind -= share
        return self._self_at(which)

    def _self_at(self, which: float) -> Member:
        """The past self at ``which``, a number in [0, 1), on the scale of their chances."""
        cumulative = np.cumsum(self._chances())
        return self.selves[int(np.searchsorted(cumulative, which * cumulative[-1], "right"))]

    def _chances(self) -> NDArray[np.float64]:
        """How often each past self plays, in any scale."""
        lost = np.array([1.0 - member.score for member in self.selves])
        if self.config.sampling == "latest":
            return np.asarray(np.eye(len(lost))[-1])
        if self.config.sampling == "hard":
            return np.asarray(lost**self.config.power)
        if self.config.sampling == "even":
            return np.asarray(lost * (1.0 - lost))
        return np.ones(len(lost))

    def record(self, env: int, winner: int) -> None:
        """Add the result of a game: 1, 0 or -1 for the agent."""
        self.count(self.playing[env], [int(winner == kind) for kind in (1, 0, -1)])

    def count(self, member: Member, results: Sequence[int]) -> None:
        """Add wins, draws and losses of the agent against ``member``."""
        if not any(results):
            return
        member.results = [old + new for old, new in zip(member.results, results, strict=True)]
        while sum(member.results) >= _MOST_GAMES:
            member.results = [each / 2 for each in member.results]
        known = self.games.setdefault((AGENT, member.name), [0, 0, 0])
        known[:] = [old + new for old, new in zip(known, results, strict=True)]

    def use_seats(self, seats: Seats) -> None:
        """Play in tensor envs; the oldest past self has all seats until others take them."""
        self._seats = seats
        self._fill(seats, [self.selves[0]] * N_SEATS)

    def begin_counting(self) -> None:
        """All games in the seats have started anew, so none of them is counted yet."""
        self._counted = torch.zeros_like(self._counted)

    def between_iterations(self) -> None:
        """Count the games in the seats, and let another past self take one; waits for the device.

        Past selves take turns: one seat after the other is closed, and changes hands when its last
        game has ended. Host envs record each game and draw for each episode instead.
        """
        if self._seats is None:
            return
        games = self._seats.games().to("cpu", torch.int64)
        members = [*self.seated, *self.scripted.values()]
        for member, new in zip(members, (games - self._counted).tolist(), strict=True):
            self.count(member, new)
        self._counted = games
        if self._closed is None:
            self._closed = 0
        elif self._seats.players()[self._closed] == 0:
            which = torch.rand((), dtype=torch.float64, generator=self._generator).item()
            self.seated[self._closed] = self._self_at(which)
            self._seats.sit_down(self._closed, self.seated[self._closed])
            self._closed = (self._closed + 1) % N_SEATS
        self._set_chances()

    def _fill(self, seats: Seats, members: list[Member]) -> None:
        self.seated = members
        for seat, member in enumerate(members):
            seats.sit_down(seat, member)
        self._set_chances()

    def _set_chances(self) -> None:
        if self._seats is None:
            return
        open_seats = [seat for seat in range(N_SEATS) if seat != self._closed]
        rest = max(1.0 - sum(self.shares.values()), 0.0)
        chances = [rest / len(open_seats) if s in open_seats else 0.0 for s in range(N_SEATS)]
        self._seats.set_chances([*chances, *(self.shares.get(n, 0.0) for n in self.scripted)])

    def state_dict(self) -> StateDict:
        busy = [*self.seated, *(each for each in self.playing.values() if each.player is None)]
        members = list(dict.fromkeys([*self.selves, *busy]))  # also those who have left the pool
        numbers = {member: number for number, member in enumerate(members)}
        state = {
            "selves": [each.state_dict() for each in members],
            "n_selves": len(self.selves),
            "scripted": {name: list(each.results) for name, each in self.scripted.items()},
            "shares": dict(self.shares),
            "playing": [[env, numbers.get(each, each.name)] for env, each in self.playing.items()],
            "games": [[*names, *results] for names, results in self.games.items()],
            "generator": self._generator.get_state(),
        }
        if self._seats is not None:
            state["seated"] = [numbers[each] for each in self.seated]
            state["closed"] = self._closed
            state["counted"] = self._counted.clone()
        return state

    def load_state_dict(self, state: StateDict) -> None:
        members = [Member.from_state(each) for each in state["selves"]]
        self.selves = members[: state["n_selves"]]
        for name, results in state["scripted"].items():
            if name in self.scripted:
                self.scripted[name].results = list(results)
        self.shares = {n: share for n, share in state["shares"].items() if n in self.scripted}
        self.playing = {
            env: members[who] if isinstance(who, int) else self.scripted[who]
            for env, who in state["playing"]
        }
        self.games = {(one, other): list(results) for one, other, *results in state["games"]}
        self._generator.set_state(state["generator"])
        if self._seats is not None:
            self._closed = state["closed"]
            self._counted = state["counted"].clone()
            self._fill(self._seats, [members[number] for number in state["seated"]])


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
