"""DQNAgent: learns the value of each discrete action, and plays the best one.

``dqn_loss`` is the algorithm; for a small MLP ``fast/`` computes the same in NumPy. It runs only
while the code that it repeats is unchanged (``mirrors``), so an edit below always takes effect.

Options: double, duelling, n-step returns (in the replay buffer), prioritised replay, quantiles. An
action of several choices (MultiDiscrete) has one advantage per choice and a common value, as in
branching DQN (Tavakoli et al., 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.dqn.fast.numpy_dqn import MIRRORED, NumpyDQN
from ml_pipeline.algorithms.replay.contracts import BatchPart, ReplayBatch
from ml_pipeline.mirrors import why_not
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    ActionSpaceError,
    Categorical,
    Distribution,
    MultiCategorical,
)
from ml_pipeline.policy.masks import Mask
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.observation_input import Senses
from ml_pipeline.policy.optimiser import FlatAdam, flat_parameters
from ml_pipeline.policy.recurrent import refuse_recurrent
from ml_pipeline.policy.space_data import check_spaces, space_to_data
from ml_pipeline.ranks.world import World
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import Place


class DQNRates(NamedTuple):
    """The annealed settings at their current values."""

    learning_rate: float
    epsilon: float
    beta: float  # exponent of the importance weights


class DQNResult(NamedTuple):
    """Metrics of one gradient step, 0-d tensors or numbers, and the TD error of each transition."""

    loss: Any
    q: Any  # mean value of the actions in the batch
    grad_norm: Any
    finite: Any  # False if loss or gradient was not finite; such a step changes nothing
    error: Any  # [B], a tensor or an array


def dqn_loss(chosen: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the absolute TD error of each transition, [B].

    ``chosen``: quantiles of the values of the actions taken, [B, n_quantiles, n_choices].
    ``target``: quantiles of the return that they should predict, [B, n_quantiles].
    """
    n_quantiles = chosen.shape[1]
    # [B, predicted quantile, target quantile, n_choices]
    error = target[:, None, :, None] - chosen[:, :, None, :]
    huber = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
    if n_quantiles > 1:
        quantile = (torch.arange(n_quantiles, device=error.device) + 0.5) / n_quantiles
        huber = (quantile[:, None, None] - (error.detach() < 0).float()).abs() * huber
    loss = huber.mean(dim=(2, 3)).sum(dim=1)
    return (weight * loss).mean(), error.detach().mean(dim=(1, 2, 3)).abs()


class ValueHead(nn.Module):
    """From features to quantiles of each action's value, or to the mean value."""

    _mean_of_choice: Tensor

    def __init__(
        self, n_features: int, distribution: Distribution, *, n_quantiles: int, duelling: bool
    ) -> None:
        super().__init__()
        self.n_quantiles = n_quantiles
        self.n_outputs = distribution.n_outputs
        self.advantage = nn.Linear(n_features, n_quantiles * self.n_outputs)
        self.value = nn.Linear(n_features, n_quantiles) if duelling else None
        # Averages the advantages within each choice.
        choice = distribution.by_choice(torch.arange(self.n_outputs, dtype=torch.float32))
        n_choices = choice.shape[-2]
        member = torch.zeros(n_choices, self.n_outputs)
        for row, members in enumerate(choice.tolist()):
            for index in members:
                if index >= 0:
                    member[row, int(index)] = 1.0
        same = member.T @ (member / member.sum(dim=1, keepdim=True))
        self.register_buffer("_mean_of_choice", same, persistent=False)

    def quantiles(self, features: Tensor) -> Tensor:
        """[..., n_quantiles, n_outputs]"""
        shape = (*features.shape[:-1], self.n_quantiles, self.n_outputs)
        advantage: Tensor = self.advantage(features).reshape(shape)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features).unsqueeze(-1)
        return value + advantage - advantage @ self._mean_of_choice

    def forward(self, features: Tensor) -> Tensor:
        """Mean values, [..., n_outputs]."""
        return self.quantiles(features).mean(dim=-2)


class QNetwork(nn.Module):
    """A network and its value head."""

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, obs: Obs) -> Tensor:
        """Quantiles [B, n_quantiles, n_outputs] for preprocessed observations."""
        return self.head.quantiles(self.trunk(obs))


