"""DQN as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

from ml_pipeline.agents.dqn import DQNAgent
from ml_pipeline.config.dqn import DQNConfig
from ml_pipeline.protocols import Algorithm, Envs, Place
from ml_pipeline.training.off_policy_trainer import OffPolicyTrainer, check_envs


def make_trainer(agent: DQNAgent, envs: Envs, config: DQNConfig, place: Place) -> OffPolicyTrainer:
    check_envs(envs)
    if remark := agent.check_fast():
        place.programs.tell(remark)
    exponent = config.priority_exponent
    return OffPolicyTrainer(agent, envs, config, place, priority_exponent=exponent)


DQN = Algorithm(DQNConfig, DQNAgent, make_trainer, trains_on_ranks=True)
