"""Serve: an exported policy answers observations over HTTP.

GET /health, GET /metadata, POST /predict with {"obs": ...}: one observation or a batch, as nested
lists. For a Dict or Tuple space "obs" is an object with one entry per leaf ("camera", "arm/angle",
"0"). A policy may also take "action_mask" and "state"; a request without "state" starts an episode.
Requests and answers are JSON: the server unpickles nothing. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import PurePosixPath, PureWindowsPath
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn

from ml_pipeline.deploy.batcher import Batcher
from ml_pipeline.deploy.connection import Connection, to_json
from ml_pipeline.deploy.exported import ExportedPolicy
from ml_pipeline.deploy.request import LARGE_BYTES, RefusedError, RequestReader
from ml_pipeline.errors import UserError, type_and_line
from ml_pipeline.policy.actor_critic import ACTION, MEMORY, NEXT_MEMORY
from ml_pipeline.policy.space_data import tree_of
from ml_pipeline.signals import Interrupted, StopSignals, signals_to_handle

_ROUTES = {"/health": "GET", "/metadata": "GET", "/predict": "POST"}
_BACKLOG = 1_024  # connections that wait to be accepted
_CLOSE_SECONDS = 5.0  # limit for the answers in progress when the server stops
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OUTPUTS = {"policy": "policy", NEXT_MEMORY: MEMORY}  # and the action


Message = Mapping[str, Any]  # of ASGI: a scope or an event
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ServeError(UserError):
    """The server cannot be started, or its policy is stuck."""


class Limits(NamedTuple):
    """What a client, the policy and the server may take."""

    read_seconds: float = 30.0  # for a client to send its request
    answer_seconds: float = 30.0  # for the policy to answer
    stuck_seconds: float = 60.0  # for one pass of the policy; then the server ends
    connections: int = 1_024  # or half of the file descriptors, if they are fewer


class PolicyServer(uvicorn.Server):
    """An event loop for the connections, and one thread for the policy."""

    def __init__(
        self,
        policy: ExportedPolicy,
        *,
        host: str,
        port: int,
        max_batch: int = 64,
        allow_hosts: Collection[str] = (),
        limits: Limits = Limits(),  # noqa: B008 - it cannot be changed
        token: str = "",
    ) -> None:
        """Clients must send ``token``, unless it is empty, as "Authorization: Bearer TOKEN"."""
        self.policy = policy
        self._limits = limits
        self._token = token.encode()
        self._metadata = to_json(_without_paths(policy.metadata))
        self._listener = _listen(host, port)
        self._names = {each.lower() for each in (*_LOOPBACK, host, *allow_hosts)}
        self._reader = RequestReader(policy, max_rows=max_batch)
        self._batcher = Batcher(policy, max_rows=max_batch, answer_seconds=limits.answer_seconds)
        self._reading = ThreadPoolExecutor(1, "large requests")
        self._stopped_by = 0
        self._gave_up = False
        super().__init__(
            uvicorn.Config(
                self._answer,
                http=partial(  # type: ignore[arg-type]
                    Connection,
                    read_seconds=limits.read_seconds,
                    answer_seconds=limits.answer_seconds + limits.read_seconds,
                    max_connections=min(limits.connections, _n_descriptors() // 2),
                ),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=limits.read_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=_CLOSE_SECONDS,  # type: ignore[arg-type]
            )
        )

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach the server, and need no token."""
        address = self._listener.getsockname()[0]
        return not (self._token or ipaddress.ip_address(address.partition("%")[0]).is_loopback)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer until ``should_exit`` or a stop signal, then finish the answers in progress."""
        try:
            super().run(sockets or [self._listener])
        finally:
            self._listener.close()
            self._reading.shutdown(wait=False, cancel_futures=True)
            self._batcher.close()
        if self._gave_up:
            limit = f"the limit is {self._limits.stuck_seconds:g} s; the server ends"
            raise ServeError(f"the policy does not return; {limit}")

    @property
    def is_busy(self) -> bool:
        """Whether a pass of the policy has not returned."""
        return self._batcher.busy_seconds > 0

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second."""
        self._batcher.expire()
        for connection in list(self.server_state.connections):
            connection.check()  # type: ignore[union-attr]
        if self._batcher.busy_seconds > self._limits.stuck_seconds:
            self._gave_up = self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A stop signal ends the loop; then it is raised. uvicorn leaves out SIGHUP."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = signals_to_handle() if is_main else []
        previous = {each: signal.signal(each, self.handle_exit) for each in numbers}
        try:
            yield
        finally:
            for each, handler in previous.items():
                signal.signal(each, handler)
        if self._stopped_by:
            raise Interrupted(self._stopped_by)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopped_by = self._stopped_by or sig
        super().handle_exit(sig, frame)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI app; every answer is JSON, {"error": reason} if the request is refused."""
        headers = [(b"content-type", b"application/json")]
        try:
            status, body = 200, await self._body_for(scope, receive)
        except RefusedError as refused:
            status, body = refused.status, to_json({"error": str(refused)})
            if status == 405:
                headers.append((b"allow", _ROUTES[scope["path"]].encode()))
            if status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
        except Exception as error:  # uvicorn would hide it
            print(f"a request failed: {type_and_line(error)}", file=sys.stderr)
            status, body = 500, to_json({"error": "the server failed; its output has the reason"})
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _body_for(self, scope: Message, receive: Receive) -> bytes:
        path, method = scope["path"], scope["method"]
        self._check_host(scope)
        allowed = _ROUTES.get(path)
        if allowed is None:
            known = ", ".join(f"{method} {route}" for route, method in _ROUTES.items())
            raise RefusedError(404, f"{path} does not exist; use one of: {known}")
        if allowed != method:
            raise RefusedError(405, f"{path} accepts {allowed}, not {method}")
        if path != "/health":  # supervisors ask for it without a token
            self._check_token(scope)
        if path == "/metadata":
            return self._metadata
        if path == "/health":
            self._batcher.check()
            return to_json({"status": "ok"})
        return await self._predict(await self._read_body(scope, receive))

    def _check_host(self, scope: Message) -> None:
        """Refuse the names of others: a web page can make its own name point to this server."""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if not given and scope["http_version"] == "1.0":
                return
            raise RefusedError(400, f"the request has {len(given)} Host headers; send one")
        name = _name_in(given[0])
        if name not in self._names and name != scope["server"][0]:
            reason = f"Host {given[0]!r} is not this server; allow a name with serve --allow-host"
            raise RefusedError(421, reason)

    def _check_token(self, scope: Message) -> None:
        if not self._token:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            raise RefusedError(401, "send the server's token as: Authorization: Bearer TOKEN")

    async def _read_body(self, scope: Message, receive: Receive) -> bytes:
        size = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if size is None:
            raise RefusedError(411, "the request has no Content-Length")
        if int(size) > self._reader.max_bytes:
            limit = f"the limit for this policy and --max-batch is {self._reader.max_bytes}"
            raise RefusedError(413, f"the body has {int(size)} bytes; {limit}")
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the client has disconnected")
            parts.append(message["body"])
            more = message["more_body"]
        return b"".join(parts)

    async def _predict(self, body: bytes) -> bytes:
        if len(body) > LARGE_BYTES:
            loop = asyncio.get_running_loop()
            query = await loop.run_in_executor(self._reading, self._reader.read, body)
        else:
            query = self._reader.read(body)
        try:
            outputs = await self._batcher.submit(query)
        except RefusedError:
            raise
        except Exception as error:  # the policy's own code can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"the policy failed: {reason}", file=sys.stderr)
            raise RefusedError(500, f"the policy failed: {reason}") from error
        rows = slice(None) if query.is_batch else 0
        numbers = {name: each[rows].tolist() for name, each in outputs.items()}
        action = tree_of(self.policy.action_space, ACTION, lambda name, _: numbers[name])
        others = {key: numbers[name] for name, key in _OUTPUTS.items() if name in numbers}
        answer = {ACTION: action, **others}
        try:
            return to_json(answer)
        except ValueError:  # JSON has no such numbers
            reason = "the policy returned NaN or infinity for these observations"
            raise RefusedError(500, reason) from None


def serve(server: PolicyServer) -> None:
    """Answer until a stop signal, which is raised as ``Interrupted``."""
    with StopSignals():  # until uvicorn handles the signals, and after
        if server.is_open:
            print(
                f"WARNING: every machine that reaches {server.url} can use this policy; "
                "set a token with --token-file FILE",
                file=sys.stderr,
                flush=True,
            )
        print(f"serving {server.policy.env_name} on {server.url} (stop with Ctrl-C)", flush=True)
        try:
            server.run()
        except (Interrupted, ServeError) as end:
            if isinstance(end, Interrupted):
                print(f"stopped by {end.signal_name}", flush=True)
            if server.is_busy:  # a normal exit would wait for the policy's thread
                if isinstance(end, ServeError):
                    print(end, file=sys.stderr, flush=True)
                os._exit(getattr(end, "exit_code", 1))
            raise


def _without_paths(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata for clients, who must not learn which files and folders this machine has.

    ``env`` names modules, data and ROMs; clients need the spaces, the inputs and the outputs.
    """
    return {key: value for key, value in metadata.items() if key != "env" and not _has_path(value)}


def _has_path(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_has_path(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return any(_has_path(part) for part in value)
    if not isinstance(value, str):
        return False
    is_absolute = PurePosixPath(value).is_absolute() or bool(PureWindowsPath(value).anchor)
    return is_absolute or value.startswith(("~", "./", "../"))


def _n_descriptors() -> int:
    """How many files and connections this process may open."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


@lru_cache
def _name_in(host: str) -> str | None:
    """The name or address in a Host header."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay only if the protocol is given.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere this would share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {host}:{port}: {error}; choose others with --host and --port"
        ) from error
    return listener
