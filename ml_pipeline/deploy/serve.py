"""Serve: an exported policy answers observations over HTTP, those of many clients in one pass.

GET /health, GET /metadata, POST /predict with {"obs": ...}: one observation or a batch, as nested
lists; of a Dict or Tuple space an object with one entry per leaf ("camera", "arm/angle", "0").
Where the policy has them, "action_mask" and "state" stand beside it; without a "state" an episode
begins. JSON in, JSON out: nothing is unpickled, and no wait is without a deadline.
"""

from __future__ import annotations

import json
import queue
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.agents.policy import MASK, MEMORY, NEXT_MEMORY
from ml_pipeline.deploy.exported import (
    Arrays,
    ExportedPolicy,
    TensorSpec,
)
from ml_pipeline.errors import UserError
from ml_pipeline.signals import Interrupted, StopSignals

MAX_BODY_BYTES = 16 * 1024 * 1024
WAIT_SECONDS = 0.002  # for others to join a pass
ANSWER_SECONDS = 30.0  # within which the policy must answer
READ_SECONDS = 30.0  # within which a client must have sent its request
CLOSE_SECONDS = 5.0  # within which answers that are under way must be sent at the end
MAX_WAITING = 1_024  # requests

_ROUTES = {"/health": "GET", "/metadata": "GET", "/predict": "POST"}
_OFFER = "there are GET /health, GET /metadata and POST /predict"


class ServeError(UserError):
    """The server cannot be started."""


class RefusedError(Exception):
    """A request that is answered by a reason instead."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Query(NamedTuple):
    """A request that is fit for the policy."""

    inputs: Arrays  # [n_rows, ...] each
    n_rows: int
    is_batch: bool  # False: one observation, and the answer is without a batch dimension


class _Waiting(NamedTuple):
    """A query, and where its answer is waited for."""

    query: Query
    future: Future[Arrays]


_STOP = _Waiting(Query({}, 0, False), Future())  # what ends the policy's thread


def serve(policy: ExportedPolicy, *, host: str, port: int, max_batch: int) -> None:
    """Answer until a stop signal comes, which is raised as ``Interrupted``."""
    with StopSignals():
        try:
            server = PolicyServer(policy, host=host, port=port, max_batch=max_batch)
        except (OSError, OverflowError) as error:
            raise ServeError(
                f"cannot listen on {host}:{port}: {error}; choose others with --host and --port"
            ) from error
        try:
            print(f"serving {policy.env_name} on {server.url} (Ctrl-C ends it)", flush=True)
            server.serve_forever(poll_interval=0.1)
        except Interrupted as stop:
            print(f"stopped by {stop.signal_name}", flush=True)
            raise
        finally:
            server.close()


class PolicyServer(ThreadingHTTPServer):
    """One thread per connection to read and write, one for the policy."""

    daemon_threads = True  # a client that only holds its connection does not hold the end up
    request_queue_size = 128

    def __init__(
        self, policy: ExportedPolicy, *, host: str, port: int, max_batch: int = 64
    ) -> None:
        self.policy = policy
        self.max_batch = max_batch
        self._n_busy = 0
        self._idle = threading.Condition()
        super().__init__((host, port), _Handler)
        self.batcher = Batcher(policy, max_rows=max_batch)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for the name of this host.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{self.server_name}:{self.server_port}"

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around an answer that is worth waiting for when the server ends."""
        with self._idle:
            self._n_busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._n_busy -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Take no more connections, finish the answers that are under way, end the policy."""
        self.server_close()
        with self._idle:
            self._idle.wait_for(lambda: not self._n_busy, CLOSE_SECONDS)
        self.batcher.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a client that went away
            print(f"a request failed: {type(error).__name__}: {error}", file=sys.stderr)


class Batcher:
    """Runs the policy in a thread of its own, on all requests that wait at the time."""

    def __init__(
        self, policy: ExportedPolicy, *, max_rows: int, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._policy = policy
        self._max_rows = max_rows
        self._wait_seconds = wait_seconds
        self._waiting: queue.Queue[_Waiting] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, query: Query) -> Future[Arrays]:
        """The outputs of the policy, once there are any; ``queue.Full`` if too many wait."""
        future: Future[Arrays] = Future()
        self._waiting.put_nowait(_Waiting(query, future))
        return future

    def close(self) -> None:
        try:
            self._waiting.put(_STOP, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # the policy is stuck; its thread ends with the process
        self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        left: _Waiting | None = None
        while (first := left or self._waiting.get()) is not _STOP:
            batch, left = self._gather(first)
            self._answer(batch)

    def _gather(self, first: _Waiting) -> tuple[list[_Waiting], _Waiting | None]:
        """Those that join ``first`` in its pass, and the one that came, but is not of them."""
        batch, n_rows = [first], first.query.n_rows
        deadline = time.monotonic() + self._wait_seconds
        while n_rows < self._max_rows:
            try:
                each = self._waiting.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if each is _STOP or n_rows + each.query.n_rows > self._max_rows:
                return batch, each
            batch.append(each)
            n_rows += each.query.n_rows
        return batch, None

    def _answer(self, batch: list[_Waiting]) -> None:
        """One pass for all; if it fails, one for each, so that none fails for another's sake."""
        try:
            self._run(batch)
        except Exception as error:  # of the policy: whoever asked is told
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for each in batch:
                    self._answer([each])

    def _run(self, batch: list[_Waiting]) -> None:
        names = batch[0].query.inputs
        joined = {name: np.concatenate([q.inputs[name] for q, _ in batch]) for name in names}
        outputs = self._policy.run(joined)
        first = 0
        for query, future in batch:
            rows = slice(first, first + query.n_rows)
            future.set_result({name: each[rows] for name, each in outputs.items()})
            first += query.n_rows


