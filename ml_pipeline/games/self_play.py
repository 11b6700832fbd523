"""SelfPlayEnv: a two-player VectorEnv as an ordinary one, whose second player is an opponent.

The agent is player 0 of every env. Opponents are chosen when an episode starts and stay until it
ends; those of all envs act in one call, which ``ArrayOpponents`` computes for an opponent pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ml_pipeline.games.opponent_pool import Member, OpponentPool
from ml_pipeline.games.two_players import Array, Info, player_space

# Observations, rewards, terminated, truncated and infos, [n, ...] each.
Step = tuple[Array, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]


class SelfPlayEnv(VectorEnv[Any, Any, Any]):
    """Everything else, such as ``snapshot`` and ``worker_loads``, is that of the wrapped env."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        opponents: ArrayOpponents,
        *,
        first_env: int = 0,
        moves: Array | None = None,
    ) -> None:
        """``first_env``: the number of env 0 among all envs of the run.

        ``moves`` [k, *act]: the agent has discrete actions, and these are the env's actions.
        """
        self.env: Any = env
        self.opponents = opponents
        self.first_env = first_env
        self.single_observation_space = player_space(env.single_observation_space)
        self.single_action_space = player_space(env.single_action_space)
        if moves is not None:
            self.single_action_space = Discrete(len(moves))
        self._moves = moves
        self.metadata, self.spec = env.metadata, env.spec
        self.render_mode = env.render_mode
        self._use_size()
        self._view: Array = np.zeros(0)  # [n, *obs]: what the opponents see

    def _use_size(self) -> None:
        self.num_envs = self.env.num_envs
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    @property
    def _envs(self) -> range:
        return range(self.first_env, self.first_env + self.num_envs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Info | None = None,
    ) -> tuple[Array, Info]:
        obs, infos = self.env.reset(seed=seed, options=options)
        mask = (options or {}).get("reset_mask")
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        self.opponents.choose([self.first_env + row for row in rows])
        return self._split(obs), infos

    def step(self, actions: Array) -> Step:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Array) -> None:
        own = np.asarray(actions) if self._moves is None else self._moves[actions]
        theirs = self.opponents.act(self._envs, self._view)
        self.env.step_async(np.stack([own, theirs], axis=1))

    def step_wait(self, **kwargs: Any) -> Step:
        obs, reward, terminated, truncated, infos = self.env.step_wait(**kwargs)
        ended = np.flatnonzero(terminated | truncated).tolist()
        if ended:
            infos = self._end_games(ended, infos)
        return self._split(obs), reward, terminated, truncated, infos

    def _end_games(self, ended: list[int], infos: Info) -> Info:
        final = infos.get("final_info", {})
        for row in ended:
            # A game without a winner was cut off: its worker has been restarted.
            if "winner" in final and final["_winner"][row]:
                self.opponents.record(self.first_env + row, int(final["winner"][row]))
        self.opponents.choose([self.first_env + row for row in ended])
        finals = infos["final_obs"].copy()
        for row in ended:
            finals[row] = None if finals[row] is None else finals[row][0]
        return {**infos, "final_obs": finals}

    def _split(self, obs: Array) -> Array:
        """The agent's part of the observations; keeps that of the opponents."""
        self._view = np.array(obs[:, 1])
        return np.array(obs[:, 0])

    def resize(self, n_envs: int) -> tuple[Array, Info]:
        before = self.num_envs
        obs, infos = self.env.resize(n_envs)
        self._use_size()
        self.opponents.choose([self.first_env + row for row in range(before, n_envs)])
        return self._split(obs), infos

    def set_attr(self, name: str, values: Any) -> None:
        self.env.set_attr(name, values)

    def snapshot(self) -> list[bytes]:
        """Each env as bytes, after what its opponent sees."""
        snapshots = self.env.snapshot()
        return [view.tobytes() + each for view, each in zip(self._view, snapshots, strict=True)]

    def restore(self, snapshots: Sequence[bytes]) -> None:
        space = self.single_observation_space
        n_bytes = int(np.prod(space.shape or ())) * np.dtype(space.dtype).itemsize
        self.env.restore([each[n_bytes:] for each in snapshots])
        views = [np.frombuffer(each[:n_bytes], space.dtype) for each in snapshots]
        self._view = np.stack(views).reshape(self.num_envs, *(space.shape or ()))

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close(**kwargs)


class ArrayOpponents:
    """The members of ``pool`` as the opponents of host envs, which have the numbers of the run.

    ``moves`` [k, *act]: the env's action for each discrete one of past selves.
    """

    def __init__(self, pool: OpponentPool, *, moves: Array | None = None) -> None:
        self._pool = pool
        self._moves = moves
        self._tables: dict[range, _Table] = {}
        self.choose = pool.choose
        self.record = pool.record
        self.set_mix = pool.set_mix

    def act(self, envs: range, obs: Array) -> Array:
        """[n, *obs] -> [n, *act]: the actions of the opponents in ``envs``."""
        members = [self._pool.playing[env] for env in envs]
        table = self._tables.get(envs)
        if table is None or table.members != members:
            table = self._tables[envs] = _Table(members)
        return table.act(self._pool.greedy, obs, self._moves)


class _Table:
    """The opponents of some envs, arranged so that all past selves act in one forward pass.

    ``[k, m]``: k different past selves with at most m envs each; a row with fewer repeats env 0.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
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

    def act(self, greedy: nn.Module, obs: Array, moves: Array | None) -> Array:
        actions: Array | None = None
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
def _forward(greedy: nn.Module, weights: dict[str, Tensor], obs: Tensor) -> Array:
    """[k, m, *obs] -> [k, m, *act]"""

    def one(weights: dict[str, Tensor], obs: Tensor) -> Tensor:
        action: Tensor = functional_call(greedy, weights, ({"obs": obs},))["action"]
        return action

    if len(obs) == 1:  # without vmap, which costs more than a small network
        alone = one({key: each[0] for key, each in weights.items()}, obs[0])
        return np.asarray(alone.numpy()[np.newaxis])
    return np.asarray(vmap(one)(weights, obs).numpy())
