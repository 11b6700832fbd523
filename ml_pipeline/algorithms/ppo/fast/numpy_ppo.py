"""NumpyPPO: acting and the gradient of PPO's loss for two plain MLPs on the CPU, in NumPy.

It computes the same as ``TorchPPO``, up to rounding. At these sizes autograd and torch's
dispatch take several times as long as the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates, UpdateResult
from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy.actor_critic import ActorCritic
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.distributions import (
    FORBIDDEN,
    LOG_SQRT_2PI,
    Categorical,
    DiagonalGaussian,
)
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.numpy_mlp import (
    Array,
    Normaliser,
    Tower,
    has_hooks,
    is_mirrored,
    is_plain_linear,
)
from ml_pipeline.policy.optimiser import Optimiser


class NumpyPPO:
    """Acts, scores and computes gradients in NumPy; shares weights and gradients with the model."""

    also_mirrored: ClassVar[Mirrored] = {}
    acts_faster_on_cpu = False  # it already runs there
    takes_arrays = True  # conversions to tensors and back took a third of a CartPole rollout

    @classmethod
    def covers(cls, model: ActorCritic) -> bool:
        """Whether the model is two MLPs over one vector, with a Categorical or a Gaussian."""
        return (
            model.critic is not None
            and cls._covers_trunks(model.actor, model.critic)
            and is_plain_linear(model.policy_head)
            and is_plain_linear(model.value_head)
            and not has_hooks(model)
            and type(model.distribution) in (Categorical, DiagonalGaussian)
            and model.preprocess.is_vector
        )

    def __init__(self, model: ActorCritic, adam: Optimiser, config: PPOConfig) -> None:
        self.config = config
        self._model = model
        self._adam = adam
        self._build(model, adam)
        self._discrete = isinstance(model.distribution, Categorical)
        self.prepared = Normaliser(model.preprocess)
        if not self._discrete:
            values, grad = adam.views["distribution.log_std"]
            self._log_std, self._log_std_grad = values.numpy(), grad.numpy()

    @staticmethod
    def _covers_trunks(actor: nn.Module, critic: nn.Module) -> bool:
        return is_mirrored(actor) and is_mirrored(critic)

    def _build(self, model: ActorCritic, adam: Optimiser) -> None:
        self.actor = Tower.with_head(cast("MLP", model.actor), "actor", "policy_head", adam)
        self.critic = Tower.with_head(cast("MLP", model.critic), "critic", "value_head", adam)

    def why_not(self) -> str | None:
        """Why this backend cannot compute what the model does now, or None."""
        return None if self.covers(self._model) else "the network has changed"

    def refresh(self) -> None:
        """Nothing is cached: all arrays are views of torch's memory."""

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        outputs, memory = self._policy(inputs)
        return torch.from_numpy(_masked(outputs, inputs.action_mask)), memory

    def sample(self, inputs: PolicyInput, noise: Any, out: Tensor | None) -> PolicySample:
        """Draws the same actions as ``Categorical`` and ``DiagonalGaussian``.

        They are an array if ``noise`` is one.
        """
        outputs, memory = self._policy(inputs)
        action: Any = self._draw(outputs, inputs.action_mask, as_array(noise))
        is_array = isinstance(noise, np.ndarray)
        return PolicySample(action if is_array else torch.from_numpy(action), memory)

    def _draw(self, outputs: Array, mask: Tensor | None, noise: NDArray[Any]) -> NDArray[Any]:
        if self.config.on_nonfinite == "skip":
            outputs = np.nan_to_num(outputs)
        if not self._discrete:
            return outputs + np.exp(self._log_std) * noise  # type: ignore[no-any-return]
        logits = _columns(outputs, mask)
        logits -= np.maximum.reduce(logits)
        cumulative = np.add.accumulate(np.exp(logits, out=logits))
        below = cumulative[:-1] <= noise * cumulative[-1]
        return np.add.reduce(below, dtype=np.int64)  # type: ignore[no-any-return]

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        x = self.prepared(as_array(inputs.obs))
        log_prob, value = self._scores(x, inputs.action_mask, as_array(action))
        return torch.from_numpy(log_prob), torch.from_numpy(value)

    def _scores(self, x: Any, mask: Any, action: NDArray[Any]) -> tuple[Array, Array]:
        outputs, values, _ = self._forward(x)
        value = values[:, 0]
        if self._discrete:
            log_probs = _log_softmax(outputs, mask)
            return np.take_along_axis(log_probs, action[None], axis=0)[0], value
        return self._log_density((action - outputs) * np.exp(-self._log_std)), value

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        obs = as_array(inputs.obs)
        if wanted is None:
            return torch.from_numpy(self._value(obs))
        value = torch.zeros(len(obs))
        if wanted.any():
            value[wanted] = torch.from_numpy(self._value(obs[wanted.numpy()]))
        return value

    def epoch(
        self,
        rollout: Minibatch,
        order: Sequence[Tensor] | Tensor,
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> Tensor:
        parts: Any = order.numpy() if isinstance(order, Tensor) else [x.numpy() for x in order]
        results: list[list[float]] = []
        for batch in self._minibatches(rollout, parts):
            self._adam.share = 1.0 if shares is None else shares[len(results)]
            results.append(self._step(batch, rates))
            if not results[-1][-1] and self.config.on_nonfinite == "stop":
                break
        return torch.from_numpy(np.array(results))  # torch.tensor takes longer

    def _minibatches(self, rollout: Minibatch, parts: Sequence[Any]) -> Iterator[Minibatch]:
        """The minibatches of an epoch; they hold arrays, because torch takes longer."""
        # One gather for the whole epoch; the minibatches are then slices without a copy.
        index = np.concatenate(parts)

        def gathered(field: Tensor) -> Any:
            return field.numpy().take(index, axis=0)

        shuffled = rollout.mapped(gathered, None)
        for end, indices in zip(accumulate(map(len, parts)), parts, strict=True):
            part = slice(end - len(indices), end)
            yield shuffled.mapped(lambda field: field[part], None)  # noqa: B023

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
        return UpdateResult._make([*self._step(batch, rates), {}])

    def _step(self, batch: Minibatch, rates: Rates) -> list[float]:
        """One gradient step; returns the fields of ``UpdateResult`` as plain numbers."""
        learning_rate, clip_range, entropy_coef = map(float, rates)
        *report, loss = self._gradient(batch, clip_range, entropy_coef)
        norm, finite = self._adam.step_on_cpu(learning_rate, loss)
        return [*report, norm, float(finite)]

    def _policy(self, inputs: PolicyInput) -> tuple[Array, Tensor | None]:
        """Outputs of the policy head, [B, n_outputs], and the next recurrent state."""
        return self.actor.forward(self.prepared(as_array(inputs.obs)))[-1], None

    def _value(self, obs: Any) -> Array:
        return self.critic.forward(self.prepared(obs))[-1][:, 0]

    def _gradient(self, batch: Minibatch, clip_range: float, entropy_coef: float) -> list[float]:
        """Write the gradients; returns policy and value loss, entropy, KL, clip fraction, loss."""
        x, batch = self._flattened(batch)
        outputs, value, kept = self._forward(x)
        grad, policy_loss, entropy, kl, clip_fraction = self._policy_gradient(
            outputs, batch, clip_range, entropy_coef
        )
        value_grad, value_loss = self._value_gradient(value[:, 0], batch, clip_range)
        self._backward(kept, grad, value_grad)
        loss = policy_loss + self.config.value_coef * value_loss - entropy_coef * entropy
        return [policy_loss, value_loss, entropy, kl, clip_fraction, loss]

    def _flattened(self, batch: Minibatch) -> tuple[Any, Minibatch]:
        """What the towers read, and the minibatch without an axis of time."""
        return self.prepared(as_array(batch.inputs.obs)), batch

    def _forward(self, x: Any) -> tuple[Array, Array, Any]:
        """Outputs of the policy and of the value, [B, ...], and what ``_backward`` needs."""
        passed, value_passed = self.actor.forward(x), self.critic.forward(x)
        return passed[-1], value_passed[-1], (passed, value_passed)

    def _backward(self, kept: Any, grad: Array, value_grad: Array) -> None:
        """Write the gradients of all weights from those of both outputs."""
        passed, value_passed = kept
        self.actor.backward(passed, grad)
        self.critic.backward(value_passed, value_grad)

    def _policy_gradient(
        self, outputs: Array, batch: Minibatch, clip_range: float, entropy_coef: float
    ) -> tuple[Array, float, float, float, float]:
        """The gradient of the outputs; policy loss, entropy, KL and clip fraction."""
        config, size = self.config, len(outputs)
        action, mask = as_array(batch.action), batch.inputs.action_mask
        if self._discrete:
            log_probs = _log_softmax(outputs, mask)
            places = action * size  # of the actions taken
            places += np.arange(size)
            log_prob = log_probs.ravel().take(places)
        else:
            inverse_std = np.exp(-self._log_std)
            z = (action - outputs) * inverse_std
            log_prob = self._log_density(z)

        log_ratio = log_prob - as_array(batch.log_prob)
        ratio = np.exp(log_ratio)
        advantage = as_array(batch.advantage)
        if config.normalize_advantage and size > 1:
            advantage = advantage - np.add.reduce(advantage) / np.float32(size)
            advantage /= math.sqrt(float(advantage @ advantage) / size) + 1e-8
        clipped = np.minimum(np.maximum(ratio, 1.0 - clip_range), 1.0 + clip_range)
        gain = advantage * ratio
        bounded = advantage * clipped
        counts = gain <= bounded  # where the ratio is not clipped, so that it has a gradient
        np.minimum(gain, bounded, out=bounded)
        if config.dual_clip is not None:
            floor = np.where(advantage < 0, advantage * np.float32(config.dual_clip), -np.inf)
            counts &= bounded >= floor
            bounded = np.maximum(bounded, floor)
        grad_log_prob = gain * counts
        grad_log_prob *= -1.0 / size

        if self._discrete:
            probs = np.exp(log_probs)
            weighted = probs * log_probs
            entropies = -np.add.reduce(weighted)
            entropy = float(np.add.reduce(entropies)) / size
            grad = probs * -grad_log_prob
            grad.ravel()[places] += grad_log_prob
            if entropy_coef:
                weighted += probs * entropies
                weighted *= entropy_coef / size
                grad += weighted
            grad = grad.T.copy()  # the rounding of products depends on the layout
            if mask is not None:
                grad *= as_array(mask)
        else:
            entropy = float(np.add.reduce(self._log_std)) + len(self._log_std) * (
                LOG_SQRT_2PI + 0.5
            )
            grad = grad_log_prob[:, None] * z
            grad *= inverse_std
            np.matmul(grad_log_prob, z * z - 1.0, out=self._log_std_grad)
            self._log_std_grad -= entropy_coef

        policy_loss = -float(np.add.reduce(bounded)) / size
        kl = float(np.add.reduce(ratio - log_ratio)) / size - 1.0
        n_clipped = np.count_nonzero(ratio != clipped)
        return grad, policy_loss, entropy, kl, n_clipped / size

    def _value_gradient(
        self, value: Array, batch: Minibatch, clip_range: float
    ) -> tuple[Array, float]:
        """The gradient of the values, [B, 1], and the value loss."""
        size, target = len(value), as_array(batch.value_target)
        error = value - target
        grad, squared = error, error * error
        if self.config.clip_value_loss:
            old = as_array(batch.value)
            moved = value - old
            bounded = np.minimum(np.maximum(moved, -clip_range), clip_range)
            other = old + bounded - target
            counts = other * other > squared
            grad = np.where(counts, other * (moved == bounded), error)
            squared = np.maximum(squared, other * other)
        value_loss = 0.5 * float(np.add.reduce(squared)) / size
        return (grad * (self.config.value_coef / size))[:, None], value_loss

    def _log_density(self, z: Array) -> Array:
        """Log density of a diagonal Gaussian, ``z`` standard deviations from its mean."""
        constant = float(np.add.reduce(self._log_std)) + len(self._log_std) * LOG_SQRT_2PI
        return np.einsum("ij,ij->i", z, z) * -0.5 - constant  # type: ignore[no-any-return]


def _masked(outputs: Array, mask: Tensor | None) -> Array:
    return outputs if mask is None else np.where(as_array(mask), outputs, np.float32(FORBIDDEN))


def _columns(outputs: Array, mask: Tensor | None) -> Array:
    """A copy, [n_actions, B]: NumPy is faster over the first axis if actions are few."""
    columns: Array = _masked(outputs, mask).T.copy()
    return columns


def _log_softmax(outputs: Array, mask: Tensor | None) -> Array:
    """[n_actions, B] from [B, n_actions]."""
    log_probs = _columns(outputs, mask)
    log_probs -= np.maximum.reduce(log_probs)
    log_probs -= np.log(np.add.reduce(np.exp(log_probs)))
    return log_probs


def as_array(numbers: Any) -> NDArray[Any]:
    """A tensor of host memory as an array, or the array itself."""
    array: NDArray[Any] = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return array
