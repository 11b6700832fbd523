"""WorkerError and its subclasses: raised by a vector env when an env or a worker fails."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from typing import Any

from ml_pipeline.errors import BrokenEnvError


class WorkerError(BrokenEnvError, RuntimeError):
    """An env raised, or the process that ran it died or stopped answering.

    If an env raised, this error can also be caught as the type that the env raised. The original
    exception is its ``__cause__``.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote the message


class WorkerTimeoutError(WorkerError, multiprocessing.TimeoutError, TimeoutError):
    """A worker did not answer in time."""


class AnswerPendingError(WorkerTimeoutError):
    """This call timed out, but the answer may still arrive; wait again."""


class WorkerStartError(WorkerError):
    """This process cannot start workers; ``SerialEnv`` still works."""


def error_from(cause: BaseException | None, message: str) -> WorkerError:
    """A ``WorkerError`` that can also be caught as the type of ``cause``, if Python allows it."""
    error = WorkerError(message)
    if isinstance(cause, Exception):
        members = {"__module__": __name__, "__reduce__": _reduce}
        with contextlib.suppress(TypeError):  # the two classes have incompatible layouts
            kind = type("WorkerError", (WorkerError, type(cause)), members)
            maker: Any = OSError if issubclass(kind, OSError) else kind
            error = maker.__new__(kind, message)
            error.__dict__.update(vars(cause))
    error.args = (message,)
    error.__cause__ = cause
    return error


def _reduce(error: WorkerError) -> tuple[object, ...]:
    """Pickle the arguments of ``error_from``: the class exists in this process only."""
    return error_from, (error.__cause__, str(error))


def env_names(rows: Sequence[int]) -> str:
    """``env 3`` or ``envs 0-3, 8``."""
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row for row in rows if row + 1 not in rows]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"env{'s' if len(rows) > 1 else ''} {', '.join(runs)}"