class _Handler(BaseHTTPRequestHandler):
    """One connection; every answer is JSON, {"error": reason} where it is a refusal."""

    server: PolicyServer
    protocol_version = "HTTP/1.1"  # connections are kept
    disable_nagle_algorithm = True
    timeout = READ_SECONDS  # of each read

    def _answer(self) -> None:
        with self.server.answering():
            self._body_is_read = False
            allowed = None
            try:
                path = urlsplit(self.path).path
                allowed = _ROUTES.get(path)
                if allowed is None:
                    raise RefusedError(404, f"there is no {path}; {_OFFER}")
                if allowed != self.command:
                    raise RefusedError(405, f"{path} takes {allowed}, not {self.command}")
                if path == "/predict":
                    self._send(200, self._predict())
                elif path == "/metadata":
                    self._send(200, self.server.policy.metadata)
                elif self.server.batcher.is_alive:
                    self._send(200, {"status": "ok"})
                else:
                    raise RefusedError(503, "the policy's thread has ended; start serve again")
            except RefusedError as refused:
                headers = {"Allow": allowed} if refused.status == 405 and allowed else {}
                self._send(refused.status, {"error": str(refused)}, **headers)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _answer  # noqa: N815

    def _predict(self) -> dict[str, Any]:
        policy = self.server.policy
        query = read_query(policy, self._read_body(), max_rows=self.server.max_batch)
        try:
            outputs = self.server.batcher.submit(query).result(ANSWER_SECONDS)
        except queue.Full:
            raise RefusedError(503, f"{MAX_WAITING:,} requests wait already; try later") from None
        except FutureTimeoutError:
            reason = f"the policy has not answered within {ANSWER_SECONDS:g} s"
            raise RefusedError(503, reason) from None
        except Exception as error:  # of the policy's own
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"the policy failed: {reason}", file=sys.stderr)
            raise RefusedError(500, f"the policy failed: {reason}") from error
        if not all(np.isfinite(each).all() for each in outputs.values()):
            raise RefusedError(500, "the policy's answer to these observations is not finite")
        names = {"action": "action", "policy": "policy", NEXT_MEMORY: MEMORY}
        rows = slice(None) if query.is_batch else 0
        return {names[name]: each[rows].tolist() for name, each in outputs.items()}

    def _read_body(self) -> bytes:
        size = self._body_size()
        deadline = time.monotonic() + READ_SECONDS
        parts, missing = [], size
        while missing:
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = self.rfile.read1(missing)
            except TimeoutError:
                raise RefusedError(408, f"the body has not come in {READ_SECONDS:g} s") from None
            if not part:
                raise RefusedError(400, f"the body ends {missing} bytes short of Content-Length")
            parts.append(part)
            missing -= len(part)
        self.connection.settimeout(READ_SECONDS)
        self._body_is_read = True
        return b"".join(parts)

    def _body_size(self) -> int:
        given = self.headers.get("Content-Length")
        if given is None:
            raise RefusedError(411, "the request has no Content-Length")
        if not (given.isascii() and given.isdecimal()):
            raise RefusedError(400, f"Content-Length is {given!r}, no whole number")
        if len(given) > 15 or int(given) > MAX_BODY_BYTES:
            reason = f"the body has {given} bytes, at most {MAX_BODY_BYTES} are taken"
            raise RefusedError(413, reason)
        return int(given)

    def handle_expect_100(self) -> bool:
        """Refuse a body that is too large before it is sent, where the client asks."""
        self._body_is_read = False
        try:
            self._body_size()
        except RefusedError as refused:
            self._send(refused.status, {"error": str(refused)})
            return False
        return super().handle_expect_100()

    def _send(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        body = json.dumps(answer, allow_nan=False).encode() + b"\n"
        unread = not self._body_is_read and (
            "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        )
        self.close_connection = self.close_connection or unread
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if unread:
            self._drain()

    def _drain(self) -> None:
        """Let the client finish: one that is still sending would not see the answer."""
        deadline, n_bytes = time.monotonic() + CLOSE_SECONDS, 0
        try:
            self.connection.shutdown(socket.SHUT_WR)
            while n_bytes < 8 * MAX_BODY_BYTES and (left := deadline - time.monotonic()) > 0:
                self.connection.settimeout(left)
                part = self.rfile.read1(65536)
                if not part:
                    return
                n_bytes += len(part)
        except OSError:
            return  # it has gone

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: a request line or headers that are none."""
        self.close_connection = True
        body = json.dumps({"error": message or self.responses[code][0]}).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line per request would be more than anyone reads."""


def read_query(policy: ExportedPolicy, body: bytes, *, max_rows: int) -> Query:
    """The body of a /predict as the policy takes it, or ``RefusedError`` with the reason."""
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
        reason = f"{first.key} is {first}; between 1 and {max_rows} are taken (--max-batch)"
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
    """An input as it was read."""

    key: str
    array: NDArray[Any]  # [n_rows, *shape]
    is_batch: bool

    def __str__(self) -> str:
        return f"a batch of {len(self.array)}" if self.is_batch else "a single one"


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError, too
        raise RefusedError(400, f"the body is no JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise RefusedError(400, f"the body holds {name}; only finite numbers are taken")


def _check_keys(given: Any, where: str, known: list[str]) -> None:
    what, listed = where or "the body", ", ".join(known)
    if not isinstance(given, dict):
        kind = type(given).__name__
        raise RefusedError(400, f"{what} must be an object with the keys {listed}; it is a {kind}")
    for key in given:
        if key not in known:
            raise RefusedError(400, f"{what} has the key {key!r}; its keys are {listed}")


def _item(given: dict[str, Any], key: str, label: str | None = None) -> Any:
    if key not in given:
        raise RefusedError(400, f"{label or key} is missing; there are {list(given)}")
    return given[key]


def _read_array(value: Any, key: str, spec: TensorSpec) -> _Read:
    """Numbers of the right shape, with a batch dimension, which the value may have or not."""
    wanted = f"{spec.dtype} of shape {list(spec.shape)}, or a batch of these"
    try:
        array = np.array(value)
    except ValueError:
        raise RefusedError(400, f"{key} is ragged; it must be {wanted}") from None
    if array.dtype.kind not in "biuf":
        raise RefusedError(400, f"{key} holds more than numbers; it must be {wanted}")
    is_batch = array.ndim == len(spec.shape) + 1
    if array.shape[is_batch:] != spec.shape:
        raise RefusedError(400, f"{key} has shape {list(array.shape)}; it must be {wanted}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(spec.dtype)
    # What does not come through as it was is out of range, or no whole number.
    changed = ~np.isfinite(cast) if spec.dtype.kind == "f" else cast != array
    if changed.any():
        bad = array[changed].flat[0]
        raise RefusedError(400, f"{key} holds {bad}, which is no finite {spec.dtype}")
    return _Read(key, cast if is_batch else cast[None], is_batch)
