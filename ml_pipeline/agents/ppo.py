"""PPOAgent: an actor, a critic, and the clipped update that improves both.

``update`` is one gradient step; how many there are, and on which minibatches, is the trainer's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.agents.distributions import action_distribution
from ml_pipeline.agents.networks import init_orthogonal
from ml_pipeline.config import PPOConfig
from ml_pipeline.errors import UserError
from ml_pipeline.protocols import Minibatch, PolicySample, State
from ml_pipeline.seeding import stream_seed

NetworkBuilder = Callable[[gym.Space[Any]], nn.Module]


class ObservationSpaceError(UserError):
    """An observation space that the agent cannot read."""


class ActorCritic(nn.Module):
    """Two networks of the same build, one for the policy and one for the value."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        build_network: NetworkBuilder,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.distribution = action_distribution(action_space)
        self.actor = build_network(observation_space)
        self.critic = build_network(observation_space)
        self.policy_head = nn.Linear(_out_features(self.actor), self.distribution.n_outputs)
        self.value_head = nn.Linear(_out_features(self.critic), 1)
        init_orthogonal(self.actor, gain=math.sqrt(2.0), generator=generator)
        init_orthogonal(self.critic, gain=math.sqrt(2.0), generator=generator)
        init_orthogonal(self.policy_head, gain=0.01, generator=generator)
        init_orthogonal(self.value_head, gain=1.0, generator=generator)

    def policy(self, obs: Tensor) -> Tensor:
        """Outputs for the action distribution, [B, n_outputs]."""
        outputs: Tensor = self.policy_head(self.actor(obs))
        return outputs

    def value(self, obs: Tensor) -> Tensor:
        """Expected discounted return, [B]."""
        value: Tensor = self.value_head(self.critic(obs)).squeeze(-1)
        return value


class PPOAgent:
    """Proximal policy optimisation for Box observations and Discrete or Box actions."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        build_network: NetworkBuilder,
        config: PPOConfig,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        if not isinstance(observation_space, spaces.Box):
            raise ObservationSpaceError(
                f"PPO needs a Box observation space, this env has {observation_space}"
            )
        self.config = config
        self.device = device
        generator = torch.Generator().manual_seed(stream_seed(seed, "weights"))
        self.model = ActorCritic(observation_space, action_space, build_network, generator)
        self.model.to(device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=config.learning_rate, eps=1e-5
        )
        self._act_generator = torch.Generator().manual_seed(stream_seed(seed, "act"))

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for a rollout, [T, n_envs, ...], on the agent's device."""
        noise = self.model.distribution.draw_noise((n_steps, n_envs), generator)
        return noise.to(self.device)

    @torch.no_grad()
    def sample_batch(self, obs: Tensor, noise: Tensor) -> PolicySample:
        """Act on [n_envs, *obs] with noise [n_envs, ...]."""
        outputs = self.model.policy(obs)
        action = self.model.distribution.sample(outputs, noise)
        log_prob, _ = self.model.distribution.log_prob_and_entropy(outputs, action)
        return PolicySample(action, log_prob, self.model.value(obs))

    @torch.no_grad()
    def value_batch(self, obs: Tensor) -> Tensor:
        return self.model.value(obs)

    @torch.no_grad()
    def act_batch(self, obs: NDArray[Any], deterministic: bool = False) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], fit for ``env.step``."""
        outputs = self.model.policy(self.to_tensor(obs))
        distribution = self.model.distribution
        if deterministic:
            action = distribution.mode(outputs)
        else:
            noise = distribution.draw_noise((len(obs),), self._act_generator).to(self.device)
            action = distribution.sample(outputs, noise)
        return self.to_env_action(action)

    def to_tensor(self, obs: NDArray[Any]) -> Tensor:
        """A batch of observations on the device; float32, because MPS has no float64."""
        return torch.as_tensor(np.asarray(obs, dtype=np.float32), device=self.device)

    def to_env_action(self, action: Tensor) -> NDArray[Any]:
        """Sampled actions as the envs take them; what is scored stays unclipped."""
        return self.model.distribution.to_env(action.cpu().numpy())

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def update(self, batch: Minibatch) -> dict[str, Tensor]:
        """One gradient step on one minibatch; the metrics stay on the device."""
        config = self.config
        outputs = self.model.policy(batch.obs)
        log_prob, entropy = self.model.distribution.log_prob_and_entropy(outputs, batch.action)
        log_ratio = log_prob - batch.log_prob
        ratio = log_ratio.exp()
        advantage = normalised(batch.advantage)
        clipped = ratio.clamp(1.0 - config.clip_range, 1.0 + config.clip_range)
        policy_loss = -torch.min(advantage * ratio, advantage * clipped).mean()
        value_loss = 0.5 * (self.model.value(batch.obs) - batch.value_target).square().mean()
        mean_entropy = entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * mean_entropy

        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            return {
                "loss/policy": policy_loss.detach(),
                "loss/value": value_loss.detach(),
                "policy/entropy": mean_entropy.detach(),
                # Schulman's estimator: never negative, and less noisy than the mean log ratio.
                "policy/approx_kl": (ratio - 1.0 - log_ratio).mean(),
                "policy/clip_fraction": ((ratio - 1.0).abs() > config.clip_range).float().mean(),
                "loss/grad_norm": norm,
            }

    def state_dict(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "act_generator": self._act_generator.get_state(),
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        # Adam keeps the tensors it is given: without a copy two agents would share moments.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._act_generator.set_state(state["act_generator"])


def normalised(advantage: Tensor) -> Tensor:
    """Zero mean and unit variance over the minibatch."""
    centred = advantage - advantage.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


def _out_features(network: nn.Module) -> int:
    if not isinstance(getattr(network, "out_features", None), int):
        raise UserError(
            f"network {type(network).__name__} has no out_features; set it in its constructor "
            "to the size of what forward returns"
        )
    return int(network.out_features)  # type: ignore[arg-type]