class DQNAgent:
    """Deep Q-learning (Mnih et al., 2015) with double, duelling and quantile variants."""

    memory_size = 0  # not recurrent
    update_generator: torch.Generator | None = None  # an update draws nothing
    metric_names: ClassVar[dict[str, str]] = {  # field of DQNResult -> name in the log
        "loss": "loss/value",
        "q": "value/mean",
        "grad_norm": "loss/grad_norm",
    }

    def __init__(
        self, env_spaces: Spaces, build_network: NetworkBuilder, config: DQNConfig, place: Place
    ) -> None:
        self.config = config
        self.device = place.device
        observation, action = env_spaces
        self.spaces = {"observation_space": observation, "action_space": action}
        senses = Senses(observation, config, self.device)
        self.reader, self.preprocess, self.inputs = senses.reader, senses.preprocess, senses.inputs
        self.distribution = _discrete(action)
        self.masks = senses.masks(self.distribution)
        # Layers draw their first weights from torch's global generator, so seed it here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(stream_seed(place.seed, "weights"))
            trunk = refuse_recurrent(build_network(self.preprocess.space))
            head = ValueHead(
                out_features(trunk),
                self.distribution,
                n_quantiles=config.n_quantiles,
                duelling=config.duelling,
            )
        self.model = QNetwork(trunk, head).to(self.device).eval()
        self.target = deepcopy(self.model).requires_grad_(False)
        clip_norm = float("inf") if config.max_grad_norm is None else config.max_grad_norm
        self.adam = FlatAdam(self.model, eps=config.adam_eps, max_grad_norm=clip_norm)
        self._target_values = flat_parameters(self.target)
        self.fast: NumpyDQN | None = None
        if config.fast == "auto" and self.device.type == "cpu" and self._is_covered():
            parts = self.model, self.preprocess, self.adam
            self.fast = NumpyDQN(*parts, self._target_values, config)
        self.n_updates = 0
        self._generator = torch.Generator().manual_seed(stream_seed(place.seed, "act"))

    @property
    def takes_arrays(self) -> bool:
        return self.fast is not None

    def rates(self, progress: float, learning_rate: float) -> DQNRates:
        config = self.config
        beta = config.priority_beta + (1.0 - config.priority_beta) * progress
        return DQNRates(learning_rate, config.epsilon(progress), beta)

    def draw_noise(self, n_steps: int, n_envs: int, generator: torch.Generator) -> Tensor:
        """Uniform numbers, [n_steps, n_envs, 1 + n_choices], on the agent's device."""
        n_choices = max(self.distribution.action_shape, default=1)
        return torch.rand(n_steps, n_envs, 1 + n_choices, generator=generator).to(self.device)

    def explore(
        self, inputs: PolicyInput, noise: Tensor, rates: DQNRates, *, is_random: bool
    ) -> PolicySample:
        """Actions for training; ``is_random``: before the first update."""
        return self.sample_batch(inputs, noise, 1.0 if is_random else rates.epsilon)

    @torch.no_grad()
    def sample_batch(self, inputs: PolicyInput, noise: Tensor, epsilon: float) -> PolicySample:
        """The best action in each env, or with probability ``epsilon`` a random allowed one."""
        if self.fast is not None:
            action: Any = self.fast.explore(inputs, noise, epsilon)
            is_array = isinstance(noise, np.ndarray)
            return PolicySample(action if is_array else torch.from_numpy(action), None)
        values = self._values(inputs)
        best = self.distribution.mode(values)
        explores = noise[:, 0] < epsilon
        equal = torch.where(values > 0.5 * FORBIDDEN, 0.0, FORBIDDEN)
        which = noise[:, 1:] if self.distribution.action_shape else noise[:, 1]
        drawn = self.distribution.sample(equal, which)
        explores = explores.view(-1, *[1] * (best.ndim - 1))
        return PolicySample(torch.where(explores, drawn, best), None)

    def _values(self, inputs: PolicyInput) -> Tensor:
        if self.fast is None:
            return self.plain_values(inputs)
        return torch.from_numpy(self.fast.values(inputs))

    def plain_values(self, inputs: PolicyInput) -> Tensor:
        """Mean values, [B, n_outputs]; very low for forbidden actions."""
        values: Tensor = self.model.head(self.model.trunk(self.preprocess(inputs.obs)))
        if inputs.action_mask is not None:
            values = values.masked_fill(~inputs.action_mask, FORBIDDEN)
        return values

    @torch.no_grad()
    def act_batch(
        self,
        obs: Any,
        deterministic: bool = False,
        *,
        action_mask: Mask | None = None,
        memory: Tensor | None = None,
    ) -> NDArray[np.generic]:
        """[n_envs, *obs] -> [n_envs, *act]; not deterministic: explores with ``epsilon_end``."""
        leaves = self.reader.read(obs)
        n_envs = len(next(iter(leaves.values())))
        inputs = self.inputs(leaves, self.masks.in_call(leaves, action_mask))
        if deterministic:
            action = self.distribution.mode(self._values(inputs))
        else:
            noise = self.draw_noise(1, n_envs, self._generator)[0]
            action = self.sample_batch(inputs, noise, self.config.epsilon_end).action
        return self.distribution.to_env(action.cpu().numpy())

    def new_memory(self, n_envs: int) -> None:
        return None

    def mask_of(self, infos: Mapping[str, Any]) -> Mask | None:
        return self.masks.of_infos(infos)

    def for_playing(self) -> DQNAgent:
        return self

    def greedy(self) -> GreedyPolicy:
        return GreedyPolicy(
            self.reader,
            self.masks,
            preprocess=self.preprocess,
            trunk=self.model.trunk,
            head=self.model.head,
            distribution=self.distribution,
        )

    def update(self, batch: ReplayBatch, rates: DQNRates) -> DQNResult:
        """One gradient step; every ``target_every`` of them, the target network is replaced."""
        return self.gradient_step(batch, rates, self.begin_update())

    def begin_update(self) -> bool:
        """Count an update; returns whether the target network is replaced after it."""
        self.n_updates += 1
        return self.n_updates % self.config.target_every == 0

    def gradient_step(self, batch: ReplayBatch, rates: DQNRates, copies: bool) -> DQNResult:
        """Only tensors change, so that a graph can be captured for each ``copies``."""
        gradient: Any = self.plain_gradient if self.fast is None else self.fast.gradient
        loss, mean, error = gradient(batch)
        norm, finite = self.adam.quick_step(rates.learning_rate, loss)
        if copies:
            self._copy_to_target()
        return DQNResult(loss, mean, norm, finite, error)

    def plain_gradient(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Write the gradients; returns the loss, the mean value and the TD errors [B]."""
        target = self._target(batch)
        self.model.train()
        quantiles = self.model(self.preprocess(batch.inputs.obs))
        self.model.eval()
        chosen = self._of_action(quantiles, batch.action)
        loss, error = dqn_loss(chosen, target, batch.weight)
        self.adam.grad.zero_()
        torch.autograd.backward(loss)
        return loss.detach(), chosen.detach().mean(), error

    def check_fast(self) -> str:
        """Use plain torch from now on if what the fast backend repeats has changed; returns why."""
        if self.fast is None:
            return ""
        parts = self, self.adam, self.distribution, *self.model.modules()
        reason = why_not(MIRRORED, *parts, *self.preprocess.modules())
        if reason is None and not self._is_covered():
            reason = "the network has changed"
        if reason is None:
            return ""
        self.fast = None
        return f"plain torch runs instead of NumpyDQN: {reason}"

    def _is_covered(self) -> bool:
        return NumpyDQN.covers(self.model, self.preprocess, self.distribution, self.config)

    @torch.no_grad()
    def _target(self, batch: ReplayBatch) -> Tensor:
        """Quantiles of the return after the window, [B, n_quantiles]."""
        obs, mask = self.preprocess(batch.next_inputs.obs), batch.next_inputs.action_mask
        quantiles = self.target(obs)
        scored = self.model(obs) if self.config.double else quantiles
        values = scored.mean(dim=1)
        if mask is not None:
            values = values.masked_fill(~mask, FORBIDDEN)
        best = self.distribution.mode(values)
        future = self._of_action(quantiles, best).mean(dim=2)
        return batch.reward[:, None] + batch.discount[:, None] * future

    def _of_action(self, quantiles: Tensor, action: Tensor) -> Tensor:
        """The values of actions [B, *act], as [B, n_quantiles, n_choices]."""
        by_choice = self.distribution.by_choice(quantiles)
        index = action.reshape(len(action), 1, -1, 1).expand(*by_choice.shape[:-1], 1)
        return by_choice.gather(-1, index).squeeze(-1)

    def _copy_to_target(self) -> None:
        self._target_values.copy_(self.adam.values)
        for own, other in zip(self.target.buffers(), self.model.buffers(), strict=True):
            own.copy_(other)

    def learn_moments(self, obs: Obs) -> None:
        """Add observations [N, ...] to the running normalisation."""
        self.preprocess.learn_moments(obs, self.adam.world)

    def join(self, world: World) -> None:
        self.load_state_dict(world.agreed(self.state_dict()))
        self.adam.world = world

    def take_part(self, part: BatchPart) -> None:
        self.adam.share = part.share

    def learnt(self) -> list[Tensor]:
        trained = [self.adam.values, *self.adam.moments]
        return [*trained, self._target_values, *self.preprocess.buffers()]

    def state_dict(self) -> StateDict:
        return {
            "spaces": {name: space_to_data(space) for name, space in self.spaces.items()},
            "model": self.model.state_dict(),
            "target": self.target.state_dict(),
            "preprocess": self.preprocess.state_dict(),
            "adam": self.adam.state_dict(),
            "n_updates": self.n_updates,
            "act_generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_spaces(self.spaces, state["spaces"])
        self.model.load_state_dict(state["model"])
        self.target.load_state_dict(state["target"])
        self.preprocess.load_state_dict(state["preprocess"])
        self.adam.load_state_dict(state["adam"])
        self.n_updates = state["n_updates"]
        self._generator.set_state(state["act_generator"])


def _discrete(space: Any) -> Distribution:
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return MultiCategorical(space)
    raise ActionSpaceError(
        f"agent=dqn: action space {space} is not discrete; use agent=sac (train_sac.py), or an "
        "option of the env that makes its actions discrete"
    )
