"""RecurrentTowers: two networks ``Recurrent`` over MLPs, with heads, on the CPU in NumPy.

They unroll their cells over all steps together, and reset the states inside the sequence.
``Recurrent`` calls torch's cell once per segment between two resets, and torch's GRU runs a dozen
small operations per step, each with a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ml_pipeline.mirrors import Mirrored
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.numpy_mlp import Array, Layer, Tower, is_mirrored
from ml_pipeline.policy.optimiser import FlatParameters
from ml_pipeline.policy.recurrent import Recurrent

# What ``RecurrentTowers`` repeats.
MIRRORED: Mirrored = {
    "ml_pipeline.policy.recurrent.Recurrent.__init__": "2d7aaa5652b3",
    "ml_pipeline.policy.recurrent.Recurrent.forward": "e28e8c257e2d",
    "ml_pipeline.policy.recurrent.Recurrent._in_segments": "8593a8436c40",
    "ml_pipeline.policy.recurrent.Recurrent._run": "8a9add71e58b",
}
_ZERO = np.float32(0.0)


def is_mirrored_recurrent(trunk: nn.Module) -> bool:
    """Whether ``RecurrentTowers`` covers a network: one layer of LSTM or GRU over an MLP."""
    if type(trunk) is not Recurrent or type(trunk.cell) not in (nn.LSTM, nn.GRU):
        return False
    cell = trunk.cell
    is_plain = cell.num_layers == 1 and cell.bias and not cell.bidirectional
    is_trained = all(each.requires_grad for each in cell.parameters())
    return is_plain and not cell.proj_size and is_trained and is_mirrored(trunk.encoder)


class Steps(NamedTuple):
    """T steps of B envs."""

    x: Array  # [T * B, n_inputs]
    start: NDArray[np.bool_]  # [T, B]: reset the states here
    memory: Array  # [B, 2 * state_size]: before the first step, of one tower after the other


class Unrolled(NamedTuple):
    """What the cells computed; ``backward`` reads it. The axis of length 2 is the towers."""

    start: NDArray[np.bool_]  # [T, B]
    gates: Array  # [T, n_gates, 2, B, size], after their activations
    entering: Array  # [T, 2, B, size]: the output of the step before, 0 after a reset
    features: Array  # [T, 2, B, size]
    state: Array  # [n_parts, 2, B, size], after the last step
    others: tuple[Array, ...]  # [T, 2, B, size] each


class _Weights:
    """The weights of one cell and room for their gradients, as views of torch tensors."""

    def __init__(self, name: str, adam: FlatParameters) -> None:
        def views(part: str) -> tuple[Array, Array]:
            values, grad = adam.views[f"{name}.{part}_l0"]
            return values.numpy(), grad.numpy()

        self.by_input, self.by_input_grad = views("weight_ih")  # [n_gates * size, n_in]
        self.by_state, self.by_state_grad = views("weight_hh")  # [n_gates * size, size]
        self.input_bias, self.input_bias_grad = views("bias_ih")
        self.state_bias, self.state_bias_grad = views("bias_hh")


class _Cells:
    """Two cells of the same kind and size.

    A step is a dozen operations on few numbers, so what counts is their number, and that their
    arrays are contiguous. sigmoid(x) = tanh(x / 2) / 2 + 1 / 2: one call of tanh covers all gates.
    """

    n_gates: int
    n_parts: int  # of the state, ``size`` numbers each
    tanh_gate = 2  # the other gates have a sigmoid

    def __init__(self, names: Sequence[str], size: int, adam: FlatParameters) -> None:
        self.size = size
        self._weights = [_Weights(name, adam) for name in names]
        self._half = np.full((self.n_gates, 1, 1, 1), 0.5, np.float32)
        self._half[self.tanh_gate] = 1.0
        self._half_rows = self._half.repeat(size, axis=0)[:, 0, 0]  # [n_gates * size, 1]

    def forward(
        self, encoded: Sequence[Array], start: NDArray[np.bool_], memory: Array
    ) -> Unrolled:
        raise NotImplementedError

    def backward(self, run: Unrolled, grad: Array) -> tuple[Array, Array]:
        """Gradients of the gates' two parts, from the inputs and from the state.

        Both are [T, 2, B, n_gates * size]; ``grad`` is that of the features.
        """
        raise NotImplementedError

    def state_of(self, memory: Array) -> Array:
        """[n_parts, 2, B, size] from the towers' memory, [B, 2 * state_size]."""
        parts = memory.reshape(len(memory), 2, self.n_parts, self.size)
        return np.ascontiguousarray(parts.transpose(2, 1, 0, 3))

    def memory_of(self, state: Array) -> Array:
        """The opposite of ``state_of``."""
        memory: Array = state.transpose(2, 1, 0, 3).reshape(state.shape[2], -1)
        return memory

    def _from_inputs(
        self, encoded: Sequence[Array], start: NDArray[np.bool_], biases: Sequence[Array]
    ) -> Array:
        """The part of the inputs and ``biases`` in all gates, [T, n_gates, 2, B, size]."""
        n_steps, n_envs = start.shape
        gates = np.empty((n_steps, self.n_gates, 2, n_envs, self.size), np.float32)
        for k, (own, bias) in enumerate(zip(self._weights, biases, strict=True)):
            part = encoded[k] @ (own.by_input * self._half_rows).T
            part += bias * self._half_rows[:, 0]
            by_gate = part.reshape(n_steps, n_envs, self.n_gates, self.size)
            gates[:, :, k] = by_gate.transpose(0, 2, 1, 3)
        return gates

    def _by_state(self) -> Array:
        """The weights for the state, [2, size, n_gates * size]."""
        weights = np.empty((2, self.size, self.n_gates * self.size), np.float32)
        for k, own in enumerate(self._weights):
            np.multiply(own.by_state.T, self._half_rows[:, 0], out=weights[k])
        return weights

    def _sigmoid(self, n_gates: int, n_envs: int) -> tuple[Array, Array]:
        """What to multiply the tanh of the first ``n_gates`` gates by, and what to add then."""
        shape = (n_gates, 2, n_envs, self.size)
        half = np.empty(shape, np.float32)
        half[...] = self._half[:n_gates]
        return half, np.float32(1.0) - half

    def _by_gate(self, grads: Array) -> Array:
        """A view [..., n_gates, 2, B, size] of gradients [..., 2, B, n_gates * size]."""
        split = grads.reshape(*grads.shape[:-1], self.n_gates, self.size)
        return np.moveaxis(split, -2, -4)

    def write_gradients(
        self, run: Unrolled, encoded: Sequence[Array], by_input: Array, by_state: Array
    ) -> list[Array]:
        """Write the gradients of the weights; returns those of ``encoded``, [T * B, n_in] each.

        ``by_input`` and ``by_state`` are what ``backward`` returns.
        """
        grads = []
        for k, own in enumerate(self._weights):
            flat = _flat(by_input[:, k])
            np.matmul(flat.T, encoded[k], out=own.by_input_grad)
            np.add.reduce(flat, axis=0, out=own.input_bias_grad)
            grads.append(flat @ own.by_input)
            if by_state is not by_input:
                flat = _flat(by_state[:, k])
            np.matmul(flat.T, _flat(run.entering[:, k]), out=own.by_state_grad)
            np.add.reduce(flat, axis=0, out=own.state_bias_grad)
        return grads


