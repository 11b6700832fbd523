"""DQN as an ``Algorithm``, for the config: agent.algorithm names it by dotted path."""

from __future__ import annotations

from ml_pipeline.algorithms.dqn.agent import DQNAgent
from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.replay.algorithm import replay_algorithm

DQN = replay_algorithm(DQNConfig, DQNAgent)
