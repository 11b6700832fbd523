"""check_loss: calls a user's own loss once, so that a mistake is found before the run starts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import LossTerms, Minibatch, Rates, current
from ml_pipeline.algorithms.ppo.reports import UPDATE_METRICS
from ml_pipeline.errors import UserError, place_of, type_and_line
from ml_pipeline.policy.actor_critic import one_step
from ml_pipeline.policy.observations import batched

_N_ROWS = 4
_WANTED = f"return LossTerms({', '.join(LossTerms._fields[:4])}), four scalar tensors"


class LossError(UserError):
    """The function that agent.loss names cannot be a loss."""


def check_loss(agent: PPOAgent) -> None:
    """Call the loss with a few made-up transitions; changes nothing."""
    target = f"agent.loss._target_={agent.config.loss['_target_']}"
    try:
        batch = _made_up(agent)
        now = current(agent.model, agent.plain.passed, batch, torch.tensor(0, device=agent.device))
    except Exception:
        return  # the network is wrong, and not the loss: its own trial explains it
    config = agent.config
    numbers = (config.learning_rate, config.clip_range, config.entropy_coef)
    rates = Rates(*torch.tensor(numbers, device=agent.device).unbind())
    try:
        terms = agent.plain.loss(now, batch, rates, config)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a user's loss may raise anything
        raise LossError(f"{target}: raised {type_and_line(error)}{place_of(error)}") from error
    if (mistake := _mistake(terms)) is not None:
        raise LossError(f"{target}: returned {mistake}; {_WANTED}")


def _made_up(agent: PPOAgent) -> Minibatch:
    """Random transitions of the current policy; of one step if it is recurrent."""
    space, generator = deepcopy(agent.spaces["observation_space"]), torch.Generator().manual_seed(0)
    space.seed(0)
    leaves = agent.reader.read(batched(space, [space.sample() for _ in range(_N_ROWS)]))
    inputs = agent.inputs(leaves, memory=agent.new_memory(_N_ROWS))
    if agent.masks.are_used:
        allowed = torch.ones(_N_ROWS, agent.distribution.mask_size, dtype=torch.bool)
        inputs = inputs._replace(action_mask=allowed.to(agent.device))
    if agent.memory_size:
        start = torch.ones(_N_ROWS, dtype=torch.bool, device=agent.device)
        inputs = inputs._replace(episode_start=start)
    noise = agent.draw_noise(1, _N_ROWS, generator)[0]
    action = agent.sample_batch(inputs, noise).action
    if agent.memory_size:
        inputs, action = one_step(inputs), action.unsqueeze(0)
    log_prob, value = agent.score_batch(inputs, action)
    advantage, target = torch.randn(2, *value.shape, generator=generator).to(agent.device)
    return Minibatch(inputs, action, log_prob, value, advantage, target)


def _mistake(terms: Any) -> str | None:
    """What is wrong with the result of a loss, or None."""
    if not isinstance(terms, LossTerms):
        length = f" of {len(terms)}" if isinstance(terms, (tuple, list)) else ""
        return f"a {type(terms).__name__}{length}"
    if not isinstance(terms.extra, Mapping):
        return f"a {type(terms.extra).__name__} as extra, which is a dict of scalars by name"
    for name, term in {**terms.extra, **terms._asdict()}.items():
        if name == "extra":
            continue
        if name in UPDATE_METRICS:
            return f"an extra metric {name!r}, a name that PPO uses"
        if not isinstance(term, Tensor):
            return f"a {type(term).__name__} as {name}"
        if term.shape != ():
            return f"a tensor of shape {tuple(term.shape)} as {name}"
    if not terms.total.requires_grad:
        return "a total without a gradient, perhaps detached"
    return None
