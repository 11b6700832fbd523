"""Self-play: the two-player version of a run's env, and the pool of its opponents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.assembly.compose import ConfigError
from ml_pipeline.assembly.players import Arena, load_player, open_arena, two_player_version
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.trial import EnvTrial
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.two_players import Scripted
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import Agent, RunContext


class SelfPlay(NamedTuple):
    """How the agent meets its opponents."""

    arena: Arena
    spaces: Spaces  # of the agent
    moves: NDArray[Any] | None  # the arena's actions, if those of the agent are discrete
    config: OpponentConfig
    tensor_env: type[TorchVectorEnv] | None  # its two-player version takes opponent=None

    def seen_by_agent(self, trial: EnvTrial) -> EnvTrial:
        """The trial of the arena's env as one player sees it."""
        return trial._replace(
            observation_space=self.spaces.observation,
            action_space=self.spaces.action,
            obs=trial.obs[0],
        )

    @property
    def player_names(self) -> list[str]:
        """The scripted players: those of the env, and those that the config names."""
        return list(dict.fromkeys([*self.arena.scripted, *self.config.scripted]))

    def new_pool(self, agent: Agent, context: RunContext) -> OpponentPool:
        """The pool of a new run: its first member is the untrained agent."""
        if agent.new_memory(1) is not None:
            raise ConfigError(
                "opponent: past selves cannot be recurrent; use another network, such as "
                "network=mlp"
            )
        greedy, seed = agent.greedy(), stream_seed(context.seed, "opponents")
        players: Mapping[str, Scripted | None] = {
            name: load_player(name, self.arena, noise_seed=0).policy for name in self.player_names
        }
        if self.tensor_env is not None:
            players = dict.fromkeys(self.tensor_env.scripted_players)
        pool = OpponentPool(greedy, self.config, players, seed=seed)
        pool.add(greedy, 0)
        return pool


def find_self_play(config: TrainConfig, tensor_env: type[TorchVectorEnv] | None) -> SelfPlay | None:
    """The two-player version of the env, or None if the run has no opponents."""
    if config.opponent is None:
        return None
    own = two_player_version(config.env)
    arena = open_arena(config.env)._replace(judges={})
    moves = None
    if own.spaces.action != arena.spaces.action:
        moves = np.asarray(own.moves, dtype=arena.spaces.action.dtype)
    return SelfPlay(arena, own.spaces, moves, config.opponent, tensor_env)
