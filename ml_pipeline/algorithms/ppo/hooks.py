"""What a config adds to an iteration of PPO: an advantage estimate, and ``agent.on_rollout``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.rollout import Rollout
from ml_pipeline.errors import UserError
from ml_pipeline.records import Metrics, StateDict
from ml_pipeline.targets import check_arguments, import_entry, instantiate
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.returns import Estimator

_DISCOUNTS = dict.fromkeys(("gamma", "lam"))  # keywords of an estimate


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
        told = self._call(rollout)
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
