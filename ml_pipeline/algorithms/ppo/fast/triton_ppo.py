"""TritonPPO: acting and the gradient of PPO's loss for two small MLPs on a GPU, in Triton.

It computes the same as ``TorchPPO``, up to rounding. One kernel takes a tile of observations
through a whole network and back, so activations never reach the device's memory.

Nothing waits for the device, and persistent tensors keep their addresses, as CUDA graphs require.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
import triton
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.contracts import PlainPPO
from ml_pipeline.algorithms.ppo.fast.adam_kernels import adam_kernel, sum_kernel
from ml_pipeline.algorithms.ppo.fast.numpy_ppo import NumpyPPO
from ml_pipeline.algorithms.ppo.fast.triton_kernels import (
    advantage_kernel,
    gradient_kernel,
    sample_kernel,
    score_kernel,
)
from ml_pipeline.algorithms.ppo.loss import COLUMNS, Minibatch, Rates, UpdateResult
from ml_pipeline.errors import type_and_line
from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy.contracts import PolicyInput, PolicySample
from ml_pipeline.policy.distributions import LOG_SQRT_2PI, Categorical
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.optimiser import BETA_1, BETA_2, FlatAdam

_WIDEST = 64  # units in a layer: a tile of activations must fit in the registers
_LARGEST = 3e38  # limit of an observation; infinity would be NaN after a product with 0
_N_METRICS = 8  # columns after the gradient in a row of partial sums; five are used
_N_PARTS = 64  # of a minibatch; the moments of their advantages are merged
_SUM_COLUMNS = 32
_ADAM_COLUMNS = 512
_TRIED_ROWS = 128


class Tiling(NamedTuple):
    """How to split the work: rows per tile, warps per tile, programs per multiprocessor."""

    rows: int
    warps: int
    programs_per_core: int  # actor and critic together; 0: one per tile


# Measured on an H200.
_ACTING = Tiling(rows=64, warps=4, programs_per_core=0)
_SCORING = Tiling(rows=64, warps=4, programs_per_core=8)
_MANY_ROWS = 2048  # per multiprocessor
_ENOUGH_MEMORY = 160 * 1024  # shared; consumer GPUs have about 100 KiB


def _learning(rows_per_core: float, shared_memory: int) -> Tiling:
    """Two programs fit on a multiprocessor. With many rows, four balance the load."""
    n_programs = 4 if rows_per_core > _MANY_ROWS else 2
    if shared_memory < _ENOUGH_MEMORY:
        return Tiling(rows=32, warps=2, programs_per_core=n_programs)
    return Tiling(rows=64, warps=4, programs_per_core=n_programs)


class TritonPPO:
    """Acts, scores and learns with fused kernels; shares weights and gradients with the model."""

    also_mirrored: ClassVar[Mirrored] = {}
    acts_faster_on_cpu = True  # a launch takes longer than the arithmetic for a few envs
    takes_arrays = False

    @staticmethod
    def covers(model: Any) -> bool:
        """Whether ``NumpyPPO`` covers the model, and its MLPs have two narrow layers each.

        The observation must be a Box: the kernels make no one-hot vectors.
        """
        if not NumpyPPO.covers(model) or not model.preprocess.is_plain:
            return False
        sizes = _sizes(model.actor, model.policy_head)
        same = _sizes(model.critic, model.value_head)[:-1] == sizes[:-1]
        # One more input is for the biases.
        return same and len(sizes) == 4 and max(sizes[0] + 1, *sizes) <= _WIDEST

    def __init__(self, plain: PlainPPO) -> None:
        self._plain = plain
        self.config = config = plain.config
        self._adam = adam = cast("FlatAdam", plain.adam)  # see ``fastest``
        self._model = plain.model
        model: Any = plain.model
        precision = plain.precision
        self._device = adam.values.device
        self._discrete = isinstance(model.distribution, Categorical)
        n_in, n_h, n_k, n_out = _sizes(model.actor, model.policy_head)
        self._moments = torch.zeros(2 * n_in + 1, device=self._device)
        places = [
            adam.place(f"{name}.weight")
            for trunk, head in (("actor", "policy_head"), ("critic", "value_head"))
            for name in (f"{trunk}.layers.0", f"{trunk}.layers.2", head)
        ]
        layout = torch.tensor(places, dtype=torch.int32, device=self._device)
        log_std = 0 if self._discrete else adam.place("distribution.log_std")
        self._network = (adam.values, layout, self._moments)
        self._sizes = (n_in, n_h, n_k, n_out, log_std)
        self._constants = {
            "D": _padded(n_in + 1),  # one more, for the biases
            "H": _padded(n_h),
            "K": _padded(n_k),
            "A": _padded(n_out),
            "TANH": model.actor.activation == "tanh",
            "DISCRETE": self._discrete,
            "PRECISION": precision,
        }
        action_dtype = model.distribution.action_dtype
        self._any_action = torch.zeros(1, dtype=action_dtype, device=self._device)
        self._all_wanted = torch.ones(1, dtype=torch.bool, device=self._device)
        self._skip = config.on_nonfinite == "skip"
        properties = torch.cuda.get_device_properties(self._device)
        self._n_cores = int(properties.multi_processor_count)
        # Older versions of torch do not report it.
        self._shared_memory = int(getattr(properties, "shared_memory_per_block_optin", 0))
        self.refresh()

    def why_not(self) -> str | None:
        """Why the kernels do not fit the model, or cannot be built here; tries them once."""
        if not self.covers(self._model):
            return "the network has changed"
        kept = [self._adam.values, self._adam.grad, *self._adam.moments, self._adam.n_steps]
        before = [each.clone() for each in kept]
        try:
            self._try_kernels()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no headers, too little shared memory
            return type_and_line(error)
        finally:
            for held, old in zip(kept, before, strict=True):
                held.copy_(old)
        return None

    def _try_kernels(self) -> None:
        """One step of a few made-up transitions; it changes the weights."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(_TRIED_ROWS, *shape, device=self._device)

        distribution = self._model.distribution
        inputs = PolicyInput(zeros(self._sizes[0]), None, None, None)
        noise = zeros(*distribution.noise_shape(1, 1)[2:])
        action = self.sample(inputs, noise, None).action
        log_prob, _ = self.score(inputs, action)
        value = self.value(inputs)
        rollout = Minibatch(inputs, action, log_prob, value, zeros(), zeros())
        order = torch.arange(_TRIED_ROWS, device=self._device).unsqueeze(0)
        self._epoch(rollout, order, torch.zeros(len(Rates._fields), device=self._device))

    def refresh(self) -> None:
        """Copy the normaliser of observations after it has changed."""
        moments, n_in = self._model.preprocess.moments_of(""), self._sizes[0]
        if moments is None:
            self._moments[n_in:] = 1.0
            self._moments[2 * n_in] = _LARGEST
            return
        self._moments[:n_in] = moments.mean.flatten()
        self._moments[n_in : 2 * n_in] = torch.rsqrt(moments.variance.flatten() + 1e-8)
        # Before the first rollout, the deviation is unknown: do not clip.
        clip = self._model.preprocess.clip or _LARGEST
        self._moments[2 * n_in] = torch.where(moments.count > 0, clip, _LARGEST)

    def outputs(self, inputs: PolicyInput) -> tuple[Tensor, Tensor | None]:
        return self._plain.outputs(inputs)

    def update(self, batch: Minibatch, rates: Rates) -> UpdateResult:
        return self._plain.update(batch, rates)

    def sample(self, inputs: PolicyInput, noise: Tensor, out: Tensor | None) -> PolicySample:
        if out is None:
            distribution = self._model.distribution
            shape = (len(noise), *distribution.action_shape)
            out = torch.empty(shape, dtype=distribution.action_dtype, device=self._device)
        obs = _flat(inputs.obs)
        n_rows, tiling = len(obs), _ACTING
        sample_kernel[(triton.cdiv(n_rows, tiling.rows),)](
            *self._network, obs, noise, out, n_rows, *self._sizes,
            B=tiling.rows, SKIP=self._skip, num_warps=tiling.warps, **self._constants,
        )  # fmt: skip
        return PolicySample(out, None)

    def score(self, inputs: PolicyInput, action: Tensor) -> tuple[Tensor, Tensor]:
        obs = _flat(inputs.obs)
        log_prob, value = torch.empty(2, len(obs), device=self._device)
        self._score(obs, action, log_prob, value, None, n_towers=2)
        return log_prob, value

    def value(self, inputs: PolicyInput, wanted: Tensor | None = None) -> Tensor:
        obs = _flat(inputs.obs)
        value = torch.zeros(len(obs), device=self._device)
        self._score(obs, self._any_action, value, value, wanted, n_towers=1)
        return value

    def _score(
        self,
        obs: Tensor,
        action: Tensor,
        log_prob: Tensor,
        value: Tensor,
        wanted: Tensor | None,
        *,
        n_towers: int,
    ) -> None:
        tiling, n_rows = _SCORING, len(obs)
        n_programs = self._n_programs(n_rows, tiling)
        score_kernel[(n_programs, n_towers)](
            *self._network, obs, action, log_prob, value,
            self._all_wanted if wanted is None else wanted, n_rows, *self._sizes, LOG_SQRT_2PI,
            2 - n_towers, 0 if wanted is None else 1,
            B=tiling.rows, num_warps=tiling.warps, num_stages=2,
            **self._constants,
        )  # fmt: skip

    def epoch(
        self,
        rollout: Minibatch,
        order: Sequence[Tensor] | Tensor,
        rates: Rates,
        shares: Sequence[float] | None = None,
    ) -> Tensor:
        if not isinstance(order, Tensor) or shares is not None:
            raise TypeError("these kernels cannot average gradients over ranks")
        # The rates are views of one tensor, which the kernels read from the address of the first.
        packed = torch.as_strided(rates.learning_rate, (len(rates),), (1,))
        return self._epoch(rollout, order, packed)

    def _epoch(self, rollout: Minibatch, order: Tensor, rates: Tensor) -> Tensor:
        adam, config = self._adam, self.config
        n_minibatches, size = order.shape
        tiling = _learning(size / self._n_cores, self._shared_memory)
        n_values = adam.values.numel()
        n_columns = n_values + _N_METRICS
        n_programs = self._n_programs(size, tiling)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=self._device)

        parts = empty(n_minibatches, _N_PARTS, 3)
        partial = torch.zeros(n_programs, n_columns, device=self._device)
        n_squares = triton.cdiv(n_columns, _SUM_COLUMNS)
        told, squares = empty(_N_METRICS), empty(n_squares)
        results = empty(n_minibatches, len(COLUMNS))
        n_steps = empty(n_minibatches + 1)
        n_steps[0] = adam.n_steps
        normalises = config.normalize_advantage and size > 1
        if normalises:
            advantage_kernel[(n_minibatches, _N_PARTS)](
                rollout.advantage, order, parts, size, B=1024, N_PARTS=_N_PARTS
            )
        for minibatch in range(n_minibatches):
            gradient_kernel[(n_programs, 2)](
                *self._network, _flat(rollout.inputs.obs), rollout.action, rollout.log_prob,
                rollout.value, rollout.advantage, rollout.value_target, order, parts, rates,
                partial, minibatch, size, n_values, *self._sizes, LOG_SQRT_2PI, config.value_coef,
                config.dual_clip or 1.0,
                B=tiling.rows, NORMALIZE=normalises,
                DUAL=config.dual_clip is not None, CLIP_VALUE=config.clip_value_loss,
                N_PARTS=_N_PARTS, N_METRICS=_N_METRICS, num_warps=tiling.warps, num_stages=1,
                **self._constants,
            )  # fmt: skip
            sum_kernel[(n_squares,)](
                partial, adam.grad, told, squares, n_programs, n_values, n_columns,
                R=64, C=_SUM_COLUMNS,
            )  # fmt: skip
            adam_kernel[(triton.cdiv(n_values, _ADAM_COLUMNS),)](
                adam.values, adam.grad, *adam.moments, n_steps, squares, told, rates, results,
                minibatch, n_values, n_squares, config.value_coef, config.max_grad_norm,
                adam.eps, math.log2(BETA_1), math.log2(BETA_2), 1.0 - BETA_1, 1.0 - BETA_2,
                C=_ADAM_COLUMNS, S=triton.next_power_of_2(n_squares), M=_N_METRICS,
            )  # fmt: skip
        adam.n_steps.copy_(n_steps[-1])
        return results

    def _n_programs(self, n_rows: int, tiling: Tiling) -> int:
        """Programs per network; with many tiles, each program runs several."""
        n_tiles = triton.cdiv(n_rows, tiling.rows)
        return int(max(min(n_tiles, self._n_cores * tiling.programs_per_core // 2), 1))


def _sizes(trunk: MLP, head: nn.Linear) -> list[int]:
    """Number of inputs, units of each layer, and outputs."""
    layers = [*(each for each in trunk.layers if isinstance(each, nn.Linear)), head]
    return [layers[0].in_features, *(each.out_features for each in layers)]


def _padded(size: int) -> int:
    """Tensor cores require powers of two of at least 16."""
    return int(max(16, triton.next_power_of_2(size)))


def _flat(obs: Any) -> Tensor:
    flat: Tensor = obs.reshape(len(obs), -1).float()
    return flat
