"""Serve: an exported policy answers observations over HTTP.

GET /health, GET /metadata, POST /predict with {"obs": ...}: one observation or a batch, as nested
lists. For a Dict or Tuple space "obs" is an object with one entry per leaf ("camera", "arm/angle",
"0"). A policy may also take "action_mask" and "state"; a request without "state" starts an episode.
Requests and answers are JSON: the server unpickles nothing. Every wait has a deadline.
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
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ml_pipeline.agents.policy import MEMORY, NEXT_MEMORY
from ml_pipeline.deploy.batcher import CLOSE_SECONDS, MAX_WAITING, Batcher
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.deploy.request import RefusedError, read_query
from ml_pipeline.errors import UserError
from ml_pipeline.signals import Interrupted, StopSignals

MAX_BODY_BYTES = 16 * 1024 * 1024
ANSWER_SECONDS = 30.0  # limit for the policy's answer
READ_SECONDS = 30.0  # limit for a client to send its request

_ROUTES = {"/health": "GET", "/metadata": "GET", "/predict": "POST"}


class ServeError(UserError):
    """The server cannot be started."""


def serve(policy: ExportedPolicy, *, host: str, port: int, max_batch: int) -> None:
    """Answer until a stop signal, which is raised as ``Interrupted``."""
    with StopSignals():
        try:
            server = PolicyServer(policy, host=host, port=port, max_batch=max_batch)
        except (OSError, OverflowError) as error:
            raise ServeError(
                f"cannot listen on {host}:{port}: {error}; choose others with --host and --port"
            ) from error
        try:
            print(f"serving {policy.env_name} on {server.url} (stop with Ctrl-C)", flush=True)
            server.serve_forever(poll_interval=0.1)
        except Interrupted as stop:
            print(f"stopped by {stop.signal_name}", flush=True)
            raise
        finally:
            server.close()


class PolicyServer(ThreadingHTTPServer):
    """One thread per connection for reading and writing, and one thread for the policy."""

    daemon_threads = True  # an idle connection must not delay shutdown
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
        # HTTPServer's own method asks the DNS for the name of this host.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{self.server_name}:{self.server_port}"

    @contextmanager
    def answering(self) -> Iterator[None]:
        """``close`` waits for the answers inside this context."""
        with self._idle:
            self._n_busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._n_busy -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Refuse new connections, finish the current answers, end the policy's thread."""
        self.server_close()
        with self._idle:
            self._idle.wait_for(lambda: not self._n_busy, CLOSE_SECONDS)
        self.batcher.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # OSError: the client has disconnected
            print(f"a request failed: {type(error).__name__}: {error}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """One connection; every answer is JSON, {"error": reason} if the request is refused."""

    server: PolicyServer
    protocol_version = "HTTP/1.1"  # keeps connections open
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
                    known = ", ".join(f"{method} {route}" for route, method in _ROUTES.items())
                    raise RefusedError(404, f"{path} does not exist; use one of: {known}")
                if allowed != self.command:
                    raise RefusedError(405, f"{path} accepts {allowed}, not {self.command}")
                if path == "/predict":
                    self._send(200, self._predict())
                elif path == "/metadata":
                    self._send(200, self.server.policy.metadata)
                elif self.server.batcher.is_alive:
                    self._send(200, {"status": "ok"})
                else:
                    raise RefusedError(503, "the policy's thread has ended; restart the server")
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
            reason = f"{MAX_WAITING:,} requests are waiting; try again later"
            raise RefusedError(503, reason) from None
        except FutureTimeoutError:
            reason = f"the policy did not answer within {ANSWER_SECONDS:g} s"
            raise RefusedError(503, reason) from None
        except Exception as error:  # the policy's own code can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"the policy failed: {reason}", file=sys.stderr)
            raise RefusedError(500, f"the policy failed: {reason}") from error
        if not all(np.isfinite(each).all() for each in outputs.values()):
            raise RefusedError(500, "the policy returned NaN or infinity for these observations")
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
                reason = f"the body did not arrive within {READ_SECONDS:g} s"
                raise RefusedError(408, reason) from None
            if not part:
                raise RefusedError(400, f"the body is {missing} bytes shorter than Content-Length")
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
            raise RefusedError(400, f"Content-Length must be an integer, got {given!r}")
        if len(given) > 15 or int(given) > MAX_BODY_BYTES:
            reason = f"the body has {given} bytes; the limit is {MAX_BODY_BYTES}"
            raise RefusedError(413, reason)
        return int(given)

    def handle_expect_100(self) -> bool:
        """Refuse a body that is too large before the client sends it."""
        self._body_is_read = False
        try:
            self._body_size()
        except RefusedError as refused:
            self._send(refused.status, {"error": str(refused)})
            return False
        return super().handle_expect_100()

    def _send(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        unread = not self._body_is_read and (
            "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        )
        self.close_connection = self.close_connection or unread
        self._write(status, answer, **headers)
        if unread:
            self._drain()

    def _write(self, status: int, answer: dict[str, Any], **headers: str) -> None:
        body = json.dumps(answer, allow_nan=False).encode() + b"\n"
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

    def _drain(self) -> None:
        """Read the rest of the request: a client that is still sending would miss the answer."""
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
            return  # the client has disconnected

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """http.server calls this for a malformed request line or malformed headers."""
        self.close_connection = True
        self._write(code, {"error": message or self.responses[code][0]})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: one line per request would be too many."""
