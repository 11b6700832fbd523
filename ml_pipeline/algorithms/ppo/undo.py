"""undone_if_stopped: a stop signal may end a long update, and then it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ml_pipeline.records import StateDict


@contextmanager
def undone_if_stopped(
    state_dict: Callable[[], StateDict],
    load_state_dict: Callable[[StateDict], None],
    *,
    enabled: bool,
) -> Iterator[None]:
    """If a stop signal interrupts the block, restore the state from before it."""
    if not enabled:
        yield
        return
    before = _copied(state_dict())
    try:
        yield
    except KeyboardInterrupt:
        load_state_dict(before)
        raise


def _copied(state: Any) -> Any:
    """Like ``copy.deepcopy``, which takes several times as long; this runs in every iteration."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _copied(part) for name, part in state.items()}
    return state if isinstance(state, (int, float, str)) else copy.deepcopy(state)
