"""Checks at the start of a run that MlpSAC computes the same as plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.fast.self_check import difference
from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.errors import type_and_line
from ml_pipeline.policy.contracts import PolicyInput

if TYPE_CHECKING:
    from ml_pipeline.algorithms.sac.agent import SACAgent

_TOLERANCE = 1e-3  # of a relative difference; rounding explains 1e-6
_REDUCED_TOLERANCE = 3e-2  # with tf32


def why_not_sac(agent: SACAgent) -> str | None:
    """What the fast backend computes differently from plain torch, or None; changes nothing."""
    batch = _transitions(agent)
    is_reduced = agent.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    tolerance = _REDUCED_TOLERANCE if is_reduced else _TOLERANCE
    for trains_actor in (True, False) if agent.config.policy_delay > 1 else (True,):
        expected = _results(agent, batch, agent.plain_step, trains_actor)
        try:
            found = _results(agent, batch, agent.gradient_step, trains_actor)
        except Exception as error:  # a bug; plain torch still works
            return type_and_line(error)
        if reason := difference(found, expected, tolerance):
            return reason
    return None


def _results(
    agent: SACAgent, batch: ReplayBatch, step: Callable[..., Any], trains_actor: bool
) -> dict[str, Tensor]:
    """A step of size 0, so that all gradients belong to the same weights."""
    tensors = [each for adam in agent.adams.values() for each in adam.tensors]
    tensors += [agent.target_values, agent.last_actor]
    before, generator = [each.clone() for each in tensors], agent.update_generator
    drawn = generator.get_state()
    try:
        # Targets that differ from the critics, so that mixing them up is found.
        agent.target_values.mul_(0.9)
        rates: Any = agent.rates(0.0, 0.0)
        if agent.device.type != "cpu":  # as tensors, which is how a run passes them
            rates = rates._replace(learning_rate=torch.zeros((), device=agent.device))
        result = step(batch, rates, trains_actor)
        results = {f"the metric {name}": getattr(result, name) for name in agent.metric_names}
        results["the target critics"] = agent.target_values
        for name, adam in agent.adams.items():
            results[f"the gradient of {name}"] = adam.moments[0]  # a tenth of it
        return {name: each.detach().clone() for name, each in results.items()}
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        generator.set_state(drawn)


def _transitions(agent: SACAgent) -> ReplayBatch:
    """Random ones, as many as in a batch: compiled functions are made for its size."""
    generator = torch.Generator().manual_seed(0)
    n, shape = agent.config.batch_size, agent.spaces["observation_space"].shape or ()

    def inputs() -> PolicyInput:
        obs = torch.randn(n, *shape, generator=generator)
        return PolicyInput(obs.to(agent.device), None, None, None)

    parts = (
        torch.rand(n, *agent.distribution.action_shape, generator=generator) * 2.0 - 1.0,
        torch.randn(n, generator=generator),
        agent.config.gamma * (torch.rand(n, generator=generator) < 0.8),
        torch.rand(n, generator=generator),
    )
    action, reward, discount, weight = (each.to(agent.device) for each in parts)
    return ReplayBatch(inputs(), action, reward, inputs(), discount, weight)
