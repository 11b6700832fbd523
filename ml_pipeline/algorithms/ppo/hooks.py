"""What a config adds to an iteration of PPO: an advantage estimate, and ``agent.on_rollout``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.rollout import Rollout
from ml_pipeline.errors import UserError, place_of, type_and_line
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.targets import check_arguments, import_entry, instantiate
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.returns import Estimator, RolloutOutcome, gae

_DISCOUNTS = dict.fromkeys(("gamma", "lam"))  # keywords of an estimate


def check_estimator(config: PPOConfig) -> None:
    """Call the user's own estimate once, so that a mistake is found before the run starts."""
    estimator = find_estimator(config)
    if estimator is gae:
        return
    draw = np.random.default_rng(0).standard_normal
    rows: list[Any] = [draw(size).astype(np.float32) for size in ((5, 3), (5, 3), (3,), (5, 3))]
    ends = [draw((5, 3)) > 1 for _ in range(2)]
    tensors = RolloutOutcome._make(map(torch.from_numpy, [*rows, *ends]))
    target = f"agent.advantage._target_={config.advantage['_target_']}"
    cause: Exception
    for outcome in (tensors, RolloutOutcome(*rows, *ends)):  # it may know only one kind
        try:
            outcome.estimate(estimator, gamma=config.gamma, lam=config.gae_lambda)
            return
        except UserError as error:
            mistake, cause = str(error), error
        except Exception as error:  # a user's function may raise anything
            mistake, cause = f"raised {type_and_line(error)}{place_of(error)}", error
    raise UserError(f"{target}: {mistake}") from cause


def find_estimator(config: PPOConfig) -> Estimator:
    """The function that ``agent.advantage`` names; ``returns.gae`` is the default."""
    estimator, options = import_entry(config.advantage, key="agent.advantage")
    check_arguments(estimator, {**_DISCOUNTS, **options}, key="agent.advantage", given=4)
    return partial(estimator, **options) if options else estimator


_HOOK = "agent.on_rollout"


def find_hook(entry: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function or class that ``agent.on_rollout`` names, and its arguments."""
    target, options = import_entry(entry, key=_HOOK)
    if not inspect.isclass(target):
        check_arguments(target, options, key=_HOOK, given=1)
    return target, options


class RolloutHook:
    """``agent.on_rollout``: called after each rollout, before its values are computed.

    A function is called with the ``Rollout``. A class is built once, with what its constructor
    names of ``agent`` and ``context``; its objects are called with each ``Rollout``, and may have
    ``state_dict`` and ``load_state_dict``. Both may return metrics by name.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    @classmethod
    def of(cls, agent: PPOAgent, context: RunContext) -> RolloutHook | None:
        entry = agent.config.on_rollout
        if entry is None:
            return None
        target, options = find_hook(entry)
        if inspect.isclass(target):
            return cls(instantiate(entry, key=_HOOK, offers={"agent": agent, "context": context}))
        return cls(partial(target, **options))

    def __call__(self, rollout: Rollout) -> Metrics:
        before = copy(rollout)
        told = self._call(rollout)
        for field in fields(rollout):
            now, its = getattr(rollout, field.name), getattr(before, field.name)
            if now is not its and field.name != "reward":
                raise UserError(
                    f"{_HOOK} replaced rollout.{field.name}; only rollout.reward can be replaced"
                )
        if rollout.reward is not before.reward:
            before.reward[...] = rollout.reward
        if told is None:
            return {}
        if not isinstance(told, Mapping):
            raise UserError(
                f"agent.on_rollout returned a {type(told).__name__}; return None, or a dict of "
                "metrics by name"
            )
        return {name: float(value) for name, value in told.items()}

    def state_dict(self) -> StateDict:
        return self._call.state_dict() if hasattr(self._call, "state_dict") else {}

    def load_state_dict(self, state: StateDict) -> None:
        if hasattr(self._call, "load_state_dict"):
            self._call.load_state_dict(state)
