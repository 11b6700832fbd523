"""PPO as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

import dataclasses

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.hooks import check_estimator, find_hook
from ml_pipeline.algorithms.ppo.loss_check import check_loss
from ml_pipeline.algorithms.ppo.memory import memory_advice
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer, Schedules
from ml_pipeline.mirrors import Mirrored, why_not
from ml_pipeline.policy.contracts import NetworkBuilder, Spaces
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import Algorithm, Envs, RunContext
from ml_pipeline.training.old_weights import load_parts

# What ``SharedMinibatches.normalised`` repeats for the minibatches of all ranks.
MIRRORED: Mirrored = {
    "ml_pipeline.algorithms.ppo.loss.normalised": "46ef7c9d5b79",
}


def make_agent(
    spaces: Spaces, build_network: NetworkBuilder, config: PPOConfig, context: RunContext
) -> PPOAgent:
    # The trainer needs these, but a mistake must be found before there is a run folder.
    Schedules(config)
    check_estimator(config)
    if config.on_rollout is not None:
        find_hook(config.on_rollout)
    agent = PPOAgent(spaces, build_network, config, context)
    if not agent.plain.has_standard_loss:
        check_loss(agent)
    if remark := agent.check_fast():
        context.programs.tell(remark)
    if context.world.is_awaited and agent.fast is not None and context.device.type != "cpu":
        agent.fast = None
        context.programs.tell(
            "plain torch runs: the GPU kernels cannot average gradients over ranks"
        )
    return agent


def make_trainer(agent: PPOAgent, envs: Envs, config: PPOConfig, context: RunContext) -> PPOTrainer:
    collector = Collector(
        envs.parts,
        env_seed=envs.first_seed,
        noise_seed=stream_seed(context.seed, "actions"),
        infos_have_episodes=envs.infos_have_episodes,
        allow_nonfinite=config.on_nonfinite == "skip",
        programs=context.programs,
        world=context.world,
    )
    trainer = PPOTrainer(agent, collector, context)
    if remark := join_ranks(agent, context.world):
        context.programs.tell(remark)
    return trainer


def join_ranks(agent: PPOAgent, world: World) -> str:
    """Start from the weights of rank 0 and average gradients with the other ranks.

    ``Epochs`` normalises advantages over all ranks, so the loss must not do it again. If
    ``normalised`` was edited, each rank calls it for its own part instead. Returns a remark, or
    an empty text.
    """
    if not world.is_awaited:
        return ""
    agent.load_state_dict(world.agreed(agent.state_dict()))
    agent.adam.world = world
    if reason := why_not(MIRRORED):
        return f"each rank normalises the advantages of its own part: {reason}"
    for backend in filter(None, (agent.plain, agent.fast)):
        backend.config = dataclasses.replace(agent.config, normalize_advantage=False)
    return ""


def start_from(agent: PPOAgent, state: StateDict) -> None:
    """Load network and observation normaliser of another agent; Adam and noise stay new."""
    load_parts(agent, state, ("spaces", "model"))


PPO = Algorithm(
    PPOConfig, make_agent, make_trainer, memory_advice, start_from, trains_on_ranks=True
)
