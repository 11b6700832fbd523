"""Checks at the start of a run that a fast backend computes the same as plain torch.

Someone who edits the loss, a network or a distribution edits the plain torch code. The fast
backends are separate code. This check finds that they differ, and the agent then uses plain torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.records import Minibatch, Rates, UpdateResult
from ml_pipeline.errors import type_and_line
from ml_pipeline.policy.contracts import PolicyInput

if TYPE_CHECKING:
    from ml_pipeline.algorithms.ppo.agent import PPOAgent
    from ml_pipeline.algorithms.ppo.fast.choice import FastPPO

_N_ROWS = 128
# Relative differences that rounding explains: several times those measured on an H200.
_TOLERANCES = {"float32": 1e-3, "tf32": 2e-2, "bf16": 5e-2}
_SHARE_OF_ACTIONS = 0.1  # that may differ: rounding moves a draw to the next action


def why_not(agent: PPOAgent, fast: FastPPO) -> str | None:
    """What ``fast`` computes differently from plain torch, or None; changes nothing."""
    adam = agent.adam
    kept = [adam.values, adam.grad, *adam.moments, adam.n_steps]
    before = [each.clone() for each in kept]
    # A new policy gives all actions the same probability; there, the entropy has no gradient.
    change = torch.randn(len(adam.values), generator=torch.Generator().manual_seed(0))
    try:
        adam.values += 0.1 * change.to(agent.device)
        start = [each.clone() for each in kept]
        agent.fast = None
        rollout, noise = _rollout(agent)
        expected = _results(agent, rollout, noise)
        _restore(kept, start)
        agent.fast = fast
        found = _results(agent, rollout, noise)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if agent.fast is None:
            raise  # the user's own code, which would fail in the run as well
        return type_and_line(error)  # no compiler, no headers, too little shared memory, a bug
    finally:
        agent.fast = fast
        _restore(kept, before)
    return difference(found, expected, _TOLERANCES[agent.plain.precision])


def _restore(kept: list[Tensor], before: list[Tensor]) -> None:
    for held, old in zip(kept, before, strict=True):
        held.copy_(old)


def _rollout(agent: PPOAgent) -> tuple[Minibatch, Tensor]:
    """Random transitions of an older policy, with ratios on both sides of every clip; and noise.

    In a real first minibatch every ratio is 1, so a changed clip would not be noticed.
    """
    generator = torch.Generator().manual_seed(0)
    shape = agent.spaces["observation_space"].shape or ()

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(_N_ROWS, *sizes, generator=generator).to(agent.device)

    noise = agent.draw_noise(1, _N_ROWS, generator)[0]
    mask = None
    if agent.masks.are_used:
        n_actions = int(agent.distribution.n_outputs)
        mask = torch.rand(_N_ROWS, n_actions, generator=generator) < 0.7
        mask[:, 0] = True
        mask = mask.to(agent.device)
    inputs = PolicyInput(drawn(*shape), mask, None, None)
    action = agent.sample_batch(inputs, noise).action
    log_prob, value = agent.score_batch(inputs, action)
    # From a ratio of 0.2 to one of 4.5, in an order without a pattern.
    log_ratio = torch.linspace(-1.5, 1.5, _N_ROWS)[torch.randperm(_N_ROWS, generator=generator)]
    clip, dual = agent.config.clip_range, agent.config.dual_clip
    bounds = [math.log(each) for each in (1.0 - clip, 1.0 + clip, dual) if each and each > 0.0]
    log_ratio = _clear_of(bounds, log_ratio.to(agent.device), margin=0.05 * clip)
    moved = _clear_of([-clip, clip], drawn(), margin=0.05 * clip)
    old = log_prob - log_ratio, value - moved
    return Minibatch(inputs, action, *old, drawn(), drawn()), noise


def _clear_of(bounds: list[float], numbers: Tensor, *, margin: float) -> Tensor:
    """Move numbers away from bounds, so that rounding does not decide which side they are on."""
    for bound in bounds:
        numbers = torch.where((numbers - bound).abs() < margin, bound + 2.0 * margin, numbers)
    return numbers


def _results(agent: PPOAgent, rollout: Minibatch, noise: Tensor) -> dict[str, Tensor]:
    """By name; one gradient step is part of it."""
    config, inputs = agent.config, rollout.inputs
    with torch.no_grad():
        outputs = agent.backend.outputs(inputs)[0]
    log_prob, value = agent.score_batch(inputs, rollout.action)
    results = {
        "the policy's outputs": outputs,
        "actions": agent.sample_batch(inputs, noise).action,
        "log-probabilities": log_prob,
        "values": value,
    }
    numbers = (config.learning_rate, config.clip_range, config.entropy_coef)
    rates = Rates(*torch.tensor(numbers, device=agent.device).unbind())
    order = torch.arange(_N_ROWS, device=agent.device).unsqueeze(0)
    start = agent.adam.values.clone()
    table = agent.epoch(rollout, order, rates)
    for name, column in zip(UpdateResult._fields, table.float().unbind(1), strict=True):
        results[name.replace("_", " ")] = column
    # The running mean is linear in the gradients, so this compares each parameter's gradients.
    mean = agent.adam.moments[0]
    for name, (values, _) in agent.adam.views.items():
        begin = agent.adam.place(name)
        results[f"the gradient of {name}"] = mean[begin : begin + values.numel()].clone()
    results["the optimiser's step"] = agent.adam.values - start
    return {name: each.detach().cpu() for name, each in results.items()}


def difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> str | None:
    """The first result that differs by more than rounding."""
    gradients = [each for name, each in expected.items() if name.startswith("the gradient")]
    # Rounding errors of a small gradient come from the larger numbers it is the sum of.
    smallest = 1e-3 * float(torch.cat(gradients).norm())
    for name, theirs in expected.items():
        ours, limit = found[name], tolerance
        if theirs.dtype == torch.int64:
            apart, limit = float((ours != theirs).float().mean()), _SHARE_OF_ACTIONS
        else:
            scale = max(float(theirs.norm()), smallest if name.startswith("the gradient") else 1e-6)
            apart = float((ours - theirs).norm()) / scale
        if name == "the optimiser's step":
            # Adam's first steps have the size of the learning rate even where the gradient is
            # almost 0, so rounding can reverse a few of them.
            limit = max(10 * tolerance, 0.1)
        if not apart <= limit:
            return f"{name}: {apart:.1%} apart"
    return None