class _LSTMs(_Cells):
    """``nn.LSTM``: gates are input, forget, candidate and output; the state is hidden and cell."""

    n_gates, n_parts = 4, 2

    def forward(
        self, encoded: Sequence[Array], start: NDArray[np.bool_], memory: Array
    ) -> Unrolled:
        biases = [own.input_bias + own.state_bias for own in self._weights]
        gates = self._from_inputs(encoded, start, biases)
        weights, (half, shift) = self._by_state(), self._sigmoid(4, start.shape[1])
        first_hidden, first_cell = hidden, cell = self.state_of(memory)
        hiddens, cells, squashed = np.empty((3, len(start), *hidden.shape), np.float32)
        added = np.empty((2, start.shape[1], 4 * self.size), np.float32)
        added_by_gate, product = self._by_gate(added), np.empty_like(hidden)
        for t, is_reset in enumerate(_resets(start)):
            if is_reset:
                # Not multiplied by 0: that would keep a NaN.
                hidden, cell = (np.where(start[t, :, None], _ZERO, each) for each in (hidden, cell))
            gate = gates[t]
            np.matmul(hidden, weights, out=added)
            gate += added_by_gate
            np.tanh(gate, out=gate)
            gate *= half
            gate += shift
            given, forget, candidate, output = gate
            cell = np.multiply(forget, cell, out=cells[t])
            cell += np.multiply(given, candidate, out=product)
            hidden = np.multiply(output, np.tanh(cell, out=squashed[t]), out=hiddens[t])
        return Unrolled(
            start,
            gates,
            _entering(hiddens, first_hidden, start),
            hiddens,
            np.stack([hidden, cell]),
            (_entering(cells, first_cell, start), squashed),
        )

    def backward(self, run: Unrolled, grad: Array) -> tuple[Array, Array]:
        entering_cell, squashed = run.others
        given, forget, candidate, output = run.gates.swapaxes(0, 1)
        # d cell / d gate for three gates, d hidden / d gate for the last; d hidden / d cell.
        slopes = np.empty_like(run.gates)
        slopes[:, 0] = candidate * given * (1.0 - given)
        slopes[:, 1] = entering_cell * forget * (1.0 - forget)
        slopes[:, 2] = given * (1.0 - candidate * candidate)
        slopes[:, 3] = squashed * output * (1.0 - output)
        through = output * (1.0 - squashed * squashed)
        weights = np.stack([own.by_state for own in self._weights])
        gate_grads = np.empty((*grad.shape[:-1], 4 * self.size), np.float32)
        is_reset = _resets(run.start)
        hidden_grad, cell_grad, product = np.zeros((3, *grad.shape[1:]), np.float32)
        for t in range(len(grad) - 1, -1, -1):
            hidden_grad += grad[t]
            cell_grad += np.multiply(hidden_grad, through[t], out=product)
            slope = slopes[t]
            slope[:3] *= cell_grad
            slope[3] *= hidden_grad
            self._by_gate(gate_grads[t])[...] = slope
            np.matmul(gate_grads[t], weights, out=hidden_grad)
            cell_grad *= forget[t]
            if is_reset[t]:
                hidden_grad[:, run.start[t]] = cell_grad[:, run.start[t]] = 0.0
        return gate_grads, gate_grads


