"""Players of two-player envs: agents, exported policies and scripted opponents; self-play."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from numpy.typing import NDArray

from ml_pipeline.analysis.evaluate import make_evaluation_envs
from ml_pipeline.analysis.run_data import did_you_mean
from ml_pipeline.assembly.build import build_env_factory
from ml_pipeline.assembly.compose import checked_config, compose_config, stored_config
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.assembly.load import exported_env, is_run, restored_agent
from ml_pipeline.config.opponent import OpponentConfig
from ml_pipeline.config.train import EnvConfig, TrainConfig, VecEnvConfig
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.kinds import AnyVectorEnv
from ml_pipeline.envs.tensor_env import DeviceVectorEnv
from ml_pipeline.envs.trial import EnvTrial
from ml_pipeline.games.matches import DiscretePolicy, GameError, ScriptedPolicy
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.two_players import Scripted, player_space
from ml_pipeline.policy.contracts import Policy, Spaces
from ml_pipeline.runs.checkpoint import best_or_latest, named_checkpoint
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import Agent, RunContext

_OTHER_NAMES = {"basic": "strong"}  # of scripted opponents; hockey-env calls its strong one basic


class Arena(NamedTuple):
    """A two-player env."""

    name: str
    make_env: EnvFactory
    spaces: Spaces  # of one player
    scripted: Mapping[str, Callable[[], Scripted]]  # without state, so that training can resume
    judges: Mapping[str, Callable[[], Scripted]]  # may have state; evaluations prefer them
    moves: NDArray[Any] | None  # [n, *act]: the continuous actions of its discrete version

    def make_envs(self, *, n_envs: int) -> AnyVectorEnv:
        """A vector env for ``play_games``."""
        return make_evaluation_envs(self.make_env, VecEnvConfig(), n_envs=n_envs)


class Player(NamedTuple):
    """A policy for one side of an ``Arena``."""

    name: str
    policy: Policy
    origin: str  # of the policy, in words
    only_greedy: bool = False  # it cannot sample actions


def is_path(given: str) -> bool:
    """Whether ``given`` can be a run, a checkpoint or an exported policy."""
    return is_run(given) or os.path.isfile(given)


def env_of(path: str, *, trust: bool = False) -> EnvConfig:
    """The evaluated env of a run or an exported policy."""
    if os.path.isfile(path) and not is_run(path):
        return exported_env(ExportedPolicy.load(path, trust=trust), path, trust=trust)
    return stored_config(RunFolder.open(path, trust=trust)).evaluated_env


def chosen_env(given: str, *, trust: bool = False) -> EnvConfig:
    """The env of a path, or that of conf/env/<given>.yaml."""
    if is_path(given):
        return env_of(given, trust=trust)
    return checked_config(compose_config([f"env={given}"])).env


def open_arena(env: EnvConfig, *, render_mode: str | None = None) -> Arena:
    """The version of ``env`` for two players, with continuous actions if it has both kinds."""
    arena = two_player_version(env)
    if arena.moves is not None:
        arena = two_player_version(replace(env, kwargs={**env.kwargs, "discrete": False}))
    if render_mode is not None:
        arena = arena._replace(make_env=arena.make_env.rendering(render_mode))
    return arena


def two_player_version(env: EnvConfig) -> Arena:
    """The version of ``env`` for two players, with actions of the same kind."""
    make_env = build_env_factory(env)
    with closing(make_env()) as made:
        parameters = inspect.signature(type(made.unwrapped)).parameters
    if "opponent" in parameters:
        make_env = replace(make_env, kwargs={**make_env.kwargs, "opponent": None})
    with closing(make_env()) as made:
        try:
            of_player = Spaces(
                player_space(made.observation_space), player_space(made.action_space)
            )
        except ValueError as error:
            raise GameError(f"{env.name} is not a two-player env: {error}") from error
        bare: Any = made.unwrapped
        scripted = getattr(bare, "scripted", {})
        judges = getattr(bare, "judges", {})
        moves = getattr(bare, "moves", None) if "discrete" in parameters else None
    return Arena(env.name, make_env, of_player, scripted, judges, moves)


def load_player(
    given: str,
    arena: Arena,
    *,
    noise_seed: int,
    checkpoint: str | None = None,
    trust: bool = False,
) -> Player:
    """A scripted opponent by its name, else a run, a checkpoint or an exported policy.

    ``noise_seed`` of sampled actions: players of equal runs would draw equal noise without it.
    """
    scripted = {**arena.scripted, **arena.judges}
    word = _OTHER_NAMES.get(given, given)
    word = word if word in scripted else given
    if word in scripted:
        policy = ScriptedPolicy(scripted[word]())
        _check_scripted(word, policy, arena)
        return Player(word, policy, "scripted")
    if is_run(given):
        return _load_run(given, arena, noise_seed, checkpoint, trust=trust)
    if os.path.isfile(given):
        exported = ExportedPolicy.load(given, trust=trust)
        own = two_player_version(exported_env(exported, given, trust=trust))
        _check_fits(given, own, arena)
        adapted = _adapted(exported, own, arena)
        return Player(Path(given).name, adapted, "exported policy", only_greedy=True)
    others = [word for word, same in _OTHER_NAMES.items() if same in scripted]
    words = list(dict.fromkeys([*scripted, *others]))
    known = f"an opponent of {arena.name} ({', '.join(words)})" if words else "a policy file"
    raise GameError(f"{given}: neither a run folder nor {known}" + did_you_mean(given, words))


def _load_run(
    given: str, arena: Arena, noise_seed: int, checkpoint: str | None, *, trust: bool
) -> Player:
    run = RunFolder.open(given, trust=trust)
    config = stored_config(run)
    own = two_player_version(config.evaluated_env)
    _check_fits(given, own, arena)
    named = checkpoint or named_checkpoint(given)
    chosen = named or best_or_latest(run)
    agent, env_steps = restored_agent(run, config, chosen, own.spaces, noise_seed=noise_seed)
    name = run.name if named is None else f"{run.name}/{named}"
    origin = f"checkpoint {chosen} of env step {env_steps:,}"
    return Player(name, _adapted(agent, own, arena), origin)


def _check_fits(given: str, own: Arena, arena: Arena) -> None:
    """Refuse a player that sees or does something else than the players of ``arena``."""
    mine, theirs = own.spaces, arena.spaces
    what = ""
    # Bounds of observations do not matter to a policy.
    if not is_space_dtype_shape_equiv(mine.observation, theirs.observation):
        what = f"sees {mine.observation}, but {arena.name} shows {theirs.observation}"
    elif mine.action != theirs.action and (
        own.moves is None or np.shape(own.moves)[1:] != theirs.action.shape
    ):
        what = f"acts in {mine.action}, but {arena.name} takes {theirs.action}"
    if what:
        raise GameError(f"{given}: its player {what}; players need the same spaces")


def _adapted(policy: Policy, own: Arena, arena: Arena) -> Policy:
    """The policy for ``arena``, whose actions may be continuous instead of discrete."""
    if own.spaces.action == arena.spaces.action:
        return policy
    return DiscretePolicy(policy, np.asarray(own.moves, dtype=arena.spaces.action.dtype))


def _check_scripted(name: str, policy: Policy, arena: Arena) -> None:
    obs = np.zeros((1, *(arena.spaces.observation.shape or ())), arena.spaces.observation.dtype)
    action = policy.act_batch(obs, True)[0]
    if not arena.spaces.action.contains(action):
        raise GameError(
            f"{name}: its action {action} does not fit {arena.spaces.action} of {arena.name}; "
            "choose another opponent or env"
        )


class SelfPlay(NamedTuple):
    """How the agent meets its opponents."""

    arena: Arena
    spaces: Spaces  # of the agent
    moves: NDArray[Any] | None  # the arena's actions, if those of the agent are discrete
    config: OpponentConfig
    tensor_env: type[DeviceVectorEnv] | None  # its two-player version takes opponent=None

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


def find_self_play(
    config: TrainConfig, tensor_env: type[DeviceVectorEnv] | None
) -> SelfPlay | None:
    """The two-player version of the env, or None if the run has no opponents."""
    if config.opponent is None:
        return None
    own = two_player_version(config.env)
    arena = open_arena(config.env)._replace(judges={})
    moves = None
    if own.spaces.action != arena.spaces.action:
        moves = np.asarray(own.moves, dtype=arena.spaces.action.dtype)
    return SelfPlay(arena, own.spaces, moves, config.opponent, tensor_env)
