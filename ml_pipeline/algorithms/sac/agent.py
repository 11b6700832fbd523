"""SACAgent: a stochastic actor, two critics, and a temperature that keeps the actor random.

``critic_loss``, ``actor_loss`` and the temperature's loss are the algorithm (Haarnoja et al.,
2018). ``soft_actions`` knows how Box actions differ from discrete ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.replay.contracts import BatchPart, ReplayBatch
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.algorithms.sac.fast.mlp_sac import MIRRORED, MlpBatch, MlpSAC
from ml_pipeline.algorithms.sac.networks import Actor, Critics, Temperature, add_layer_norm
from ml_pipeline.algorithms.sac.soft_actions import SoftValue, soft_actions
from ml_pipeline.algorithms.sac.update_noise import UpdateNoise
from ml_pipeline.mirrors import why_not
from ml_pipeline.policy.acting_noise import ActingNoise
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.masks import Mask
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observation_input import Senses
from ml_pipeline.policy.optimiser import FlatAdam, flat_parameters
from ml_pipeline.policy.recurrent import refuse_recurrent
from ml_pipeline.policy.space_data import check_spaces, space_to_data
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import set_generator_state, stream_seed
from ml_pipeline.training.contracts import Place


class SACRates(NamedTuple):
    """The annealed settings at their current values."""

    learning_rate: float


class SACResult(NamedTuple):
    """Metrics of one gradient step, 0-d tensors."""

    critic_loss: Tensor
    actor_loss: Tensor
    q: Tensor  # mean value of the actions in the batch
    entropy: Tensor  # of the actor; for a Box, the mean -log_prob of new actions
    temperature: Tensor
    finite: Any  # False if a loss or a gradient was not finite; such a step changes nothing


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


class SACAgent:
    """Soft actor-critic with two critics and a learned temperature."""

    memory_size = 0  # not recurrent
    takes_arrays = False
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
        self.config = config
        self.device = place.device
        self.spaces = {
            "observation_space": env_spaces.observation,
            "action_space": env_spaces.action,
        }
        senses = Senses(env_spaces.observation, config, self.device)
        self.reader, self.preprocess, self.inputs = senses.reader, senses.preprocess, senses.inputs
        space = self.preprocess.space
        # Layers draw their first weights from torch's global generator, so seed it here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(place.seed, "weights"))
            trunk = refuse_recurrent(build_network(space))
            self.actions = soft_actions(env_spaces.action, out_features(trunk), config)
            actor = Actor(trunk, self.actions.distribution)
            critics = Critics([self.actions.new_critic(space, build_network) for _ in range(2)])
        self.distribution = self.actions.distribution
        self.masks = senses.masks(self.distribution)
        if config.critic_layer_norm:
            add_layer_norm(critics)
        self.actor = actor.to(self.device).eval()
        self.critics = critics.to(self.device).eval()
        self.targets = deepcopy(self.critics).requires_grad_(False)
        fixed = config.temperature
        self.temperature = Temperature(config.temperature_init if fixed is None else fixed)
        self.temperature.to(self.device)
        norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
        self.adams = {
            name: FlatAdam(module, eps=config.adam_eps, max_grad_norm=norm)
            for name, module in (
                ("actor", self.actor),
                ("critics", self.critics),
                ("temperature", self.temperature),
            )
        }
        self.target_values = flat_parameters(self.targets)
        self._parameters = {
            "actor": list(self.actor.parameters()),
            "critics": list(self.critics.parameters()),
        }
        self.last_actor = torch.zeros(2, device=self.device)  # loss and entropy
        self.fast: MlpSAC | None = None
        if config.fast == "auto" and MlpSAC.covers(self.actor, self.critics, self.preprocess):
            parts = self.actor, self.critics, self.adams, self.target_values, self.last_actor
            target = cast("float", self.target_entropy(None))
            self.fast = MlpSAC(*parts, config, place.programs, target_entropy=target)
        self.n_updates = 0
        self._noise = ActingNoise(
            self.distribution, n_steps=config.iteration_length, seed=stream_seed(place.seed, "act")
        )
        self.update_generator = torch.Generator(self.device).manual_seed(
            stream_seed(place.seed, "update noise")
        )
        self._update_noise = UpdateNoise(self.update_generator, self.device)

    def rates(self, progress: float, learning_rate: float) -> SACRates:
        return SACRates(learning_rate)

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Noise for ``n_steps`` steps, [n_rows, n_envs, ...], on the agent's device."""
        return self.distribution.draw_noise(n_steps, n_envs, generator).to(self.device)

    @torch.no_grad()
    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: SACRates, *, is_random: bool
    ) -> PolicySample:
        """Actions for training; ``is_random``: all with the same probability."""
        if is_random:
            return PolicySample(self.actions.random(noise, inputs.action_mask), None)
        return PolicySample(self.distribution.sample(self._outputs(inputs), noise), None)

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act]; gSDE keeps its noise for several calls."""
        leaves = self.reader.read(obs)
        outputs = self._outputs(self.inputs(leaves, self.masks.in_call(leaves, action_mask)))
        noise = None if deterministic else self._noise.next(len(outputs)).to(self.device)
        return self.distribution.chosen(outputs, noise)

    def _outputs(self, inputs: PolicyInput) -> Tensor:
        outputs: Tensor = self.actor(self.preprocess(inputs.obs), inputs.action_mask)
        return outputs

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, Any]) -> Mask | None:
        return self.masks.of_infos(infos)

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
        step = self.plain_step if self.fast is None else self._fast_step
        return step(batch, rates, trains_actor)

    def plain_step(self, batch: ReplayBatch, rates: SACRates, trains_actor: bool) -> SACResult:
        """The step in plain torch."""
        obs, mask = self.preprocess(batch.inputs.obs), batch.inputs.action_mask
        target = self._target(batch)
        values = self.actions.taken(self.critics, obs, batch.action)
        loss = critic_loss(values, target, batch.weight)
        finite = self._step("critics", loss, rates)
        if trains_actor:
            finite = self._update_actor(obs, mask, rates) & finite
        self.target_values.lerp_(self.adams["critics"].values, self.config.tau)
        actor, entropy = self.last_actor.clone()
        alpha = self.temperature().detach()
        return SACResult(loss.detach(), actor, values.detach().mean(), entropy, alpha, finite)

    @torch.no_grad()
    def _fast_step(self, batch: ReplayBatch, rates: SACRates, trains_actor: bool) -> SACResult:
        fast = cast("MlpSAC", self.fast)
        inputs = [self.preprocess(each.obs) for each in (batch.inputs, batch.next_inputs)]
        obs, next_obs = (cast("Tensor", each).flatten(1) for each in inputs)
        read = (obs, batch.action, next_obs, batch.reward, batch.discount, batch.weight)
        noise = self._update_noise.draw(*batch.action.shape)
        actor_noise = self._update_noise.draw(*batch.action.shape) if trains_actor else None
        return SACResult(*fast.step(MlpBatch(*read, noise, actor_noise), rates.learning_rate))

    def check_fast(self) -> str:
        """Use plain torch from now on if what the fast backend repeats has changed; returns why."""
        if self.fast is None:
            return ""
        modules = self.actor, self.critics, self.temperature, self.preprocess
        parts = [part for module in modules for part in module.modules()]
        reason = why_not(
            MIRRORED, self, self.actions, self._update_noise, *parts, *self.adams.values()
        )
        if reason is None and not MlpSAC.covers(self.actor, self.critics, self.preprocess):
            reason = "a network has changed"
        if reason is None:
            return ""
        self.fast = None
        return f"plain torch runs instead of MlpSAC: {reason}"

    @torch.no_grad()
    def _target(self, batch: ReplayBatch) -> Tensor:
        """The soft value of the action taken, [B]."""
        obs, mask = self.preprocess(batch.next_inputs.obs), batch.next_inputs.action_mask
        following = self._soft_value(self.targets, obs, mask)
        return soft_target(batch.reward, batch.discount, following, self.temperature())

    def _soft_value(self, critics: Critics, obs: Obs, mask: Tensor | None) -> SoftValue:
        return self.actions.soft_value(critics, obs, self.actor(obs, mask), self._update_noise)

    def _update_actor(self, obs: Obs, mask: Tensor | None, rates: SACRates) -> Any:
        soft = self._soft_value(self.critics, obs, mask)
        loss = actor_loss(soft, self.temperature().detach())
        finite = self._step("actor", loss, rates)
        entropy = -soft.log_prob.detach().mean()
        if self.config.temperature is None:
            # Below the target entropy, the temperature rises.
            gap = self.temperature.log * (entropy - self.target_entropy(mask))
            finite = self._step("temperature", gap, rates) & finite
        self._keep_report(loss.detach(), entropy)
        return finite

    def _keep_report(self, loss: Tensor, entropy: Tensor) -> None:
        """Later updates without the actor report these, so they must cover all ranks."""
        adam = self.adams["actor"]
        self.last_actor.copy_(adam.world.weighted(torch.stack([loss, entropy]), adam.share))

    def target_entropy(self, mask: Tensor | None) -> float | Tensor:
        """The entropy that a learned temperature aims for; ``mask`` [B, n] of discrete actions."""
        given = self.config.target_entropy
        return self.actions.target_entropy(mask) if given is None else given

    def _step(self, name: str, loss: Tensor, rates: SACRates) -> Any:
        adam = self.adams[name]
        adam.grad.zero_()
        # Only these parameters: the actor's loss must not train the critics.
        torch.autograd.backward(loss, inputs=self._parameters.get(name))
        return adam.quick_step(rates.learning_rate, loss.detach())[1]

    def learn_moments(self, obs: Obs) -> None:
        """Add observations [N, ...] to the running normalisation."""
        self.preprocess.learn_moments(obs, self.adams["actor"].world)

    def join(self, world: World) -> None:
        self.load_state_dict(world.agreed(self.state_dict()))
        for adam in self.adams.values():
            adam.world = world

    def take_part(self, part: BatchPart) -> None:
        self._update_noise.part = part
        for adam in self.adams.values():
            adam.share = part.share

    def learnt(self) -> list[Tensor]:
        trained = [each for adam in self.adams.values() for each in (adam.values, *adam.moments)]
        return [*trained, self.target_values, self.last_actor, *self.preprocess.buffers()]

    def state_dict(self) -> StateDict:
        parts = {name: getattr(self, name).state_dict() for name in PARTS}
        return {
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            **parts,
            "adams": {name: adam.state_dict() for name, adam in self.adams.items()},
            "n_updates": self.n_updates,
            "last_actor": list(self.last_actor.clone()),
            "update_generator": self.update_generator.get_state(),
            **self._noise.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name, adam in self.adams.items():
            adam.load_state_dict(state["adams"][name])
        self.n_updates = state["n_updates"]
        self.last_actor.copy_(torch.stack(state["last_actor"]))
        set_generator_state(self.update_generator, state["update_generator"])
        self._noise.load_state_dict(state)


PARTS = ("actor", "critics", "targets", "temperature", "preprocess")