class _GRUs(_Cells):
    """``nn.GRU``: gates are reset, update and candidate; the state is the output."""

    n_gates, n_parts = 3, 1

    def forward(
        self, encoded: Sequence[Array], start: NDArray[np.bool_], memory: Array
    ) -> Unrolled:
        # The candidate's bias for the state is multiplied by the reset gate.
        biases, recalled_bias = [], np.empty((2, 1, self.size), np.float32)
        for k, own in enumerate(self._weights):
            bias = own.input_bias + own.state_bias
            bias[2 * self.size :] = own.input_bias[2 * self.size :]
            biases.append(bias)
            recalled_bias[k] = own.state_bias[2 * self.size :]
        gates = self._from_inputs(encoded, start, biases)
        weights, (half, shift) = self._by_state(), self._sigmoid(2, start.shape[1])
        first = hidden = self.state_of(memory)[0]
        hiddens, recalled = np.empty((2, len(start), *hidden.shape), np.float32)
        added = np.empty((2, start.shape[1], 3 * self.size), np.float32)
        added_by_gate, product = self._by_gate(added), np.empty_like(hidden)
        for t, is_reset in enumerate(_resets(start)):
            if is_reset:
                hidden = np.where(start[t, :, None], _ZERO, hidden)
            both, candidate = gates[t, :2], gates[t, 2]
            np.matmul(hidden, weights, out=added)
            both += added_by_gate[:2]
            np.tanh(both, out=both)
            both *= half
            both += shift
            reset, update = both
            recall = np.add(added_by_gate[2], recalled_bias, out=recalled[t])
            candidate += np.multiply(reset, recall, out=product)
            np.tanh(candidate, out=candidate)
            hidden = np.subtract(hidden, candidate, out=hiddens[t])
            hidden *= update
            hidden += candidate
        entering = _entering(hiddens, first, start)
        return Unrolled(start, gates, entering, hiddens, hidden[None], (recalled,))

    def backward(self, run: Unrolled, grad: Array) -> tuple[Array, Array]:
        (recalled,) = run.others
        reset, update, candidate = run.gates.swapaxes(0, 1)
        # d hidden / d gate; those of the candidate differ between the input and the state.
        inward = (1.0 - update) * (1.0 - candidate * candidate)
        slopes = np.empty_like(run.gates)
        slopes[:, 0] = inward * recalled * reset * (1.0 - reset)
        slopes[:, 1] = (run.entering - candidate) * update * (1.0 - update)
        slopes[:, 2] = inward * reset
        weights = np.stack([own.by_state for own in self._weights])
        by_state = np.empty((*grad.shape[:-1], 3 * self.size), np.float32)
        hidden_grads = np.empty_like(grad)
        is_reset = _resets(run.start)
        back, product = np.zeros((2, *grad.shape[1:]), np.float32)
        for t in range(len(grad) - 1, -1, -1):
            hidden_grad = np.add(back, grad[t], out=hidden_grads[t])
            np.multiply(slopes[t], hidden_grad, out=self._by_gate(by_state[t]))
            np.matmul(by_state[t], weights, out=back)
            back += np.multiply(hidden_grad, update[t], out=product)
            if is_reset[t]:
                back[:, run.start[t]] = 0.0
        by_input = by_state.copy()
        by_input[..., 2 * self.size :] = inward * hidden_grads
        return by_input, by_state


