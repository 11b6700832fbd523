"""The parts of a run, made from its config: envs, network, agent, trainer, loggers, callbacks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces

from ml_pipeline.assembly.compose import ConfigError, find_algorithm
from ml_pipeline.callbacks.curriculum import Curriculum
from ml_pipeline.config.train import EnvConfig, TrainConfig
from ml_pipeline.device import torch_threads
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.envs.trial import EnvTrial
from ml_pipeline.games.opponent_pool import OpponentPool
from ml_pipeline.games.tensor_self_play import TensorSelfPlay
from ml_pipeline.policy.contracts import Policy, Spaces
from ml_pipeline.ranks.world import World
from ml_pipeline.runs.checkpoint import check_plain
from ml_pipeline.runs.run_folder import RunFolder
from ml_pipeline.targets import import_dotted, instantiate
from ml_pipeline.training.contracts import Agent, Callback, Envs, Logger, RunContext, Trainer
from ml_pipeline.training.graphs import Programs


def build_env_factory(env: EnvConfig) -> EnvFactory:
    return EnvFactory(env.id, env.target, env.kwargs, env.wrappers)


def cpu_context(config: TrainConfig) -> RunContext:
    """The context of an agent that only plays."""
    device = torch.device("cpu")
    return RunContext(device, config.seed, config.precision, Programs(device), World())


def build_agent(config: TrainConfig, env_spaces: Spaces, context: RunContext) -> Agent:
    """``env_spaces``: of a single env."""
    network = partial(build_network, config)
    # The last bits of the first weights depend on the number of threads.
    with torch_threads(torch.device("cpu")):
        return find_algorithm(config).make_agent(env_spaces, network, config.agent, context)


def build_network(config: TrainConfig, observation_space: gym.Space[Any]) -> torch.nn.Module:
    offers = {"observation_space": observation_space}
    network = instantiate(config.network, key="network", offers=offers)
    if not isinstance(network, torch.nn.Module):
        raise ConfigError(
            f"network._target_={config.network['_target_']}: made a {type(network).__name__}; "
            "name a torch.nn.Module"
        )
    if any(torch.nn.parameter.is_lazy(each) for each in network.parameters()):
        raise ConfigError(
            f"network {type(network).__name__} has lazy layers, whose weights have no size yet; "
            "compute the sizes from observation_space in its constructor"
        )
    return network


def build_trainer(config: TrainConfig, agent: Agent, envs: Envs, context: RunContext) -> Trainer:
    return find_algorithm(config).make_trainer(agent, envs, config.agent, context)


def find_tensor_env(config: TrainConfig) -> type[TorchVectorEnv] | None:
    """The class of tensor envs that env.target names, or None if it names another kind."""
    if config.env.target is None:
        return None
    target = import_dotted(config.env.target, key="env.target")
    is_tensor_env = isinstance(target, type) and issubclass(target, TorchVectorEnv)
    return target if is_tensor_env else None


def make_tensor_env(
    config: TrainConfig,
    env_class: type[TorchVectorEnv],
    device: torch.device,
    *,
    n_envs: int,
    seed: int,
    pool: OpponentPool | None = None,
) -> TorchVectorEnv:
    """The tensor env of a config; for self-play its two-player version, against ``pool``."""
    kwargs = dict(config.env.kwargs)
    if config.opponent is not None:
        kwargs["opponent"] = None
    try:
        env = env_class(n_envs, device=device, seed=seed, **kwargs)
        return env if pool is None else TensorSelfPlay(env, pool)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.target={config.env.target}: {error}") from error


def mask_key(config: TrainConfig) -> str:
    """The key under which a probed env has its mask, in its info or its observation."""
    source = config.agent.action_mask
    return "action_mask" if source in ("auto", "none", "info") else source


def with_mask_source(config: TrainConfig, trial: EnvTrial) -> TrainConfig:
    """The config with agent.action_mask=auto replaced by the source of this env's masks, or none.

    Masks in infos are needed at every step, so all infos must be sent.
    """
    source = config.agent.action_mask
    if source == "auto":
        space = trial.observation_space
        in_obs = isinstance(space, spaces.Dict) and "action_mask" in space.spaces
        can_be_masked = not isinstance(trial.action_space, spaces.Box)
        in_info = "action_mask" in trial.info and can_be_masked
        if can_be_masked and not in_obs and "action_mask" in trial.step_info and not in_info:
            raise ConfigError(
                f"env {config.env.name} returns an action_mask from step, but not from reset; "
                "return one from reset too, or set agent.action_mask=none"
            )
        source = "action_mask" if in_obs else "info" if in_info else "none"
    infos = "all" if source == "info" else config.vec_env.infos
    return dataclasses.replace(
        config,
        agent=dataclasses.replace(config.agent, action_mask=source),
        vec_env=dataclasses.replace(config.vec_env, infos=infos),
    )


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


def agent_name(config: TrainConfig) -> str:
    return type(config.agent).__name__.removesuffix("Config").lower()


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
    config: TrainConfig, run_folder: RunFolder, device: torch.device
) -> dict[str, Callback]:
    offers = {
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
