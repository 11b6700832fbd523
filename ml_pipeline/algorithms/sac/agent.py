"""SACAgent: a stochastic actor, two critics, and a temperature that keeps the actor random.

``critic_loss``, ``actor_loss`` and the temperature's loss are the algorithm (Haarnoja et al.,
2018). ``soft_actions`` knows how Box actions differ from discrete ones.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ml_pipeline.algorithms.replay.agent import LearningRate, ReplayAgent
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.networks import Actor, Critics, add_layer_norm
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.sac.fast.mlp_sac import MIRRORED, MlpBatch, MlpSAC
from ml_pipeline.algorithms.sac.soft_actions import SoftValue, SquashedPolicy, soft_actions
from ml_pipeline.mirrors import why_not
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.optimiser import flat_parameters
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import RunContext


class SACResult(NamedTuple):
    """Metrics of one gradient step, 0-d tensors."""

    critic_loss: Tensor
    actor_loss: Tensor
    q: Tensor  # mean value of the actions in the batch
    entropy: Tensor  # of the actor; for a Box, the mean -log_prob of new actions
    temperature: Tensor
    finite: bool | Tensor  # False: a loss or gradient was not finite, and nothing changed


def critic_loss(values: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Squared error of both critics, [2, B], to the same target, [B]."""
    return 0.5 * (weight * (values - target).square()).mean(dim=1).sum()


def actor_loss(soft: SoftValue, temperature: Tensor) -> Tensor:
    """The actor's actions should have a high value and a high entropy."""
    return (temperature * soft.log_prob - soft.value).mean()


def soft_target(
    reward: Tensor, discount: Tensor, following: SoftValue, temperature: Tensor
) -> Tensor:
    """What the critics should predict, [B]; ``following`` is the state after the window."""
    return reward + discount * (following.value - temperature * following.log_prob)


