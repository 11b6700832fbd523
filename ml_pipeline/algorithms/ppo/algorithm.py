"""PPO as an ``Algorithm``: builds its agent and its trainer from a config."""

from __future__ import annotations

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.contracts import RolloutCollector
from ml_pipeline.algorithms.ppo.loss_check import check_loss
from ml_pipeline.algorithms.ppo.memory import memory_advice
from ml_pipeline.algorithms.ppo.rank_epochs import join_ranks
from ml_pipeline.algorithms.ppo.tensor_collect import TensorCollector
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.envs.tensor_env import TorchVectorEnv
from ml_pipeline.policy.contracts import NetworkBuilder, Spaces
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import Algorithm, Envs, RunContext
from ml_pipeline.training.old_weights import load_parts


def make_agent(
    spaces: Spaces, build_network: NetworkBuilder, config: PPOConfig, context: RunContext
) -> PPOAgent:
    agent = PPOAgent(spaces, build_network, config, context)
    if not agent.plain.has_standard_loss:
        check_loss(agent)
    if remark := agent.check_fast():
        context.programs.tell(remark)
    if context.world.size > 1 and agent.fast is not None and context.device.type != "cpu":
        agent.fast = None
        context.programs.tell(
            "plain torch runs: the GPU kernels cannot average gradients over ranks"
        )
    return agent


def make_trainer(agent: PPOAgent, envs: Envs, config: PPOConfig, context: RunContext) -> PPOTrainer:
    collector: RolloutCollector
    first = envs.parts[0]
    noise_seed = stream_seed(context.seed, "actions")
    if isinstance(first, TorchVectorEnv):
        collector = TensorCollector(
            first,
            env_seed=envs.first_seed,
            noise_seed=noise_seed,
            programs=context.programs,
            world=context.world,
        )
    else:
        collector = Collector(
            envs.parts,
            env_seed=envs.first_seed,
            noise_seed=noise_seed,
            infos_have_episodes=envs.infos_have_episodes,
            allow_nonfinite=config.on_nonfinite == "skip",
            programs=context.programs,
            world=context.world,
        )
    trainer = PPOTrainer(agent, collector, context)
    if remark := join_ranks(agent, context.world):
        context.programs.tell(remark)
    return trainer


def explain_memory(agent: PPOAgent, config: PPOConfig, n_envs: int, tensor_envs: bool) -> str:
    """How much memory a run of these sizes needs, and which settings reduce it."""
    return memory_advice(
        agent,
        n_steps=config.n_steps,
        n_envs=n_envs,
        n_minibatches=config.n_minibatches,
        keeps_final_obs=tensor_envs,
    )


def start_from(agent: PPOAgent, state: StateDict) -> None:
    """Load network and observation normaliser of another agent; Adam and noise stay new."""
    load_parts(agent, state, ("spaces", "model"))


PPO = Algorithm(
    PPOConfig, make_agent, make_trainer, explain_memory, start_from, trains_on_ranks=True
)
