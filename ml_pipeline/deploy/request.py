"""The body of a /predict request: JSON, checked against the inputs of a policy."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.agents.policy import MASK, MEMORY
from ml_pipeline.deploy.exported import Arrays, ExportedPolicy, TensorSpec
from ml_pipeline.errors import UserError


class RefusedError(Exception):
    """The server answers this request with an HTTP error and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Query(NamedTuple):
    """A checked request."""

    inputs: Arrays  # [n_rows, ...] each
    n_rows: int
    is_batch: bool  # False: a single observation; the answer has no batch dimension


def read_query(policy: ExportedPolicy, body: bytes, *, max_rows: int) -> Query:
    """The inputs of the policy in ``body``; ``RefusedError`` if they do not fit."""
    request = _parsed(body)
    own = {MASK: policy.wants_mask, MEMORY: bool(policy.state_size)}
    _check_keys(request, "", ["obs", *(key for key, wanted in own.items() if wanted)])
    obs = _item(request, "obs")
    if not policy.reader.is_single:
        _check_keys(obs, "obs", list(policy.reader.leaves))
    read: dict[str, _Read] = {}
    for name, spec in policy.inputs.items():
        if spec.leaf is None:
            if name == MASK or MEMORY in request:
                read[name] = _read_array(_item(request, name), name, spec)
        elif policy.reader.is_single:
            read[name] = _read_array(obs, "obs", spec)
        else:
            key = f"obs[{spec.leaf!r}]"
            read[name] = _read_array(_item(obs, spec.leaf, key), key, spec)
    first = next(iter(read.values()))
    n_rows = len(first.array)
    for each in read.values():
        if (each.is_batch, len(each.array)) != (first.is_batch, n_rows):
            raise RefusedError(400, f"{each.key} is {each}, but {first.key} is {first}")
    if not 1 <= n_rows <= max_rows:
        reason = f"{first.key} is {first}; send between 1 and {max_rows} (--max-batch)"
        raise RefusedError(400, reason)
    leaves = {
        spec.leaf: read[name].array for name, spec in policy.inputs.items() if spec.leaf is not None
    }
    mask = read[MASK].array if policy.wants_mask else None
    state = None
    if policy.state_size:
        zeros = np.zeros((n_rows, policy.state_size), dtype=np.float32)
        state = read[MEMORY].array if MEMORY in read else zeros
    try:
        policy.reader.check_bounds(leaves)
        inputs = policy.named_inputs(leaves, action_mask=mask, state=state)
    except UserError as error:
        raise RefusedError(400, str(error)) from error
    return Query(inputs, n_rows, first.is_batch)


class _Read(NamedTuple):
    """One input of a request."""

    key: str
    array: NDArray[Any]  # [n_rows, *shape]
    is_batch: bool

    def __str__(self) -> str:
        return f"a batch of {len(self.array)}" if self.is_batch else "not a batch"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError, too
        raise RefusedError(400, f"the body is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise RefusedError(400, f"the body contains {name}; send finite numbers")


def _check_keys(given: Any, where: str, known: list[str]) -> None:
    what, listed = where or "the body", ", ".join(known)
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise RefusedError(400, f"{what} must be an object with the keys {listed}; got a {kind}")
    for key in given:
        if key not in known:
            raise RefusedError(400, f"{what} has the unknown key {key!r}; known keys: {listed}")


def _item(given: dict[str, Any], key: str, label: str | None = None) -> Any:
    if key not in given:
        raise RefusedError(400, f"{label or key} is missing; got the keys {list(given)}")
    return given[key]


def _read_array(value: Any, key: str, spec: TensorSpec) -> _Read:
    """``value`` as an array; adds a batch dimension if it has none."""
    wanted = f"{spec.dtype} of shape {list(spec.shape)}, or a batch of these"
    try:
        array = np.array(value)
    except ValueError:
        raise RefusedError(400, f"{key} is ragged; it must be {wanted}") from None
    if array.dtype.kind not in "biuf":
        raise RefusedError(400, f"{key} contains values that are not numbers; it must be {wanted}")
    is_batch = array.ndim == len(spec.shape) + 1
    if array.shape[is_batch:] != spec.shape:
        raise RefusedError(400, f"{key} has shape {list(array.shape)}; it must be {wanted}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(spec.dtype)
    # A value that the cast changes is out of range, or not an integer.
    changed = ~np.isfinite(cast) if spec.dtype.kind == "f" else cast != array
    if changed.any():
        bad = array[changed].flat[0]
        raise RefusedError(400, f"{key} contains {bad}, which is not a finite {spec.dtype}")
    return _Read(key, cast if is_batch else cast[None], is_batch)
