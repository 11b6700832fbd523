"""SACAgent: a stochastic actor, two critics, and a temperature that keeps the actor random.

``critic_loss``, ``actor_loss`` and the temperature's loss are the algorithm (Haarnoja et al.,
2018). Box actions only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.agents.adam import FlatAdam, flat_parameters
from ml_pipeline.agents.distributions import ActionSpaceError
from ml_pipeline.agents.masks import ActionMasks, Mask
from ml_pipeline.agents.networks import MLP, out_features
from ml_pipeline.agents.observations import ObservationReader, Preprocess
from ml_pipeline.agents.policy import GreedyPolicy
from ml_pipeline.agents.recurrent import refuse_recurrent
from ml_pipeline.agents.space_data import check_spaces, space_to_data
from ml_pipeline.agents.squashed import SquashedPolicy
from ml_pipeline.config.sac import SACConfig
from ml_pipeline.protocols import (
    NetworkBuilder,
    Obs,
    Place,
    PolicyInput,
    PolicySample,
    ReplayBatch,
    Spaces,
    StateDict,
)
from ml_pipeline.seeding import stream_seed


class SACRates(NamedTuple):
    """The annealed settings at their current values."""

    learning_rate: float


class SACResult(NamedTuple):
    """Metrics of one gradient step, 0-d tensors."""

    critic_loss: Tensor
    actor_loss: Tensor
    q: Tensor  # mean value of the actions in the batch
    entropy: Tensor  # mean -log_prob of new actions
    temperature: Tensor
    finite: Tensor  # False if a loss or a gradient was not finite; such a step changes nothing


def critic_loss(values: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Squared error of both critics, [2, B], to the same target, [B]."""
    return 0.5 * (weight * (values - target).square()).mean(dim=1).sum()


