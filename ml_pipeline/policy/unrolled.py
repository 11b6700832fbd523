"""unrolled: all steps of an LSTM or GRU; episode starts are data, so a CUDA graph can capture it.

Several steps are one operation, with a gradient written by hand. torch's compiler would need
minutes for the thousands of operations inside. Steps and gates are those of ``nn.LSTM`` and
``nn.GRU``; the rows of ``weight`` tell which: four gates or three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def unrolled(
    given: Tensor, weight: Tensor, bias: Tensor, state: Tensor, episode_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Features [T, B, size] and the last state, from the part of the inputs in all gates.

    ``given`` is [T, B, n_gates * size], ``weight`` and ``bias`` are those for the state. ``state``
    is [B, size], or of an LSTM [B, 2 * size]: hidden and cell. It is 0 at an ``episode_start``
    [T, B].
    """
    if len(given) == 1:  # acting
        state, *_ = _one_step(given[0], weight, bias, state, episode_start[0])
        return state[:, : weight.shape[1]].unsqueeze(0), state
    features, state, *_ = all_steps(given, weight, bias, state, episode_start)
    return features, state


def _one_step(
    given: Tensor, weight: Tensor, bias: Tensor, state: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The next state, the one that the step began with, and what the gradient needs besides."""
    # Not multiplied by 0: that would keep a NaN.
    state = state.masked_fill(start.unsqueeze(-1), 0.0)
    from_state = functional.linear(state[:, : weight.shape[1]], weight, bias)
    step = _lstm_step if _is_lstm(weight) else _gru_step
    next_state, gates = step(given, from_state, state)
    return next_state, state, gates


def _is_lstm(weight: Tensor) -> bool:
    return weight.shape[0] == 4 * weight.shape[1]


def _lstm_step(given: Tensor, from_state: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gates are input, forget, candidate and output."""
    written, forget, candidate, output = (given + from_state).chunk(4, dim=-1)
    written, forget, output = (torch.sigmoid(each) for each in (written, forget, output))
    candidate = torch.tanh(candidate)
    carried = forget * state.chunk(2, dim=-1)[1] + written * candidate
    next_state = torch.cat([output * torch.tanh(carried), carried], dim=-1)
    return next_state, torch.cat([written, forget, candidate, output], dim=-1)


def _gru_step(given: Tensor, from_state: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The gates are reset, update and candidate."""
    given_reset, given_update, given_candidate = given.chunk(3, dim=-1)
    reset, update, recalled = from_state.chunk(3, dim=-1)
    reset, update = torch.sigmoid(given_reset + reset), torch.sigmoid(given_update + update)
    candidate = torch.tanh(given_candidate + reset * recalled)
    next_hidden = candidate + update * (hidden - candidate)
    return next_hidden, torch.cat([reset, update, candidate, recalled], dim=-1)


@torch.library.custom_op(
    "ml_pipeline::all_steps",
    mutates_args=(),
    schema=(
        "(Tensor given, Tensor weight, Tensor bias, Tensor state, Tensor episode_start) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def all_steps(
    given: Tensor, weight: Tensor, bias: Tensor, state: Tensor, episode_start: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``unrolled``, and for the gradient: the state that each step began with, and its gates."""
    states, before, gates = [], [], []
    for row, start in zip(given.unbind(), episode_start.unbind(), strict=True):
        state, began, gate = _one_step(row, weight, bias, state, start)
        states.append(state)
        before.append(began)
        gates.append(gate)
    features = torch.stack([each[:, : weight.shape[1]] for each in states])
    return features, state, torch.stack(before), torch.stack(gates)


@all_steps.register_fake
def _(given: Tensor, weight: Tensor, bias: Tensor, state: Tensor, episode_start: Tensor) -> Any:
    n_steps, n_envs, size = *given.shape[:2], weight.shape[1]
    return (
        state.new_empty(n_steps, n_envs, size),
        state.new_empty(state.shape),
        state.new_empty(n_steps, *state.shape),
        state.new_empty(n_steps, n_envs, 4 * size),
    )


@torch.library.custom_op(
    "ml_pipeline::all_steps_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor state_grad, Tensor weight, Tensor before, Tensor gates, "
        "Tensor episode_start) -> (Tensor, Tensor, Tensor)"
    ),
)
def all_steps_backward(
    grad: Tensor,
    state_grad: Tensor,
    weight: Tensor,
    before: Tensor,
    gates: Tensor,
    episode_start: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``given``, of the state's part in all gates [T, B, ...], and of ``state``."""
    backward = _lstm_backward if _is_lstm(weight) else _gru_backward
    return backward(grad, state_grad, weight, before, gates, episode_start.unsqueeze(-1))


def _lstm_backward(
    grad: Tensor, state_grad: Tensor, weight: Tensor, before: Tensor, gates: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    written, forget, candidate, output = gates.chunk(4, dim=-1)
    carried = before.chunk(2, dim=-1)[1]
    squashed = torch.tanh(forget * carried + written * candidate)
    # d cell / d gate for three gates, d hidden / d gate for the last; d hidden / d cell.
    slopes = torch.stack(
        [
            candidate * written * (1.0 - written),
            carried * forget * (1.0 - forget),
            written * (1.0 - candidate.square()),
        ],
        dim=2,
    )
    output_slope = squashed * output * (1.0 - output)
    through = output * (1.0 - squashed.square())
    gate_grad = torch.empty_like(gates)
    by_gate = gate_grad.view(*gates.shape[:2], 4, -1)
    hidden_grad, cell_grad = state_grad.chunk(2, dim=-1)
    for t in range(len(grad) - 1, -1, -1):
        hidden_grad = hidden_grad + grad[t]
        cell_grad = torch.addcmul(cell_grad, hidden_grad, through[t])
        torch.mul(slopes[t], cell_grad.unsqueeze(1), out=by_gate[t, :, :3])
        torch.mul(output_slope[t], hidden_grad, out=by_gate[t, :, 3])
        hidden_grad = (gate_grad[t] @ weight).masked_fill_(start[t], 0.0)
        cell_grad = (cell_grad * forget[t]).masked_fill_(start[t], 0.0)
    return gate_grad, gate_grad.clone(), torch.cat([hidden_grad, cell_grad], dim=-1)


def _gru_backward(
    grad: Tensor, state_grad: Tensor, weight: Tensor, before: Tensor, gates: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    reset, update, candidate, recalled = gates.chunk(4, dim=-1)
    # d hidden / d gate; those of the candidate differ between the input and the state.
    inward = (1.0 - update) * (1.0 - candidate.square())
    slopes = torch.stack(
        [
            inward * recalled * reset * (1.0 - reset),
            (before - candidate) * update * (1.0 - update),
            inward * reset,
        ],
        dim=2,
    )
    from_state_grad = torch.empty_like(slopes)
    hidden_grads = torch.empty_like(before)
    carried = state_grad
    for t in range(len(grad) - 1, -1, -1):
        hidden_grad = torch.add(carried, grad[t], out=hidden_grads[t])
        torch.mul(slopes[t], hidden_grad.unsqueeze(1), out=from_state_grad[t])
        carried = from_state_grad[t].flatten(1) @ weight
        carried = carried.addcmul_(hidden_grad, update[t]).masked_fill_(start[t], 0.0)
    given_grad = from_state_grad.clone()
    torch.mul(inward, hidden_grads, out=given_grad[:, :, 2])
    return given_grad.flatten(2), from_state_grad.flatten(2), carried


@all_steps_backward.register_fake
def _(
    grad: Tensor,
    state_grad: Tensor,
    weight: Tensor,
    before: Tensor,
    gates: Tensor,
    episode_start: Tensor,
) -> Any:
    shape = *grad.shape[:2], weight.shape[0]
    return grad.new_empty(shape), grad.new_empty(shape), state_grad.new_empty(state_grad.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, weight, _, _, episode_start = inputs
    _, _, before, gates = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, before, gates, episode_start)


def _backward(ctx: Any, grad: Tensor | None, state_grad: Tensor | None, *_: Any) -> Any:
    weight, before, gates, episode_start = ctx.saved_tensors
    size = weight.shape[1]
    grad = before.new_zeros(*before.shape[:2], size) if grad is None else grad
    state_grad = torch.zeros_like(before[0]) if state_grad is None else state_grad
    given_grad, from_state_grad, first_grad = all_steps_backward(
        grad, state_grad, weight, before, gates, episode_start
    )
    flat = from_state_grad.flatten(0, 1)
    weight_grad = flat.T @ before[..., :size].flatten(0, 1)
    return given_grad, weight_grad, flat.sum(dim=0), first_grad, None


all_steps.register_autograd(_backward, setup_context=_keep)
