"""replay_algorithm: the ``Algorithm`` of an agent that learns from replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.memory import replay_advice
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer, check_envs
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Algorithm, Envs, RunContext
from ml_pipeline.training.old_weights import load_parts


def replay_algorithm(
    config: type[OffPolicyConfig], agent: Callable[..., ReplayAgent[Any, Any, Any]]
) -> Algorithm:
    """``agent`` is a subclass of ``ReplayAgent``, whose settings are a ``config``."""
    return Algorithm(
        config,
        agent,
        make_trainer,
        replay_advice,
        start_from,
        trains_on_ranks=True,
        state_of_rank=state_of_rank,
    )


def make_trainer(
    agent: ReplayAgent[Any, Any, Any], envs: Envs, config: OffPolicyConfig, context: RunContext
) -> OffPolicyTrainer:
    check_envs(envs)
    return OffPolicyTrainer(agent, envs, config, context)


def start_from(agent: ReplayAgent[Any, Any, Any], state: StateDict) -> None:
    """Load all that another agent has learnt; optimisers, noise and replay stay new."""
    load_parts(agent, state, ("spaces", *agent.parts))
