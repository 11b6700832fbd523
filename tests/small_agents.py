"""Small agents on the CPU, and a collector that plays one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Minibatch
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.observations import batched
from ml_pipeline.training.contracts import RunContext

CPU = torch.device("cpu")


def agent_for(
    obs_space: Any,
    action_space: Any,
    network: Any = MLP,
    *,
    seed: int = 1,
    fast: bool = True,
    device: torch.device = CPU,
    precision: str = "float32",
    **options: Any,
) -> PPOAgent:
    config = PPOConfig(fast="auto" if fast else "off", **options)
    context = RunContext.alone(device, seed=seed, precision=precision)
    return PPOAgent(Spaces(obs_space, action_space), network, config, context)


def agent_in(env: Any, network: Any = MLP, **options: Any) -> PPOAgent:
    """An agent for the spaces of a vector env."""
    return agent_for(env.single_observation_space, env.single_action_space, network, **options)


def seen(obs: Tensor, mask: Tensor | None = None) -> PolicyInput:
    """The inputs of a policy that is not recurrent."""
    return PolicyInput(obs, mask, None, None)


def minibatch(agent: PPOAgent, size: int = 32) -> Minibatch:
    """Random observations and an older policy: some ratios are outside the clip range."""
    space, generator = agent.spaces["observation_space"], torch.Generator().manual_seed(1)
    space.seed(1)
    obs = batched(space, [space.sample() for _ in range(size)])
    inputs = agent.inputs(agent.reader.read(obs))
    action = agent.sample_batch(inputs, agent.draw_noise(1, size, generator)[0]).action
    log_prob, value = agent.score_batch(inputs, action)
    change, other, advantage, target = torch.randn(4, size, generator=generator)
    older = log_prob + 0.4 * change, value + 0.4 * other
    return Minibatch(inputs, action, *older, advantage, target)


class Played:
    """A collector of host envs or of a tensor env, an agent, and a buffer of ``n_steps``."""

    def __init__(
        self,
        envs: Any,
        n_steps: int,
        agent: PPOAgent | None = None,
        *,
        noise_seed: int = 2,
        **more: Any,
    ) -> None:
        """``more`` are settings of ``Collector``."""
        envs = envs if isinstance(envs, list) else [envs]
        self.n_steps = n_steps
        self.agent = agent or agent_in(envs[0])
        seeds = {"env_seed": 10, "noise_seed": noise_seed}
        self.collector = Collector(envs, **seeds, **more)
        self.buffer = self.collector.new_buffer(n_steps, self.agent)
        config, self.scaler = self.agent.config, None
        if config.scale_reward:
            self.scaler = self.collector.new_scaler(gamma=config.gamma, clip=config.clip_reward)

    def collect(self) -> Collector:
        """Collect and commit one more rollout; returns the collector."""
        self.collector.collect(self.agent, self.buffer)
        self.collector.commit(self.n_steps)
        return self.collector

    def finish(self, gamma: float = 0.9, lam: float = 0.9) -> None:
        self.buffer.finish(gamma=gamma, lam=lam, scaler=self.scaler)

    def resume(self, state: Any, snapshots: Any = ()) -> None:
        """Continue from the state of another collector."""
        self.collector.load_state_dict(state)
        self.collector.resume_at(state["position"], snapshots, self.agent)
