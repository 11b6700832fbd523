"""pickled and pickled_fault: the payloads of a worker's replies.

Spawned workers import this module: keep torch out of it.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import cloudpickle

from ml_pipeline.envs.workers.errors import WorkerError, error_from
from ml_pipeline.envs.workers.slice import EnvSlice


def pickled(result: Any, envs: EnvSlice | None) -> bytes:
    """Raises a ``WorkerError`` that names the env whose part of ``result`` cannot be pickled."""
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception:  # a lambda, or a class of the main script; cloudpickle is slower
        try:
            return bytes(cloudpickle.dumps(result))
        except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
            if envs is not None:
                _raise_for_part(result, envs)
            raise error


def _raise_for_part(result: Any, envs: EnvSlice) -> None:
    for row, what, part in _parts(result, envs.rows):
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            raise error_from(
                error,
                f"{envs.name_of(row)}: {what} cannot be sent from a worker: "
                f"{type(error).__name__}: {error}; leave it out, or use SerialEnv "
                "(vec_env=serial)",
            ) from error


def _parts(result: Any, rows: list[int]) -> Iterator[tuple[int, str, Any]]:
    """Index of the env, what it is, and the part of the result itself."""
    if isinstance(result, tuple):  # a SliceReport
        infos, obs, final_obs, _ = result
        for row, last, final_info, info in infos:
            yield row, "its observation", last
            for name, value in [*final_info.items(), *info.items()]:
                yield row, f"info[{name!r}]", value
        for objects in [*obs, *final_obs]:
            for row, value in zip(rows, objects, strict=True):
                yield row, "its observation", value
    elif isinstance(result, list):  # of a call, or of the envs just built
        for row, value in zip(rows[-len(result) :], result, strict=True):
            yield row, "its result", value


def pickled_fault(error: BaseException) -> bytes:
    if isinstance(error, WorkerError):
        message, original = str(error), error.__cause__
    else:
        # No env raised this: a factory or a result could not be pickled or unpickled.
        trace = "".join(traceback.format_exception(error)).rstrip()
        message, original = f"the worker failed:\n{trace}", error
    try:
        cause = cloudpickle.dumps(original)
        pickle.loads(cause)  # some exceptions can be pickled, but not unpickled
    except Exception:  # a user's __reduce__ may raise anything; the message says enough
        cause = b""
    return pickle.dumps((message, cause))
