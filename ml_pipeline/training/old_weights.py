"""load_parts: what a new agent takes over from the checkpoint of another, for ``init_from``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ml_pipeline.errors import shorten
from ml_pipeline.records import StateDict
from ml_pipeline.training.contracts import Agent


def load_parts(agent: Agent, state: StateDict, names: Sequence[str]) -> None:
    """Load these entries of another agent's state; ``ValueError`` if they do not fit."""
    own = agent.state_dict()
    learnt = {name: state.get(name) for name in names}
    difference = first_difference({name: own[name] for name in learnt}, learnt)
    if difference is not None:
        raise ValueError(difference)
    agent.load_state_dict({**own, **learnt})


def first_difference(own: Any, saved: Any, what: str = "") -> str | None:
    """Where two states differ in names, shapes, types or plain values; None: they fit each other.

    The values of tensors may differ.
    """
    if isinstance(own, dict) and isinstance(saved, dict):
        for name in dict.fromkeys([*own, *saved]):
            place = f"{what}.{name}" if what else str(name)
            if name not in own or name not in saved:
                return f"{place} exists only {'here' if name in own else 'there'}"
            if (difference := first_difference(own[name], saved[name], place)) is not None:
                return difference
        return None
    shown = [_form(each) for each in (saved, own)]
    return None if shown[0] == shown[1] else f"{what} is {shown[0]} there and {shown[1]} here"


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return shorten(repr(value))
