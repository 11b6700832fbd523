"""check_ranks: what several ranks refuse."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ml_pipeline.assembly.compose import ConfigError, find_algorithm
from ml_pipeline.config.train import TrainConfig
from ml_pipeline.training.contracts import Agent, RunContext


def check_ranks(config: TrainConfig, context: RunContext, agent: Agent) -> None:
    """Refuse settings that need one process, and sizes that are too small for all ranks."""
    world = context.world
    modules = getattr(agent, "model", nn.Module()).modules()
    has_batch_norm = any(isinstance(each, _BatchNorm) for each in modules)
    for is_wrong, key in (
        (has_batch_norm, "network, which has BatchNorm layers"),
        (not find_algorithm(config).trains_on_ranks, f"agent.algorithm={config.agent.algorithm}"),
        (config.opponent is not None, "opponent"),
        (config.curriculum is not None, "curriculum"),
    ):
        if is_wrong:
            reason = f"{key}: does not train on {world.name}; start one process, without torchrun"
            world.refuse(reason, ConfigError)
    if reason := config.agent.why_not(world.all_envs(int(config.n_envs))):
        world.refuse(f"{world.name}: {reason}", ConfigError)