def actor_loss(values: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """New actions should have a high value and a high entropy; ``values`` are [2, B]."""
    return (temperature * log_prob - values.amin(dim=0)).mean()


class Critic(nn.Module):
    """The value of an action: a network over observation and action, and a linear head.

    For images and Dict observations, the action joins the features of the network instead.
    """

    def __init__(
        self, observation_space: gym.Space[Any], n_actions: int, build_network: NetworkBuilder
    ) -> None:
        super().__init__()
        shape = observation_space.shape
        self.joins_input = isinstance(observation_space, spaces.Box) and len(shape or ()) == 1
        if self.joins_input:
            size = int(np.prod(shape or ())) + n_actions
            joint: Any = spaces.Box(-np.inf, np.inf, (size,))
            self.trunk = build_network(joint)
            self.head: nn.Module = nn.Linear(out_features(self.trunk), 1)
        else:
            self.trunk = build_network(observation_space)
            joint = spaces.Box(-np.inf, np.inf, (out_features(self.trunk) + n_actions,))
            mixer = MLP(joint, hidden_sizes=(256,), activation="relu")
            self.head = nn.Sequential(mixer, nn.Linear(mixer.out_features, 1))

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        """[B]"""
        if self.joins_input and isinstance(obs, Tensor):
            features = self.trunk(torch.cat([obs, action], dim=-1))
        else:
            features = torch.cat([self.trunk(obs), action], dim=-1)
        value: Tensor = self.head(features)
        return value.squeeze(-1)


class Critics(nn.ModuleList):
    """Two critics; their minimum is less optimistic than either."""

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        """[2, B]"""
        return torch.stack([critic(obs, action) for critic in self])


class Actor(nn.Module):
    """A network and a head for means and log deviations."""

    def __init__(self, trunk: nn.Module, n_outputs: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(out_features(trunk), n_outputs)

    def forward(self, obs: Obs) -> Tensor:
        outputs: Tensor = self.head(self.trunk(obs))
        return outputs


class Temperature(nn.Module):
    """The weight of the entropy, as its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial) if initial > 0 else -math.inf))

    def forward(self) -> Tensor:
        return self.log.exp()


class SACAgent:
    """Soft actor-critic with two critics and a learned temperature."""

    memory_size = 0  # not recurrent
    metric_names: ClassVar[dict[str, str]] = {  # field of SACResult -> name in the log
        "critic_loss": "loss/value",
        "actor_loss": "loss/policy",
        "q": "value/mean",
        "entropy": "policy/entropy",
        "temperature": "policy/temperature",
    }

    def __init__(
        self, env_spaces: Spaces, build_network: NetworkBuilder, config: SACConfig, place: Place
    ) -> None:
        if not isinstance(env_spaces.action, spaces.Box):
            raise ActionSpaceError(
                f"agent=sac: action space {env_spaces.action} is not a Box; use agent=dqn"
            )
        self.config = config
        self.device = place.device
        self.spaces = {
            "observation_space": env_spaces.observation,
            "action_space": env_spaces.action,
        }
        self.reader = ObservationReader(env_spaces.observation)
        self.distribution = SquashedPolicy(env_spaces.action).to(self.device)
        self.masks = ActionMasks("none", self.reader, self.distribution)
        clip = config.clip_obs if config.normalize_obs else None
        self.preprocess = Preprocess(self.reader, ignored=None, clip=clip).to(self.device)
        space, n_actions = self.preprocess.space, self.distribution.n_actions
        # Layers draw their first weights from torch's global generator, so seed it here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(place.seed, "weights"))
            actor = Actor(refuse_recurrent(build_network(space)), self.distribution.n_outputs)
            critics = Critics([Critic(space, n_actions, build_network) for _ in range(2)])
        if config.critic_layer_norm:
            _add_layer_norm(critics)
        self.actor = actor.to(self.device).eval()
        self.critics = critics.to(self.device).eval()
        self.targets = deepcopy(self.critics).requires_grad_(False)
        fixed = config.temperature
        self.temperature = Temperature(config.temperature_init if fixed is None else fixed)
        self.temperature.to(self.device)
        target = config.target_entropy
        self.target_entropy = -float(n_actions) if target is None else target
        norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
        self.adams = {
            name: FlatAdam(module, eps=config.adam_eps, max_grad_norm=norm)
            for name, module in (
                ("actor", self.actor),
                ("critics", self.critics),
                ("temperature", self.temperature),
            )
        }
        self._target_values = flat_parameters(self.targets)
        self._parameters = {
            "actor": list(self.actor.parameters()),
            "critics": list(self.critics.parameters()),
        }
        self.n_updates = 0
        self._act_generator = torch.Generator().manual_seed(stream_seed(place.seed, "act"))
        self.update_generator = torch.Generator(self.device).manual_seed(
            stream_seed(place.seed, "update noise")
        )
        self._last_actor = torch.zeros(2, device=self.device)  # loss and entropy

    def rates(self, progress: float, learning_rate: float) -> SACRates:
        return SACRates(learning_rate)

    def inputs(
        self,
        leaves: dict[str, NDArray[Any]],
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
        episode_start: Tensor | None = None,
    ) -> PolicyInput:
        """Arrays as the reader returns them, moved to the agent's device."""
        return PolicyInput(self.reader.to_tensors(leaves, self.device), None, None, None)

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Normal noise, [n_steps, n_envs, n_actions], on the agent's device."""
        return self.distribution.draw_noise(n_steps, n_envs, generator).to(self.device)

    @torch.no_grad()
    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: SACRates, *, is_random: bool
    ) -> PolicySample:
        """Actions for training; ``is_random``: spread evenly over the bounds."""
        if is_random:
            return PolicySample(self.distribution.uniform(noise), None)
        outputs = self.actor(self.preprocess(inputs.obs))
        return PolicySample(self.distribution.sample(outputs, noise), None)

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act], ready for ``env.step``."""
        leaves = self.reader.read(obs)
        inputs = self.inputs(leaves)
        outputs = self.actor(self.preprocess(inputs.obs))
        noise = None
        if not deterministic:
            noise = self.draw_noise(1, len(outputs), self._act_generator)[0]
        return self.distribution.chosen(outputs, noise)

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, Any]) -> None:
        return None

    def for_playing(self) -> SACAgent:
        return self

    def greedy(self) -> GreedyPolicy:
        return GreedyPolicy(
            self.reader,
            self.masks,
            preprocess=self.preprocess,
            trunk=self.actor.trunk,
            head=self.actor.head,
            distribution=self.distribution,
        )

    def update(self, batch: ReplayBatch, rates: SACRates) -> SACResult:
        """One gradient step of the critics, and of actor and temperature if it is their turn."""
        return self.gradient_step(batch, rates, self.begin_update())

    def begin_update(self) -> bool:
        """Count an update; returns whether it is the turn of actor and temperature."""
        self.n_updates += 1
        return self.n_updates % self.config.policy_delay == 0

    def gradient_step(self, batch: ReplayBatch, rates: SACRates, trains_actor: bool) -> SACResult:
        """Only tensors change, so that a graph can be captured for each ``trains_actor``."""
        obs = self.preprocess(batch.inputs.obs)
        target = self._target(batch)
        values = self.critics(obs, batch.action)
        loss = critic_loss(values, target, batch.weight)
        finite = self._step("critics", loss, rates)
        if trains_actor:
            finite = self._update_actor(obs, rates) & finite
        self._target_values.lerp_(self.adams["critics"].values, self.config.tau)
        actor, entropy = self._last_actor.clone()
        alpha = self.temperature().detach()
        return SACResult(loss.detach(), actor, values.detach().mean(), entropy, alpha, finite)

    @torch.no_grad()
    def _target(self, batch: ReplayBatch) -> Tensor:
        """The soft value of the action taken, [B]."""
        obs = self.preprocess(batch.next_inputs.obs)
        action, log_prob = self._new_actions(obs)
        values: Tensor = self.targets(obs, action).amin(dim=0) - self.temperature() * log_prob
        return batch.reward + batch.discount * values

    def _new_actions(self, obs: Obs) -> tuple[Tensor, Tensor]:
        outputs = self.actor(obs)
        shape = (len(outputs), self.distribution.n_actions)
        noise = torch.randn(shape, generator=self.update_generator, device=self.device)
        return self.distribution.sample_and_log_prob(outputs, noise)

    def _update_actor(self, obs: Obs, rates: SACRates) -> Tensor:
        action, log_prob = self._new_actions(obs)
        alpha = self.temperature().detach()
        loss = actor_loss(self.critics(obs, action), log_prob, alpha)
        finite = self._step("actor", loss, rates)
        entropy = -log_prob.detach().mean()
        if self.config.temperature is None:
            # Below the target entropy, the temperature rises.
            gap = self.temperature.log * (entropy - self.target_entropy)
            finite = self._step("temperature", gap, rates) & finite
        self._last_actor.copy_(torch.stack([loss.detach(), entropy]))
        return finite

    def _step(self, name: str, loss: Tensor, rates: SACRates) -> Tensor:
        adam = self.adams[name]
        adam.grad.zero_()
        # Only these parameters: the actor's loss must not train the critics.
        torch.autograd.backward(loss, inputs=self._parameters.get(name))
        return adam.quick_step(rates.learning_rate, loss.detach())[1]

    def learn_moments(self, obs: Obs) -> None:
        """Add observations [N, ...] to the running normalisation."""
        if self.config.normalize_obs:
            self.preprocess.learn_moments(obs)

    def state_dict(self) -> StateDict:
        parts = {name: getattr(self, name).state_dict() for name in _PARTS}
        return {
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            **parts,
            "adams": {name: adam.state_dict() for name, adam in self.adams.items()},
            "n_updates": self.n_updates,
            "last_actor": list(self._last_actor.clone()),
            "act_generator": self._act_generator.get_state(),
            "update_generator": self.update_generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name, adam in self.adams.items():
            adam.load_state_dict(state["adams"][name])
        self.n_updates = state["n_updates"]
        self._last_actor.copy_(torch.stack(state["last_actor"]))
        self._act_generator.set_state(state["act_generator"])
        self.update_generator.set_state(state["update_generator"])


_PARTS = ("actor", "critics", "targets", "temperature", "preprocess")


def _add_layer_norm(module: nn.Module) -> None:
    """Normalise the output of every linear layer except the last, which gives the value."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and child.out_features > 1:
            norm = nn.LayerNorm(child.out_features)
            setattr(module, name, nn.Sequential(child, norm))
        else:
            _add_layer_norm(child)
