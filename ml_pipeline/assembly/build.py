"""The parts of a run around its agent, made from its config: envs, loggers and callbacks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ml_pipeline.assembly.agent import agent_name
from ml_pipeline.assembly.explain import ConfigError
from ml_pipeline.callbacks.curriculum import Curriculum
from ml_pipeline.config.train import EnvConfig, TrainConfig
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import DeviceVectorEnv, TorchVectorEnv
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.tensor_self_play import TensorSelfPlay
from ml_pipeline.given import objects_in
from ml_pipeline.policy.contracts import Policy
from ml_pipeline.ranks.world import World
from ml_pipeline.runs.checkpoint import check_plain
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.targets import import_dotted, instantiate
from ml_pipeline.training.contracts import Callback, Logger, RunContext
from ml_pipeline.training.graphs import Programs


def build_env_factory(env: EnvConfig) -> EnvFactory:
    given = objects_in([env.target, env.kwargs, env.wrappers])
    return EnvFactory(env.id, env.target, env.kwargs, env.wrappers, given, env.vector)


def cpu_context(config: TrainConfig) -> RunContext:
    """The context of an agent that only plays."""
    device = torch.device("cpu")
    return RunContext(device, config.seed, config.precision, Programs(device), World())


def find_tensor_env(config: TrainConfig) -> type[DeviceVectorEnv] | None:
    """The class of tensor envs that env.target names, or None if it names another kind."""
    if config.env.target is None:
        return None
    target = import_dotted(config.env.target, key="env.target")
    is_tensor_env = isinstance(target, type) and issubclass(target, DeviceVectorEnv)
    return target if is_tensor_env else None


def make_tensor_env(
    config: TrainConfig,
    env_class: type[DeviceVectorEnv],
    device: torch.device,
    *,
    n_envs: int,
    seed: int,
    pool: OpponentPool | None = None,
) -> DeviceVectorEnv:
    """The tensor env of a config; for self-play its two-player version, against ``pool``."""
    kwargs = dict(config.env.kwargs)
    if config.opponent is not None:
        kwargs["opponent"] = None
    try:
        env = env_class(n_envs, device=device, seed=seed, **kwargs)
        if pool is None:
            return env
        if not isinstance(env, TorchVectorEnv):
            raise ValueError("opponent needs tensor envs of torch")
        return TensorSelfPlay(env, pool)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.target={config.env.target}: {error}") from error


def act_greedily(policy: Policy, obs: Any, infos: Any) -> Any:
    """About as much work as acting in one training step; used to measure its time."""
    mask, memory = policy.mask_of(infos), policy.new_memory(len(first_leaf(obs)))
    return policy.act_batch(obs, True, action_mask=mask, memory=memory)


def first_leaf(obs: Any) -> Any:
    """The observation, or the first part of one that has several."""
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values())) if isinstance(obs, dict) else obs[0]
    return obs


@contextmanager
def kept_cwd() -> Iterator[None]:
    """Return to the current folder at the end: an env may call os.chdir."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


def build_loggers(
    config: TrainConfig,
    run_folder: RunFolder,
    sweep: str | None,
    env_steps: int,
    on_failure: ExitStack,
) -> dict[str, Logger]:
    """The loggers of the config; the local record and the console are always on."""
    run_config = {
        **dataclasses.asdict(config),
        "env_name": config.env.name,
        "agent_name": agent_name(config),
    }
    offers = {
        "run": run_folder,
        "run_config": run_config,
        "sweep": sweep,
        "env_steps": env_steps,  # at which the run resumes; 0 for a new run
    }
    loggers: dict[str, Logger] = {}
    for name, entry in config.logger.items():
        loggers[name] = instantiate(entry, key=f"logger.{name}", offers=offers)
        if not all(hasattr(loggers[name], method) for method in ("log", "close")):
            raise ConfigError(
                f"logger.{name}: {type(loggers[name]).__name__} has no log and close; "
                "see ml_pipeline.training.contracts.Logger"
            )
        on_failure.callback(loggers[name].close)
    return loggers


def build_callbacks(
    config: TrainConfig,
    run_folder: RunFolder,
    device: torch.device,
    load_policy: Callable[[str], Policy],
) -> dict[str, Callback]:
    offers = {
        "load_policy": load_policy,
        "run": run_folder,
        "make_env": build_env_factory(config.evaluated_env),
        "vec_env": config.vec_env,
        "seed": config.seed,
        "device": device,
        "best_metric": config.best_metric,
    }
    callbacks: dict[str, Callback] = {}
    if config.curriculum is not None:
        if "curriculum" in config.callbacks:
            raise ConfigError("callbacks.curriculum: the key curriculum makes one of that name")
        callbacks["curriculum"] = Curriculum(config.curriculum)
    for name, entry in config.callbacks.items():
        callbacks[name] = instantiate(entry, key=f"callbacks.{name}", offers=offers)
        if not isinstance(callbacks[name], Callback):
            raise ConfigError(
                f"callbacks.{name}: {type(callbacks[name]).__name__} is not an "
                "ml_pipeline.training.contracts.Callback; derive it from that class"
            )
        check_plain(callbacks[name].state_dict(), f"the state of callbacks.{name}")
    return callbacks
