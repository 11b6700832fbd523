"""load_parts: what a new agent takes over from the checkpoint of another, for ``init_from``."""

from __future__ import annotations

from collections.abc import Sequence

from ml_pipeline.protocols import Agent, StateDict
from ml_pipeline.runs.checkpoint import first_difference


def load_parts(agent: Agent, state: StateDict, names: Sequence[str]) -> None:
    """Load these entries of another agent's state; ``ValueError`` if they do not fit."""
    own = agent.state_dict()
    learnt = {name: state.get(name) for name in names}
    difference = first_difference({name: own[name] for name in learnt}, learnt)
    if difference is not None:
        raise ValueError(difference)
    agent.load_state_dict({**own, **learnt})
