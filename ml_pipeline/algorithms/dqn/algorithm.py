"""DQN as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

from ml_pipeline.algorithms.dqn.agent import DQNAgent
from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.replay.memory import replay_advice
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer, check_envs
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Algorithm, Envs, Place
from ml_pipeline.training.old_weights import load_parts


def make_trainer(agent: DQNAgent, envs: Envs, config: DQNConfig, place: Place) -> OffPolicyTrainer:
    check_envs(envs)
    if remark := agent.check_fast():
        place.programs.tell(remark)
    return OffPolicyTrainer(agent, envs, config, place)


def start_from(agent: DQNAgent, state: StateDict) -> None:
    """Load networks and normaliser of another agent; Adam, noise and replay stay new."""
    load_parts(agent, state, ("spaces", "model", "target", "preprocess"))


DQN = Algorithm(
    DQNConfig,
    DQNAgent,
    make_trainer,
    replay_advice,
    start_from,
    trains_on_ranks=True,
    state_of_rank=state_of_rank,
)