class Temperature(nn.Module):
    """The weight of the entropy, as its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial) if initial > 0 else -math.inf))

    def forward(self) -> Tensor:
        return self.log.exp()


class SACAgent(ReplayAgent[SACConfig, LearningRate, SACResult]):
    """Soft actor-critic with two critics and a learned temperature."""

    draws_in_updates = True
    metric_names: ClassVar[dict[str, str]] = {  # field of SACResult -> name in the log
        "critic_loss": "loss/value",
        "actor_loss": "loss/policy",
        "q": "value/mean",
        "entropy": "policy/entropy",
        "temperature": "policy/temperature",
    }

    def __init__(
        self,
        env_spaces: Spaces,
        build_network: NetworkBuilder,
        config: SACConfig,
        context: RunContext,
    ) -> None:
        super().__init__(env_spaces, config, context)
        self.turn_every = config.policy_delay
        space = self.preprocess.space
        with self.first_weights():
            trunk = build_network(space)
            self.actions = soft_actions(env_spaces.action, out_features(trunk), config)
            actor = Actor(trunk, self.actions.distribution)
            critics = Critics([self.actions.new_critic(space, build_network) for _ in range(2)])
        self.distribution = self.actions.distribution
        if config.critic_layer_norm:
            add_layer_norm(critics)
        self.actor = actor.to(self.device).eval()
        self.critics = critics.to(self.device).eval()
        self.targets = deepcopy(self.critics).requires_grad_(False)
        fixed = config.temperature
        self.temperature = Temperature(config.temperature_init if fixed is None else fixed)
        self.temperature.to(self.device)
        self.adams = {
            "actor": self.new_adam(self.actor),
            "critics": self.new_adam(self.critics),
            "temperature": self.new_adam(self.temperature),
        }
        self.target_values = flat_parameters(self.targets)
        self.kept = {"last_actor": torch.zeros(2, device=self.device)}  # loss and entropy
        if isinstance(self.distribution, SquashedPolicy):
            self.kept["log_volume"] = self.distribution.log_volume
        self.fast: MlpSAC | None = None
        if config.fast == "auto" and MlpSAC.covers(self.actor, self.critics, self.preprocess):
            last_actor = self.kept["last_actor"]
            parts = self.actor, self.critics, self.adams, self.target_values, last_actor
            target = cast("float", self.target_entropy(None))
            self.fast = MlpSAC(*parts, config, context.programs, target_entropy=target)
        self.leave_changed_fast()
        self.parts = {
            "actor": self.actor,
            "critics": self.critics,
            "targets": self.targets,
            "temperature": self.temperature,
            "preprocess": self.preprocess,
        }

    @torch.no_grad()
    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: LearningRate, *, is_random: bool
    ) -> PolicySample:
        """Actions for training; ``is_random``: all with the same probability."""
        if is_random:
            return PolicySample(self.actions.random(noise, inputs.action_mask), None)
        return PolicySample(self.distribution.sample(self.outputs(inputs), noise), None)

    def outputs(self, inputs: PolicyInput) -> Tensor:
        outputs: Tensor = self.actor(self.preprocess(inputs.obs), inputs.action_mask)
        return outputs

    def greedy(self) -> GreedyPolicy:
        return self.policy_of(self.actor.trunk, self.actor.head)

    def gradient_step(self, batch: ReplayBatch, rates: LearningRate, is_turn: bool) -> SACResult:
        """``is_turn``: actor and temperature learn too."""
        step = self.plain_step if self.fast is None else self._fast_step
        return step(batch, rates, is_turn)

    def plain_step(self, batch: ReplayBatch, rates: LearningRate, trains_actor: bool) -> SACResult:
        """The step in plain torch."""
        obs, mask = self.preprocess(batch.inputs.obs), batch.inputs.action_mask
        target = self._target(batch)
        values = self.actions.taken(self.critics, obs, batch.action)
        loss = critic_loss(values, target, batch.weight)
        finite = self.step("critics", loss, rates)
        if trains_actor:
            finite = self._update_actor(obs, mask, rates) & finite
        self.target_values.lerp_(self.adams["critics"].values, self.config.tau)
        actor, entropy = self.kept["last_actor"].clone()
        alpha = self.temperature().detach()
        return SACResult(loss.detach(), actor, values.detach().mean(), entropy, alpha, finite)

    @torch.no_grad()
    def _fast_step(self, batch: ReplayBatch, rates: LearningRate, trains_actor: bool) -> SACResult:
        fast = cast("MlpSAC", self.fast)
        inputs = [self.preprocess(each.obs) for each in (batch.inputs, batch.next_inputs)]
        obs, next_obs = (cast("Tensor", each).flatten(1) for each in inputs)
        read = (obs, batch.action, next_obs, batch.reward, batch.discount, batch.weight)
        noise = self.update_noise.draw(*batch.action.shape)
        actor_noise = self.update_noise.draw(*batch.action.shape) if trains_actor else None
        return SACResult(*fast.step(MlpBatch(*read, noise, actor_noise), rates.learning_rate))

    def leave_changed_fast(self) -> None:
        if self.fast is None:
            return
        modules = self.actor, self.critics, self.temperature, self.preprocess
        parts = [part for module in modules for part in module.modules()]
        reason = why_not(
            MIRRORED, self, self.actions, self.update_noise, *parts, *self.adams.values()
        )
        if reason is None and not MlpSAC.covers(self.actor, self.critics, self.preprocess):
            reason = "a network has changed"
        if reason is not None:
            self._remark = f"plain torch runs instead of MlpSAC: {reason}"
            self.fast = None

    @torch.no_grad()
    def _target(self, batch: ReplayBatch) -> Tensor:
        """The soft value of the action taken, [B]."""
        obs, mask = self.preprocess(batch.next_inputs.obs), batch.next_inputs.action_mask
        following = self._soft_value(self.targets, obs, mask)
        return soft_target(batch.reward, batch.discount, following, self.temperature())

    def _soft_value(self, critics: Critics, obs: Obs, mask: Tensor | None) -> SoftValue:
        return self.actions.soft_value(critics, obs, self.actor(obs, mask), self.update_noise)

    def _update_actor(self, obs: Obs, mask: Tensor | None, rates: LearningRate) -> bool | Tensor:
        soft = self._soft_value(self.critics, obs, mask)
        loss = actor_loss(soft, self.temperature().detach())
        finite = self.step("actor", loss, rates)
        entropy = -soft.log_prob.detach().mean()
        if self.config.temperature is None:
            # Below the target entropy, the temperature rises.
            gap = self.temperature.log * (entropy - self.target_entropy(mask))
            finite = self.step("temperature", gap, rates) & finite
        self.keep("last_actor", torch.stack([loss.detach(), entropy]))
        return finite

    def target_entropy(self, mask: Tensor | None) -> float | Tensor:
        """The entropy that a learned temperature aims for; ``mask`` [B, n] of discrete actions."""
        given = self.config.target_entropy
        return self.actions.target_entropy(mask) if given is None else given

    def join(self, world: World) -> None:
        super().join(world)
        if self.device.type != "cpu":
            self.fast = None  # its compiled step cannot average gradients

    def load_state_dict(self, state: StateDict) -> None:
        if "last_actor" in state:  # of earlier versions
            state = {**state, "kept": {"last_actor": torch.stack(state["last_actor"])}}
        if isinstance(self.distribution, SquashedPolicy) and "log_volume" not in state["kept"]:
            # Earlier versions computed log-probabilities in the units of the env; so does this run.
            log_volume = torch.tensor(self.distribution.scale.log_volume)
            state = {**state, "kept": {**state["kept"], "log_volume": log_volume}}
        super().load_state_dict(state)
