"""DQN as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

from ml_pipeline.agents.dqn import DQNAgent
from ml_pipeline.algorithms.old_weights import load_parts
from ml_pipeline.config.dqn import DQNConfig
from ml_pipeline.protocols import Algorithm, Envs, Place, StateDict
from ml_pipeline.training.off_policy_trainer import OffPolicyTrainer, check_envs
from ml_pipeline.training.out_of_memory import replay_advice


def make_trainer(agent: DQNAgent, envs: Envs, config: DQNConfig, place: Place) -> OffPolicyTrainer:
    check_envs(envs)
    if remark := agent.check_fast():
        place.programs.tell(remark)
    exponent = config.priority_exponent
    return OffPolicyTrainer(agent, envs, config, place, priority_exponent=exponent)


def start_from(agent: DQNAgent, state: StateDict) -> None:
    """Load networks and normaliser of another agent; Adam, noise and replay stay new."""
    load_parts(agent, state, ("spaces", "model", "target", "preprocess"))


DQN = Algorithm(DQNConfig, DQNAgent, make_trainer, replay_advice, start_from, trains_on_ranks=True)
