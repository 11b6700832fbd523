"""PQN: Q-learning from rollouts of many envs (Gallici et al., 2024).

It needs neither replay nor a target network: many envs make each batch diverse, and LayerNorm in
the network keeps the values stable. Here Adam takes the place of the paper's RAdam.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.config.agent import AgentConfig
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.distributions import FORBIDDEN, ActionSpaceError, Categorical
from ml_pipeline.policy.masks import ActionMasks, Mask, find_mask_leaf
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observations import ObservationReader, Preprocess
from ml_pipeline.policy.optimiser import FlatAdam
from ml_pipeline.policy.recurrent import refuse_recurrent
from ml_pipeline.policy.space_data import check_spaces, space_to_data
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunContext


@dataclass
class PQNConfig(AgentConfig):
    """Hyperparameters of PQN; conf/agent/pqn.yaml and experiments hold what differs."""

    algorithm: str = "ml_pipeline.algorithms.pqn.trainer.PQN"
    action_mask: str = "auto"
    learning_rate: float = 1e-3
    # constant | linear | cosine (both to 0 at total_steps) | your.function
    learning_rate_schedule: str = "linear"
    adam_eps: float = 1e-8
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    td_lambda: float = 0.95  # 0: each target is one step long; 1: it is the rest of the rollout
    n_steps: int = 32  # steps per env and rollout
    n_epochs: int = 4  # passes over each rollout
    n_minibatches: int = 8  # parts of a rollout
    epsilon_start: float = 1.0  # share of random actions
    epsilon_end: float = 0.05
    epsilon_share: float = 0.2  # share of the run in which epsilon falls to epsilon_end

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adam_eps", "max_grad_norm"):
            self._check(0 < getattr(self, name) < math.inf, name, "positive and finite")
        for name in ("n_steps", "n_epochs", "n_minibatches"):
            self._check(getattr(self, name) >= 1, name, "at least 1")
        for name in ("gamma", "td_lambda", "epsilon_start", "epsilon_end", "epsilon_share"):
            self._check(0 <= getattr(self, name) <= 1, name, "between 0 and 1")
        self._check_schedule("learning_rate_schedule")

    def iteration_steps(self, n_envs: int) -> int:
        return self.n_steps * n_envs

    def why_not(self, n_envs: int, *, recurrent: bool = False) -> str | None:
        if self.n_steps * n_envs >= self.n_minibatches:
            return None
        return (
            f"agent.n_minibatches={self.n_minibatches}: a rollout has only agent.n_steps="
            f"{self.n_steps} x n_envs={n_envs} transitions"
        )

    def why_not_double(self) -> str | None:
        return "PQN collects in one vector env"

    def epsilon(self, progress: float) -> float:
        """Share of random actions at ``progress`` (0 to 1) through the run."""
        share = 1.0 if self.epsilon_share == 0 else min(progress / self.epsilon_share, 1.0)
        return self.epsilon_start + share * (self.epsilon_end - self.epsilon_start)


class PQNBatch(NamedTuple):
    """A minibatch of a rollout."""

    inputs: PolicyInput
    action: Tensor  # [B]
    target: Tensor  # [B], lambda returns


class PQNResult(NamedTuple):
    """Metrics of one gradient step, numbers or 0-d tensors."""

    loss: float | Tensor
    q: float | Tensor  # mean value of the actions in the batch
    grad_norm: float | Tensor
    finite: bool | Tensor  # False if loss or gradient was not finite; such a step changes nothing


class PQNAgent:
    """Learns the value of each action, and plays the best one."""

    memory_size = 0  # not recurrent
    takes_arrays = False

    def __init__(
        self, env: Spaces, build_network: NetworkBuilder, config: PQNConfig, context: RunContext
    ) -> None:
        if not isinstance(env.action, spaces.Discrete):
            raise ActionSpaceError(
                f"agent=pqn: action space {env.action} is not Discrete; use agent=ppo"
            )
        self.config = config
        self.device = context.device
        self.spaces = {"observation_space": env.observation, "action_space": env.action}
        self.reader = ObservationReader(env.observation)
        self.inputs = partial(self.reader.policy_input, device=self.device)
        self.distribution = Categorical(env.action)
        mask_leaf = find_mask_leaf(config.action_mask, self.reader)
        self.masks = ActionMasks(config.action_mask, self.reader, self.distribution)
        preprocess = Preprocess(self.reader, ignored=mask_leaf, clip=None)
        self.preprocess = preprocess.to(self.device)
        # Layers draw their first weights from torch's global generator.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(context.seed, "weights"))
            trunk = refuse_recurrent(build_network(self.preprocess.space))
            head = nn.Linear(out_features(trunk), self.distribution.n_outputs)
        if not any(isinstance(part, nn.LayerNorm) for part in trunk.modules()):
            context.programs.tell(
                "the network has no LayerNorm, which PQN needs to be stable; with vectors, use "
                "network=mlp network.layer_norm=true"
            )
        self.model = nn.ModuleDict({"trunk": trunk, "head": head}).to(self.device).eval()
        self.adam = FlatAdam(self.model, eps=config.adam_eps, max_grad_norm=config.max_grad_norm)
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "act"))

    def values(self, inputs: PolicyInput) -> Tensor:
        """[B, n_actions]; very low for forbidden actions."""
        values: Tensor = self.model["head"](self.model["trunk"](self.preprocess(inputs.obs)))
        if inputs.action_mask is not None:
            values = values.masked_fill(~inputs.action_mask, FORBIDDEN)
        return values

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Uniform numbers, [n_steps, n_envs, 2], on the agent's device."""
        return torch.rand(n_steps, n_envs, 2, generator=generator).to(self.device)

    @torch.no_grad()
    def explore(self, inputs: PolicyInput, noise: Tensor, epsilon: float) -> PolicySample:
        """The best action in each env, or with probability ``epsilon`` a random allowed one."""
        values = self.values(inputs)
        equal = torch.where(values > 0.5 * FORBIDDEN, 0.0, FORBIDDEN)
        drawn = self.distribution.sample(equal, noise[:, 1])
        best = self.distribution.mode(values)
        return PolicySample(torch.where(noise[:, 0] < epsilon, drawn, best), None)

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[Any]:
        """[n_envs, *obs] -> [n_envs]; not deterministic: explores with ``epsilon_end``."""
        leaves = self.reader.read(obs)
        n_envs = len(next(iter(leaves.values())))
        if n_envs == 0:
            return self.distribution.no_actions()
        inputs = self.inputs(leaves, self.masks.in_call(leaves, action_mask))
        noise = self.draw_noise(1, n_envs, self._generator)[0]
        epsilon = 0.0 if deterministic else self.config.epsilon_end
        return self.distribution.to_env(self.explore(inputs, noise, epsilon).action.cpu().numpy())

    def update(self, batch: PQNBatch, rates: float) -> PQNResult:
        """One gradient step; ``rates`` is the learning rate."""
        self.model.train()
        values = self.values(batch.inputs)
        self.model.eval()
        chosen = values.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = 0.5 * (chosen - batch.target).square().mean()
        self.adam.grad.zero_()
        torch.autograd.backward(loss)
        loss = loss.detach()
        return PQNResult(loss, chosen.detach().mean(), *self.adam.quick_step(rates, loss))

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, Any]) -> Mask | None:
        """The masks in a vector env's infos, or None if this policy does not read them there."""
        return self.masks.of_infos(infos)

    def for_playing(self) -> PQNAgent:
        return self

    def greedy(self) -> GreedyPolicy:
        return GreedyPolicy(
            self.reader,
            self.masks,
            preprocess=self.preprocess,
            trunk=self.model["trunk"],
            head=self.model["head"],
            distribution=self.distribution,
        )

    def state_dict(self) -> StateDict:
        return {
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "act_generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self._generator.set_state(state["act_generator"])
