"""The env factory, the network and the agent of a config; all that loading a run needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import torch

from ml_pipeline.assembly.compose import ConfigError, find_algorithm
from ml_pipeline.config.train import EnvConfig, TrainConfig
from ml_pipeline.device import torch_threads
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.policy.contracts import Policy, Spaces
from ml_pipeline.ranks.world import World
from ml_pipeline.targets import instantiate
from ml_pipeline.training.contracts import Agent, RunContext
from ml_pipeline.training.graphs import Programs


def build_env_factory(env: EnvConfig) -> EnvFactory:
    return EnvFactory(env.id, env.target, env.kwargs, env.wrappers)


def cpu_context(config: TrainConfig) -> RunContext:
    """The context of an agent that only plays."""
    device = torch.device("cpu")
    return RunContext(device, config.seed, config.precision, Programs(device), World())


def build_agent(config: TrainConfig, env: Any, context: RunContext) -> Agent:
    """``env`` is a single env or any object with its two spaces."""
    spaces = Spaces(env.observation_space, env.action_space)
    network = partial(build_network, config)
    # The last bits of the first weights depend on the number of threads.
    with torch_threads(torch.device("cpu")):
        return find_algorithm(config).make_agent(spaces, network, config.agent, context)


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


def mask_key(config: TrainConfig) -> str:
    """The key under which a probed env has its mask, in its info or its observation."""
    source = config.agent.action_mask
    return "action_mask" if source in ("auto", "none", "info") else source


def act_greedily(policy: Policy, obs: Any, infos: Any) -> Any:
    """About as much work as acting in one training step; used to measure its time."""
    n_envs = _batch_size(obs)
    mask, memory = policy.mask_of(infos), policy.new_memory(n_envs)
    return policy.act_batch(obs, True, action_mask=mask, memory=memory)


def _batch_size(obs: Any) -> int:
    while isinstance(obs, (dict, tuple)):
        obs = next(iter(obs.values() if isinstance(obs, dict) else obs))
    return len(obs)


@contextmanager
def kept_cwd() -> Iterator[None]:
    """Return to the current folder at the end: an env may call os.chdir."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)
