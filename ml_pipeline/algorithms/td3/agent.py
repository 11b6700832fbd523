"""TD3: a deterministic actor, two critics, and targets that smooth both (Fujimoto et al., 2018)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline.algorithms.replay.agent import LearningRate, ReplayAgent
from ml_pipeline.algorithms.replay.algorithm import replay_algorithm
from ml_pipeline.algorithms.replay.config import OffPolicyConfig
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.networks import Actor, Critic, Critics
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.distributions import ActionSpaceError, ScaledBox
from ml_pipeline.policy.optimiser import flat_parameters
from ml_pipeline.training.contracts import RunContext


@dataclass
class TD3Config(OffPolicyConfig):
    """Hyperparameters of TD3Agent, on top of those of every agent with replay."""

    algorithm: str = "ml_pipeline.algorithms.td3.agent.TD3"
    buffer_size: float = 1_000_000
    learning_rate: float = 1e-3
    tau: float = 0.005  # share of the networks that moves into their targets per actor update
    policy_delay: int = 2  # critic updates per update of the actor
    exploration_noise: float = 0.1  # standard deviation, for actions in [-1, 1]
    target_noise: float = 0.2  # of the next actions in the critics' target
    target_noise_clip: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(0 < self.tau <= 1, "tau", "above 0 and at most 1")
        self._check(self.policy_delay >= 1, "policy_delay", "at least 1")
        for name in ("exploration_noise", "target_noise", "target_noise_clip"):
            self._check(getattr(self, name) >= 0, name, "at least 0")


class TD3Result(NamedTuple):
    """Metrics of one gradient step."""

    critic_loss: Tensor
    actor_loss: Tensor  # of the last update of the actor
    q: Tensor  # mean value of the actions in the batch
    finite: bool | Tensor


class NoisyTanh(ScaledBox):
    """Actions tanh(outputs) in [-1, 1]; exploring adds Gaussian noise."""

    def __init__(self, space: spaces.Box, noise: float) -> None:
        super().__init__(space, key="agent=td3")
        self._noise = noise

    def noise_shape(self, n_steps: int, n_envs: int) -> tuple[int, ...]:
        return n_steps, n_envs, self.n_outputs

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (outputs.tanh() + self._noise * noise).clamp(-1.0, 1.0)

    def mode(self, outputs: Tensor) -> Tensor:
        return outputs.tanh()

    def log_prob_and_entropy(self, outputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        raise ActionSpaceError("the policy of TD3 is deterministic and has no density")


class TD3Agent(ReplayAgent[TD3Config, LearningRate, TD3Result]):
    """Twin delayed deep deterministic policy gradient."""

    draws_in_updates = True
    metric_names: ClassVar[dict[str, str]] = {
        "critic_loss": "loss/value",
        "actor_loss": "loss/policy",
        "q": "value/mean",
    }

    def __init__(
        self, env: Spaces, build_network: NetworkBuilder, config: TD3Config, context: RunContext
    ) -> None:
        super().__init__(env, config, context)
        self.turn_every = config.policy_delay
        if not isinstance(env.action, spaces.Box):
            raise ActionSpaceError(f"agent=td3: action space {env.action} is not a Box")
        self.distribution = NoisyTanh(env.action, config.exploration_noise)
        space, n_actions = self.preprocess.space, self.distribution.n_outputs
        with self.first_weights():
            actor = Actor(build_network(space), self.distribution)
            critics = Critics([Critic(space, n_actions, build_network) for _ in range(2)])
        self.actor = actor.to(self.device).eval()
        self.critics = critics.to(self.device).eval()
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.adams = {"actor": self.new_adam(self.actor), "critics": self.new_adam(self.critics)}
        self._targets = {
            "actor": flat_parameters(self.target_actor),
            "critics": flat_parameters(self.target_critics),
        }
        names = ("actor", "critics", "target_actor", "target_critics", "preprocess")
        self.parts = {name: getattr(self, name) for name in names}
        self.kept = {"actor_loss": torch.zeros((), device=self.device)}

    def outputs(self, inputs: PolicyInput) -> Tensor:
        outputs: Tensor = self.actor(self.preprocess(inputs.obs), None)
        return outputs

    @torch.no_grad()
    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: LearningRate, *, is_random: bool
    ) -> PolicySample:
        if is_random:  # uniform over the bounds
            return PolicySample(torch.erf(noise * 0.5**0.5), None)
        return PolicySample(self.distribution.sample(self.outputs(inputs), noise), None)

    def gradient_step(self, batch: ReplayBatch, rates: LearningRate, is_turn: bool) -> TD3Result:
        obs = self.preprocess(batch.inputs.obs)
        values = self.critics(obs, batch.action)
        errors = (batch.weight * (values - self._target(batch)).square()).mean(dim=1)
        finite = self.step("critics", errors.sum(), rates)
        if is_turn:
            loss = -self.critics[0](obs, self.actor(obs, None).tanh()).mean()
            finite = self.step("actor", loss, rates) & finite
            self.keep("actor_loss", loss)
            for name, target in self._targets.items():
                target.lerp_(self.adams[name].values, self.config.tau)
        last, q = self.kept["actor_loss"].clone(), values.detach().mean()
        return TD3Result(errors.detach().sum(), last, q, finite)

    @torch.no_grad()
    def _target(self, batch: ReplayBatch) -> Tensor:
        """What both critics should predict, [B]: the lower value of a smoothed next action."""
        obs, limit = self.preprocess(batch.next_inputs.obs), self.config.target_noise_clip
        noise = self.config.target_noise * self.update_noise.draw(*batch.action.shape)
        action = self.target_actor(obs, None).tanh() + noise.clamp(-limit, limit)
        value: Tensor = self.target_critics(obs, action.clamp(-1.0, 1.0)).amin(dim=0)
        return batch.reward + batch.discount * value

    def greedy(self) -> GreedyPolicy:
        return self.policy_of(self.actor.trunk, self.actor.head)


TD3 = replay_algorithm(TD3Config, TD3Agent)
