"""The body of a /predict request: JSON, checked against the inputs of a policy."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.deploy.exported import Arrays, ExportedPolicy, TensorSpec
from ml_pipeline.errors import UserError
from ml_pipeline.policy.actor_critic import MASK, MEMORY

LARGE_BYTES = 64 * 1024  # read larger bodies in another thread
_KEY_BYTES = 1_024  # for each key of a request, with some white space
_STEP_NUMBERS = 1_024  # NumPy holds the interpreter's lock while it converts a list


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


class RequestReader:
    """Reads requests for a policy; knows how large one with ``max_rows`` observations can be."""

    def __init__(self, policy: ExportedPolicy, *, max_rows: int) -> None:
        self._policy = policy
        self._max_rows = max_rows
        own = {MASK: policy.wants_mask, MEMORY: bool(policy.state_size)}
        self._keys = ["obs", *(key for key, wanted in own.items() if wanted)]
        self._leaves = [] if policy.reader.is_single else list(policy.reader.leaves)
        self.max_bytes = _KEY_BYTES
        self._max_values = 0  # numbers and lists
        for name, spec in policy.inputs.items():
            sizes = [max_rows * math.prod(spec.shape[:n]) for n in range(len(spec.shape) + 1)]
            self.max_bytes += sizes[-1] * _bytes_per_number(spec.dtype)
            self.max_bytes += len(spec.leaf or name) + _KEY_BYTES
            self._max_values += sum(sizes) + 1

    def read(self, body: bytes) -> Query:
        """The inputs of the policy in ``body``; ``RefusedError`` if they do not fit.

        Other threads run meanwhile, even if the body is large. Only one thread may read those.
        """
        if len(body) <= LARGE_BYTES:
            return self._query(_parsed(body, _DECODER))
        # Many tiny values can take far longer to read than a valid request of the same size.
        n_values = sum(map(body.count, (b",", b"[", b"{")))
        if n_values > 2 * self._max_values:
            reason = f"the body has {n_values} values; a request has at most {self._max_values}"
            raise RefusedError(400, f"{reason} (--max-batch {self._max_rows})")
        gc.disable()  # the lists have no cycles, and a collection would stop every thread
        try:
            return self._query(_parsed(body, _STEPPED_DECODER))
        finally:
            gc.enable()

    def _query(self, request: object) -> Query:
        policy = self._policy
        given = _checked(request, "the body", self._keys)
        obs = _item(given, "obs")
        leaves_given = _checked(obs, "obs", self._leaves) if self._leaves else {}
        read: dict[str, _Read] = {}
        for name, spec in policy.inputs.items():
            if spec.leaf is None:
                if name == MASK or MEMORY in given:
                    read[name] = _read_array(_item(given, name), name, spec)
            elif not self._leaves:
                read[name] = _read_array(obs, "obs", spec)
            else:
                key = f"obs[{spec.leaf!r}]"
                read[name] = _read_array(_item(leaves_given, spec.leaf, key), key, spec)
        first = next(iter(read.values()))
        n_rows = len(first.array)
        for each in read.values():
            if (each.is_batch, len(each.array)) != (first.is_batch, n_rows):
                raise RefusedError(400, f"{each.key} is {each}, but {first.key} is {first}")
        if not 1 <= n_rows <= self._max_rows:
            reason = f"{first.key} is {first}; send between 1 and {self._max_rows} (--max-batch)"
            raise RefusedError(400, reason)
        leaves = {
            spec.leaf: read[name].array
            for name, spec in policy.inputs.items()
            if spec.leaf is not None
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


def _bytes_per_number(dtype: np.dtype[Any]) -> int:
    """With its separator, its share of brackets and some indentation."""
    if dtype.kind not in "iu":
        return 32 if dtype.kind == "f" else 8  # -1.2345678901234567e-123, false
    limits = np.iinfo(dtype)
    return max(len(str(limits.min)), len(str(limits.max))) + 6


class _Read(NamedTuple):
    """One input of a request."""

    key: str
    array: NDArray[Any]  # [n_rows, *shape]
    is_batch: bool

    def __str__(self) -> str:
        return f"a batch of {len(self.array)}" if self.is_batch else "not a batch"


_Scan = Callable[[str, int], tuple[object, int]]  # text, start -> value, end


class _SteppedDecoder(json.JSONDecoder):
    """Decodes the elements of the outer arrays one by one, so that other threads run in between.

    json's C scanner holds the interpreter's lock for a whole value, which can take a second.
    """

    scan_once: _Scan

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._scan_whole: _Scan = self.scan_once
        for _ in range(3):  # the request, a Dict observation, a batch
            self.scan_once = self._outer(self.scan_once)

    def _outer(self, scan_element: _Scan) -> _Scan:
        def scan(text: str, index: int) -> tuple[object, int]:
            value: tuple[object, int]
            if text.startswith("{", index):
                value = JSONObject((text, index + 1), self.strict, scan_element, None, None)
            elif text.startswith("[", index):
                value = JSONArray((text, index + 1), scan_element)
            else:
                value = self._scan_whole(text, index)
            return value

        return scan


def _parsed(body: bytes, json_decoder: json.JSONDecoder) -> object:
    try:
        return json_decoder.decode(body.decode())
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError, too
        raise RefusedError(400, f"the body is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise RefusedError(400, f"the body contains {name}; send finite numbers")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_STEPPED_DECODER = _SteppedDecoder(parse_constant=_refuse_constant)


def _checked(given: object, where: str, known: list[str]) -> dict[str, object]:
    """``given``, if it is an object with known keys only."""
    if not isinstance(given, dict):
        wanted = f"must be an object with the keys {', '.join(known)}"
        raise RefusedError(400, f"{where} {wanted}; got a {type(given).__name__}")
    for key in given:
        if key not in known:
            listed = f"known keys: {', '.join(known)}"
            raise RefusedError(400, f"{where} has the unknown key {key!r}; {listed}")
    return given


def _item(given: dict[str, object], key: str, label: str | None = None) -> object:
    if key not in given:
        raise RefusedError(400, f"{label or key} is missing; got the keys {list(given)}")
    return given[key]


def _read_array(value: Any, key: str, spec: TensorSpec) -> _Read:
    """``value`` as an array; adds a batch dimension if it has none."""
    try:
        if math.prod(spec.shape) > _STEP_NUMBERS:
            _check_shape(_first_shape(value), key, spec)
            value = [np.array(each) for each in value]
        array = np.array(value)
    except ValueError:
        raise RefusedError(400, f"{key} is ragged; it must be {_wanted(spec)}") from None
    if array.dtype.kind not in "biuf":
        reason = f"{key} contains values that are not numbers; it must be {_wanted(spec)}"
        raise RefusedError(400, reason)
    is_batch = _check_shape(array.shape, key, spec)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(spec.dtype)
    # A value that the cast changes is out of range, or not an integer.
    fits = np.isfinite(cast) if spec.dtype.kind == "f" else cast == array
    if not fits.all():
        bad = array[~fits].flat[0]
        raise RefusedError(400, f"{key} contains {bad}, which is not a finite {spec.dtype}")
    return _Read(key, cast if is_batch else cast[None], is_batch)


def _first_shape(value: object) -> tuple[int, ...]:
    """The shape of nested lists, if they are not ragged."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _check_shape(shape: tuple[int, ...], key: str, spec: TensorSpec) -> bool:
    """Whether ``shape`` has a batch dimension; refuse any other."""
    is_batch = len(shape) == len(spec.shape) + 1
    if shape[is_batch:] != spec.shape:
        raise RefusedError(400, f"{key} has shape {list(shape)}; it must be {_wanted(spec)}")
    return is_batch


def _wanted(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)}, or a batch of these"
