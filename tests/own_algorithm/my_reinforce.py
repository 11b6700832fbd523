"""REINFORCE as a user writes it: one file, outside the package, with no edit to the package.

``python train_ppo.py agent=reinforce`` finds it through conf/agent/reinforce.yaml beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.envs.episode_stats import EpisodeStats, EpisodeWindow
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Spaces
from ml_pipeline.policy.distributions import Categorical
from ml_pipeline.policy.masks import ActionMasks
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observations import ObservationReader, Preprocess
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Algorithm, Envs, RunContext


@dataclass
class ReinforceConfig(AgentConfig):
    algorithm: str = "my_reinforce.REINFORCE"
    learning_rate: float = 1e-2
    gamma: float = 0.99
    n_steps: int = 64  # per env and iteration

    def iteration_steps(self, n_envs: int) -> int:
        return self.n_steps * n_envs


class ReinforceAgent:
    def __init__(
        self,
        spaces: Spaces,
        build_network: NetworkBuilder,
        config: ReinforceConfig,
        context: RunContext,
    ) -> None:
        self.reader = ObservationReader(spaces.observation)
        self.preprocess = Preprocess(self.reader, ignored=None, clip=None)
        self.distribution = Categorical(spaces.action)
        with torch.random.fork_rng():
            torch.manual_seed(context.seed)
            trunk = build_network(self.preprocess.space)
            head = nn.Linear(out_features(trunk), self.distribution.n_outputs)
        self.model = nn.ModuleDict({"trunk": trunk, "head": head})
        self.adam = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate)
        self.generator = torch.Generator().manual_seed(context.seed)

    def logits(self, obs: Any) -> Tensor:
        leaves = self.reader.to_tensors(self.reader.read(obs), torch.device("cpu"))
        return self.model["head"](self.model["trunk"](self.preprocess(leaves)))

    @torch.no_grad()
    def act_batch(
        self, obs: Any, deterministic: bool = False, *, action_mask: Any = None, memory: Any = None
    ) -> Any:
        logits = self.logits(obs)
        noise = self.distribution.draw_noise(1, len(logits), self.generator)[0]
        greedy, drawn = self.distribution.mode, self.distribution.sample
        action = greedy(logits) if deterministic else drawn(logits, noise)
        return self.distribution.to_env(action.numpy())

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Any) -> None:
        return None

    def for_playing(self) -> ReinforceAgent:
        return self

    def greedy(self) -> GreedyPolicy:
        masks = ActionMasks("none", self.reader, self.distribution)
        parts = {"trunk": self.model["trunk"], "head": self.model["head"]}
        return GreedyPolicy(
            self.reader,
            masks,
            preprocess=self.preprocess,
            distribution=self.distribution,
            **parts,
        )

    def update(self, batch: tuple[Any, Tensor, Tensor], rates: Any = None) -> float:
        """One gradient step on observations, actions and returns, [B, ...] each."""
        obs, action, returns = batch
        log_prob, _ = self.distribution.log_prob_and_entropy(self.logits(obs), action)
        loss = -(log_prob * (returns - returns.mean()) / (returns.std() + 1e-8)).mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return float(loss.detach())

    def state_dict(self) -> StateDict:
        generator = self.generator.get_state()
        return {"model": self.model.state_dict(), "adam": self.adam.state_dict(), "act": generator}

    def load_state_dict(self, state: StateDict) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.generator.set_state(state["act"])


class ReinforceTrainer:
    def __init__(
        self, agent: ReinforceAgent, envs: Envs, config: ReinforceConfig, context: RunContext
    ) -> None:
        self.agent, self.envs, self.config = agent, envs.parts, config
        self.env = envs.parts[0]
        self.first_seed = envs.first_seed
        self.progress = 0.0
        self.obs: Any = None
        self.stats, self.episodes = EpisodeStats(self.env.num_envs), EpisodeWindow()

    @property
    def iteration_steps(self) -> int:
        return self.config.iteration_steps(self.env.num_envs)

    def train_episode_vectorized(self, hold: Callable[[], None] = lambda: None) -> dict[str, Any]:
        if self.obs is None:
            self.obs, _ = self.env.reset(seed=self.first_seed)
        rows, ended = [], []
        for _ in range(self.config.n_steps):
            obs, action = np.array(self.obs), self.agent.act_batch(self.obs)
            self.obs, reward, terminated, truncated, infos = self.env.step(action)
            done = terminated | truncated
            ended += self.stats.step(reward, done, infos)
            rows.append((obs, action, np.array(reward), done))
        obs, action, reward, done = (np.stack(each) for each in zip(*rows, strict=True))
        returns, running = np.zeros_like(reward), np.zeros(self.env.num_envs)
        for t in range(len(reward) - 1, -1, -1):
            running = reward[t] + self.config.gamma * running * ~done[t]
            returns[t] = running
        hold()  # from here on the weights change
        flat = obs.reshape(-1, *obs.shape[2:]), torch.tensor(action).flatten()
        loss = self.agent.update((*flat, torch.tensor(returns, dtype=torch.float32).flatten()))
        return {"n_envs": self.env.num_envs, **self.episodes.add(ended), "loss/policy": loss}

    def state_dict(self) -> StateDict:
        return {"agent": self.agent.state_dict(), **self.episodes.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.agent.load_state_dict(state["agent"])
        self.episodes.load_state_dict(state)


REINFORCE = Algorithm(ReinforceConfig, ReinforceAgent, ReinforceTrainer)