class RecurrentTowers:
    """The networks of the actor and of the critic, which have cells of the same size."""

    def __init__(self, actor: Recurrent, critic: Recurrent, adam: FlatParameters) -> None:
        trunks = {"actor": actor, "critic": critic}
        self._encoders = [
            Tower.without_head(cast("MLP", trunk.encoder), f"{name}.encoder", adam)
            for name, trunk in trunks.items()
        ]
        kind = _LSTMs if isinstance(actor.cell, nn.LSTM) else _GRUs
        self._cells = kind([f"{name}.cell" for name in trunks], actor.out_features, adam)
        self._heads = [Layer(name, adam) for name in ("policy_head", "value_head")]

    def forward(self, steps: Steps) -> tuple[Array, Array, Any]:
        """Outputs of both heads, [T * B, n_outputs] each, and what ``backward`` needs."""
        passed = [encoder.forward(steps.x) for encoder in self._encoders]
        run = self._cells.forward([each[-1] for each in passed], steps.start, steps.memory)
        features = [_flat(run.features[:, k]) for k in (0, 1)]
        outputs, value = (
            head.forward(each) for head, each in zip(self._heads, features, strict=True)
        )
        return outputs, value, (passed, run, features)

    def memory(self, kept: Any) -> Array:
        """The recurrent state after the last step of ``forward``, [B, memory_size]."""
        return self._cells.memory_of(kept[1].state)

    def backward(self, kept: Any, grads: Sequence[Array]) -> None:
        """Write the gradients of all layers; ``grads`` are those of both outputs."""
        passed, run, features = kept
        features_grad = np.empty_like(run.features)
        for k, (head, grad) in enumerate(zip(self._heads, grads, strict=True)):
            head.write_gradient(features[k], grad)
            upstream = head.backward(grad)
            features_grad[:, k] = upstream.reshape(features_grad[:, k].shape)
        encoded = [each[-1] for each in passed]
        gate_grads = self._cells.backward(run, features_grad)
        encoded_grads = self._cells.write_gradients(run, encoded, *gate_grads)
        for encoder, each, grad in zip(self._encoders, passed, encoded_grads, strict=True):
            encoder.backward(each, grad)


def _flat(sequences: Array) -> Array:
    """[T * B, size] from [T, B, size]."""
    flat: Array = sequences.reshape(-1, sequences.shape[-1])
    return flat


def _resets(start: NDArray[np.bool_]) -> list[bool]:
    """Whether any state is reset, for each step."""
    found: list[bool] = np.logical_or.reduce(start, axis=1).tolist()
    return found


def _entering(left: Array, first: Array, start: NDArray[np.bool_]) -> Array:
    """What each step starts from, if ``left`` are the results of the steps, [T, 2, B, size]."""
    entering = np.concatenate([first[None], left[:-1]])
    entering.swapaxes(1, 2)[start] = 0.0
    return entering
