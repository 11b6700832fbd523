"""Checks at the start of a run that NumpyDQN computes the same as plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.fast.self_check import difference
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.errors import type_and_line
from ml_pipeline.policy.contracts import PolicyInput

if TYPE_CHECKING:
    from ml_pipeline.algorithms.dqn.agent import DQNAgent
    from ml_pipeline.algorithms.dqn.fast.numpy_dqn import NumpyDQN

_N_ROWS = 128
_TOLERANCE = 1e-3  # of a relative difference; rounding explains 1e-6


def why_not_dqn(agent: DQNAgent, fast: NumpyDQN) -> str | None:
    """What ``fast`` computes differently from plain torch, or None; changes nothing."""
    before = agent.adam.grad.clone()
    batch = _transitions(agent)
    try:
        expected = _results(agent, batch, agent.plain_values, agent.plain_gradient)
        try:
            found = _results(agent, batch, fast.values, fast.gradient)
        except Exception as error:  # a bug; plain torch still works
            return type_and_line(error)
    finally:
        agent.adam.grad.copy_(before)
    return difference(found, expected, _TOLERANCE)


def _transitions(agent: DQNAgent) -> ReplayBatch:
    """Random ones, with TD errors on both sides of the Huber loss."""
    generator = torch.Generator().manual_seed(0)
    shape = agent.spaces["observation_space"].shape or ()
    n_actions = int(agent.distribution.n_outputs)
    inputs = []
    for _ in range(2):
        mask = None
        if agent.masks.are_used:
            mask = torch.rand(_N_ROWS, n_actions, generator=generator) < 0.7
            mask[:, 0] = True
        obs = torch.randn(_N_ROWS, *shape, generator=generator)
        inputs.append(PolicyInput(obs, mask, None, None))
    return ReplayBatch(
        inputs[0],
        torch.randint(n_actions, (_N_ROWS,), generator=generator),
        3.0 * torch.randn(_N_ROWS, generator=generator),
        inputs[1],
        agent.config.gamma * (torch.rand(_N_ROWS, generator=generator) < 0.8),
        torch.rand(_N_ROWS, generator=generator),
    )


def _results(agent: DQNAgent, batch: ReplayBatch, values: Any, gradient: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        results = {"values": values(batch.inputs)}
    names = "the loss", "the mean value", "TD errors"
    results |= zip(names, gradient(batch), strict=True)
    for name, (_, grad) in agent.adam.views.items():
        results[f"the gradient of {name}"] = grad.flatten()
    return {name: torch.as_tensor(each).detach().clone() for name, each in results.items()}
