"""The agent of a run: its algorithm, its settings and its network, from the config to the objects.

``compose`` imports this module, and --help must be fast: torch is imported inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf

from ml_pipeline.assembly.explain import ConfigError, unknown_key
from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.config.curriculum import CurriculumConfig
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.moved import moved
from ml_pipeline.policy.contracts import Networks
from ml_pipeline.policy.space_data import named_parts
from ml_pipeline.targets import (
    ALGORITHM_OF_OLD_RUNS,
    TargetError,
    import_dotted,
    import_module,
    instantiate,
)
from ml_pipeline.training.contracts import Agent, Algorithm, Envs, RunContext, Trainer

if TYPE_CHECKING:
    import torch

    from ml_pipeline.envs.kinds import AnySpace
    from ml_pipeline.envs.trial import EnvTrial
    from ml_pipeline.policy.contracts import NetworkBuilder, Spaces

ConfigT = TypeVar("ConfigT", AgentConfig, CurriculumConfig)


def find_algorithm(cfg: DictConfig | TrainConfig) -> Algorithm:
    """The algorithm that agent.algorithm names; runs without the key have the oldest one."""
    name = _algorithm_name(cfg)
    return checked_algorithm(name, import_dotted(name, key="agent.algorithm"))


def settings_class(cfg: DictConfig) -> type[AgentConfig]:
    """The class of ``agent``; torch is not imported if the algorithm has a config.py."""
    return config_class(_algorithm_name(cfg), "agent.algorithm")


def _algorithm_name(cfg: DictConfig | TrainConfig) -> str:
    return str(getattr(cfg.agent, "algorithm", None) or ALGORITHM_OF_OLD_RUNS)


def checked_algorithm(name: str, found: object) -> Algorithm:
    """Refuse what is not an algorithm."""
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"agent.algorithm={name}: must be an ml_pipeline.training.contracts.Algorithm, got a "
            f"{type(found).__name__}"
        )
    return found


def config_class(dotted: str, key: str) -> type:
    """The dataclass at a dotted path, or that of the algorithm there; errors name ``key``.

    A config.py beside an algorithm is enough: torch is not imported, so --help is fast.
    """
    beside = _algorithm_classes(moved(dotted), key)
    if len(beside) == 1:
        return beside[0]
    found = import_dotted(dotted, key=key)
    is_dataclass = isinstance(found, type) and dataclasses.is_dataclass(found)
    return found if is_dataclass else checked_algorithm(dotted, found).config


def _algorithm_classes(algorithm: str, key: str) -> list[type]:
    """The classes in config.py of an algorithm's package that name the algorithm."""
    package = ".".join(algorithm.split(".")[:-2])
    if not package:
        return []
    try:
        module = import_module(f"{package}.config", key=key, path=algorithm)
    except TargetError:  # there is none, or importing the algorithm reports why it is broken
        return []
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in classes if getattr(each, "algorithm", None) == algorithm]


def typed(key: str, config_class: type[ConfigT], cfg: DictConfig) -> ConfigT:
    """The config at ``key``, as an object of this class."""
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in cfg[key] if OmegaConf.is_dict(cfg[key]) else ():
        if name not in known:
            whole = cast("dict[str, object]", OmegaConf.to_container(cfg, resolve=False))
            raise ConfigError(unknown_key(f"{key}.{name}", cfg[key][name], known, whole))
    schema = _schema(key, config_class)  # type: ignore[arg-type]  # mypy: only objects are hashed
    merged = OmegaConf.merge(schema, {key: cfg[key]})
    return cast("ConfigT", OmegaConf.to_object(getattr(merged, key)))


@cache
def _schema(key: str, config_class: type) -> DictConfig:
    return OmegaConf.create({key: OmegaConf.structured(config_class)})


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
        parts = named_parts(trial.action_space, "action").values()
        can_be_masked = not all(isinstance(part, spaces.Box) for part in parts)
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


def build_agent(config: TrainConfig, env_spaces: Spaces, context: RunContext) -> Agent:
    """``env_spaces``: of a single env."""
    import torch

    from ml_pipeline.device import torch_threads

    network: NetworkBuilder = partial(build_network, config)
    if own := config.network.get("critic"):
        network = Networks(network, partial(build_network, _for_critic(config, own)))
    # The last bits of the first weights depend on the number of threads.
    with torch_threads(torch.device("cpu")):
        return find_algorithm(config).make_agent(env_spaces, network, config.agent, context)


def _for_critic(config: TrainConfig, own: Mapping[str, Any]) -> TrainConfig:
    """The config for the critic: with another _target_ it has none of the actor's keys."""
    if not config.agent.has_critic:
        raise ConfigError(
            f"network.critic={own}: {agent_name(config)} has no critic network of its own with "
            "these settings (agent.shared_trunk=true has none); remove the key"
        )
    if not isinstance(own, Mapping):
        raise ConfigError(
            f"network.critic={own}: must have keys; write network.critic.hidden_sizes=[256,256] "
            "or network.critic._target_=my_module.MyNetwork"
        )
    shared = {} if "_target_" in own else config.network
    return dataclasses.replace(config, network={**shared, **own})


def build_network(config: TrainConfig, observation_space: AnySpace) -> torch.nn.Module:
    import torch

    entry = {name: value for name, value in config.network.items() if name != "critic"}
    offers = {"observation_space": observation_space}
    network = instantiate(entry, key="network", offers=offers, first="observation_space")
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


def chosen_network(config: TrainConfig, observation_space: AnySpace) -> dict[str, object] | None:
    """The settings of the network that network=auto chose; None for every other network.

    ``observation_space``: of a single env.
    """
    from ml_pipeline.policy.auto_network import auto, written_out
    from ml_pipeline.policy.observations import ObservationReader, Preprocess

    if moved(str(config.network["_target_"])) != f"{auto.__module__}.{auto.__qualname__}":
        return None
    source = config.agent.action_mask
    mask = None if source in ("auto", "none", "info") else source
    preprocess = Preprocess(ObservationReader(observation_space), ignored=mask, clip=None)
    settings = {name: each for name, each in config.network.items() if name != "_target_"}
    return written_out(preprocess.space, settings)


def build_trainer(config: TrainConfig, agent: Agent, envs: Envs, context: RunContext) -> Trainer:
    return find_algorithm(config).make_trainer(agent, envs, config.agent, context)


def agent_name(config: TrainConfig) -> str:
    """The name of the algorithm, such as dqn."""
    return type(config.agent).__name__.removesuffix("Config").lower()
