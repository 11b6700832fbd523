"""DQNAgent: learns the value of each discrete action, and plays the best one.

``dqn_loss`` is the algorithm; for a small MLP ``fast/`` computes the same in NumPy. It runs only
while the code that it repeats is unchanged (``mirrors``), so an edit below always takes effect.

Options: double, duelling, n-step returns (in the replay buffer), prioritised replay, quantiles. An
action of several choices (MultiDiscrete, or a Tuple of discrete parts) has one advantage per
choice and a common value, as in branching DQN (Tavakoli et al., 2018).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.dqn.fast.numpy_dqn import MIRRORED, NumpyDQN
from ml_pipeline.algorithms.replay.agent import ReplayAgent
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.mirrors import why_not
from ml_pipeline.policy.actor_critic import GreedyPolicy
from ml_pipeline.policy.contracts import NetworkBuilder, Obs, PolicyInput, PolicySample, Spaces
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    ActionSpaceError,
    Distribution,
)
from ml_pipeline.policy.networks import out_features
from ml_pipeline.policy.optimiser import flat_parameters
from ml_pipeline.policy.product import action_distribution
from ml_pipeline.policy.recurrent import refuse_recurrent
from ml_pipeline.records import StateDict
from ml_pipeline.seeding import stream_seed
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.env_batch import ArrayOrTensor


class DQNRates(NamedTuple):
    """The annealed settings at their current values."""

    learning_rate: float
    epsilon: float
    beta: float  # exponent of the importance weights


class DQNResult(NamedTuple):
    """Metrics of one gradient step, 0-d tensors or numbers, and the TD error of each transition."""

    loss: float | Tensor
    q: float | Tensor  # mean value of the actions in the batch
    grad_norm: float | Tensor
    finite: bool | Tensor  # False if loss or gradient was not finite; such a step changes nothing
    error: ArrayOrTensor  # [B]


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


class DQNAgent(ReplayAgent[DQNConfig, DQNRates, DQNResult]):
    """Deep Q-learning (Mnih et al., 2015) with double, duelling and quantile variants."""

    metric_names: ClassVar[dict[str, str]] = {  # field of DQNResult -> name in the log
        "loss": "loss/value",
        "q": "value/mean",
        "grad_norm": "loss/grad_norm",
    }

    def __init__(
        self,
        env_spaces: Spaces,
        build_network: NetworkBuilder,
        config: DQNConfig,
        context: RunContext,
    ) -> None:
        super().__init__(env_spaces, config, context)
        self.turn_every = config.target_every
        self.distribution = _discrete(env_spaces.action)
        with self.first_weights():
            trunk = refuse_recurrent(build_network(self.preprocess.space))
            head = ValueHead(
                out_features(trunk),
                self.distribution,
                n_quantiles=config.n_quantiles,
                duelling=config.duelling,
            )
        self.model = QNetwork(trunk, head).to(self.device).eval()
        self.target = deepcopy(self.model).requires_grad_(False)
        self.parts = {"model": self.model, "target": self.target, "preprocess": self.preprocess}
        self.adam = self.new_adam(self.model)
        self.adams = {"model": self.adam}
        self._target_values = flat_parameters(self.target)
        self.fast: NumpyDQN | None = None
        if config.fast == "auto" and self.device.type == "cpu" and self._is_covered():
            parts = self.model, self.preprocess, self.adam
            self.fast = NumpyDQN(*parts, self._target_values, config)
            self.leave_changed_fast()
        self._generator = torch.Generator().manual_seed(stream_seed(context.seed, "act"))

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
        values = self.outputs(inputs)
        best = self.distribution.mode(values)
        explores = noise[:, 0] < epsilon
        equal = torch.where(values > 0.5 * FORBIDDEN, 0.0, FORBIDDEN)
        which = noise[:, 1:] if self.distribution.action_shape else noise[:, 1]
        drawn = self.distribution.sample(equal, which)
        explores = explores.view(-1, *[1] * (best.ndim - 1))
        return PolicySample(torch.where(explores, drawn, best), None)

    def outputs(self, inputs: PolicyInput) -> Tensor:
        if self.fast is None:
            return self.plain_values(inputs)
        return torch.from_numpy(self.fast.values(inputs))

    def plain_values(self, inputs: PolicyInput) -> Tensor:
        """Mean values, [B, n_outputs]; very low for forbidden actions."""
        values: Tensor = self.model.head(self.model.trunk(self.preprocess(inputs.obs)))
        if inputs.action_mask is not None:
            values = values.masked_fill(~inputs.action_mask, FORBIDDEN)
        return values

    def _act(self, inputs: PolicyInput, n_envs: int, deterministic: bool) -> NDArray[np.generic]:
        """Not deterministic: explores with ``epsilon_end``."""
        if deterministic:
            action = self.distribution.mode(self.outputs(inputs))
        else:
            noise = self.draw_noise(1, n_envs, self._generator)[0]
            action = self.sample_batch(inputs, noise, self.config.epsilon_end).action
        return self.distribution.to_env(action.cpu().numpy())

    def greedy(self) -> GreedyPolicy:
        return self.policy_of(self.model.trunk, self.model.head)

    def gradient_step(self, batch: ReplayBatch, rates: DQNRates, is_turn: bool) -> DQNResult:
        """``is_turn``: the target network is replaced after this update."""
        gradient: Any = self.plain_gradient if self.fast is None else self.fast.gradient
        loss, mean, error = gradient(batch)
        norm, finite = self.adam.quick_step(rates.learning_rate, loss)
        if is_turn:
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

    def leave_changed_fast(self) -> None:
        if self.fast is None:
            return
        parts = self, self.adam, self.distribution, *self.model.modules()
        reason = why_not(MIRRORED, *parts, *self.preprocess.modules())
        if reason is None and not self._is_covered():
            reason = "the network has changed"
        if reason is not None:
            self._remark = f"plain torch runs instead of NumpyDQN: {reason}"
            self.fast = None

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

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "act_generator": self._generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        if "adam" in state:  # of earlier versions
            state = {**state, "adams": {"model": state["adam"]}}
        super().load_state_dict(state)
        self._generator.set_state(state["act_generator"])


def _discrete(space: gym.Space[Any]) -> Distribution:
    distribution = action_distribution(space)
    if distribution.mask_size == distribution.n_outputs:  # every part is
        return distribution
    other = "sac" if isinstance(space, spaces.Box) else "ppo"
    raise ActionSpaceError(
        f"agent=dqn: action space {space} is not discrete; use agent={other} (train_{other}.py), "
        "or an option of the env that makes its actions discrete"
    )
