"""SAC as an ``Algorithm``, for the config: agent.algorithm names it by dotted path."""

from __future__ import annotations

from ml_pipeline.algorithms.replay.algorithm import replay_algorithm
from ml_pipeline.algorithms.sac.agent import SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig

SAC = replay_algorithm(SACConfig, SACAgent)
