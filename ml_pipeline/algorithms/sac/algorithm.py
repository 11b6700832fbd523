"""SAC as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

from ml_pipeline.algorithms.replay.memory import replay_advice
from ml_pipeline.algorithms.replay.rank_replay import state_of_rank
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer, check_envs
from ml_pipeline.algorithms.sac.agent import PARTS, SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Algorithm, Envs, Place
from ml_pipeline.training.old_weights import load_parts


def make_trainer(agent: SACAgent, envs: Envs, config: SACConfig, place: Place) -> OffPolicyTrainer:
    check_envs(envs)
    if remark := agent.check_fast():
        place.programs.tell(remark)
    if place.world.size > 1 and agent.fast is not None and place.device.type != "cpu":
        agent.fast = None
        place.programs.tell("plain torch runs: MlpSAC cannot average gradients of ranks on a GPU")
    return OffPolicyTrainer(agent, envs, config, place)


def start_from(agent: SACAgent, state: StateDict) -> None:
    """Load all that another agent has learned; Adam, noise and replay stay new."""
    load_parts(agent, state, ("spaces", *PARTS))


SAC = Algorithm(
    SACConfig,
    SACAgent,
    make_trainer,
    replay_advice,
    start_from,
    trains_on_ranks=True,
    state_of_rank=state_of_rank,
)
