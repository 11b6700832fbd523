"""OpponentPool: past selves of the agent and scripted players, who play against it.

The pool owns everything that a resume needs: the weights of its members, their results, and who
plays in which env. A member that leaves the pool finishes its games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ml_pipeline.config.opponent import OpponentConfig, check_shares
from ml_pipeline.games.two_players import Scripted
from ml_pipeline.records import StateDict

AGENT = "agent"  # its name in the games since it last joined the pool

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


class OpponentPool:
    """``greedy`` is a policy of the agent's form: it computes the actions of all past selves."""

    def __init__(
        self,
        greedy: nn.Module,
        config: OpponentConfig,
        scripted: Mapping[str, Scripted | None],
        *,
        seed: int,
        moves: NDArray[Any] | None = None,
    ) -> None:
        """``scripted`` has at least the players whose shares the config names.

        They are None if they act elsewhere, as in a ``TensorOpponentPool``.

        ``moves`` [k, *act]: the env's action for each discrete one of past selves.
        """
        self.config = config
        self.selves: list[Member] = []  # from the oldest to the newest
        self.scripted = {name: Member(name, player=each) for name, each in scripted.items()}
        self.shares = dict(config.scripted)
        self.games: dict[tuple[str, str], list[int]] = {}  # (agent's name, opponent) -> results
        self._greedy = greedy
        self._moves = moves
        self._generator = torch.Generator().manual_seed(seed)
        self._playing: dict[int, Member] = {}  # by the number of the env
        self._seats: dict[range, _Seats] = {}  # outdated ones are removed

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

    def between_iterations(self) -> None:
        """Called after each iteration; nothing to do here: games are counted as they end."""

    def choose(self, envs: Sequence[int]) -> None:
        for env in envs:
            self._playing[env] = self._drawn()
        self._seats.clear()

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

    def act(self, envs: range, obs: NDArray[Any]) -> NDArray[Any]:
        if envs not in self._seats:
            self._seats[envs] = _Seats([self._playing[env] for env in envs])
        return self._seats[envs].act(self._greedy, obs, self._moves)

    def record(self, env: int, winner: int) -> None:
        self.count(self._playing[env], [int(winner == kind) for kind in (1, 0, -1)])

    def count(self, member: Member, results: Sequence[int]) -> None:
        """Add wins, draws and losses of the agent against ``member``."""
        if not any(results):
            return
        member.results = [old + new for old, new in zip(member.results, results, strict=True)]
        while sum(member.results) >= _MOST_GAMES:
            member.results = [each / 2 for each in member.results]
        known = self.games.setdefault((AGENT, member.name), [0, 0, 0])
        known[:] = [old + new for old, new in zip(known, results, strict=True)]

    def state_dict(self) -> StateDict:
        leaving = [each for each in self._playing.values() if each not in self.selves]
        members = [*self.selves, *dict.fromkeys(each for each in leaving if each.player is None)]
        numbers = {member: number for number, member in enumerate(members)}
        return {
            "selves": [each.state_dict() for each in members],
            "n_selves": len(self.selves),
            "scripted": {name: list(each.results) for name, each in self.scripted.items()},
            "shares": dict(self.shares),
            "playing": [
                [env, each.name if each.player is not None else numbers[each]]
                for env, each in self._playing.items()
            ],
            "games": [[*names, *results] for names, results in self.games.items()],
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        members = [Member.from_state(each) for each in state["selves"]]
        self.selves = members[: state["n_selves"]]
        for name, results in state["scripted"].items():
            if name in self.scripted:
                self.scripted[name].results = list(results)
        self.shares = {n: share for n, share in state["shares"].items() if n in self.scripted}
        self._playing = {
            env: members[who] if isinstance(who, int) else self.scripted[who]
            for env, who in state["playing"]
        }
        self._seats.clear()
        self.games = {(one, other): list(results) for one, other, *results in state["games"]}
        self._generator.set_state(state["generator"])


class _Seats:
    """The opponents of some envs, arranged so that all past selves act in one forward pass.

    ``[k, m]``: k different past selves with at most m envs each; a row with fewer repeats env 0.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        rows: dict[Member, list[int]] = {}
        for row, member in enumerate(members):
            rows.setdefault(member, []).append(row)
        self._scripted = [(m.player, own) for m, own in rows.items() if m.player is not None]
        learned = {member: own for member, own in rows.items() if member.player is None}
        self._rows = [row for own in learned.values() for row in own]
        size = max(map(len, learned.values()), default=0)
        self._table = np.array([own + [0] * (size - len(own)) for own in learned.values()])
        self._is_used = np.array(
            [[i < len(own) for i in range(size)] for own in learned.values()], dtype=bool
        )
        names = next(iter(learned)).weights if learned else {}
        self._weights = {
            name: torch.stack([member.weights[name] for member in learned]) for name in names
        }

    def act(self, greedy: nn.Module, obs: NDArray[Any], moves: NDArray[Any] | None) -> NDArray[Any]:
        actions: NDArray[Any] | None = None
        if self._rows:
            chosen = _forward(greedy, self._weights, torch.from_numpy(obs[self._table]))
            chosen = chosen if moves is None else moves[chosen]
            actions = np.empty((len(obs), *chosen.shape[2:]), chosen.dtype)
            actions[self._rows] = chosen[self._is_used]
        for player, rows in self._scripted:
            theirs = player.act_batch(obs[rows])
            if actions is None:
                actions = np.empty((len(obs), *theirs.shape[1:]), theirs.dtype)
            actions[rows] = theirs
        assert actions is not None, "an env without an opponent"
        return actions


@torch.no_grad()
def _forward(greedy: nn.Module, weights: dict[str, Tensor], obs: Tensor) -> NDArray[Any]:
    """[k, m, *obs] -> [k, m, *act]"""

    def one(weights: dict[str, Tensor], obs: Tensor) -> Tensor:
        action: Tensor = functional_call(greedy, weights, ({"obs": obs},))["action"]
        return action

    if len(obs) == 1:  # without vmap, which costs more than a small network
        alone = one({key: each[0] for key, each in weights.items()}, obs[0])
        return np.asarray(alone.numpy()[np.newaxis])
    return np.asarray(vmap(one)(weights, obs).numpy())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
