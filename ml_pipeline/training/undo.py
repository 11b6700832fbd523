"""undone_if_stopped: a stop signal may end a long update, and then it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ml_pipeline.protocols import StateDict


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
    before = copy.deepcopy(state_dict())
    try:
        yield
    except KeyboardInterrupt:
        load_state_dict(before)
        raise
