"""Connection: an HTTP connection of uvicorn with limits on the client, and errors as JSON.

uvicorn has no deadline for a request to arrive, no limit for its headers and no cap on open
connections. ``check`` must be called several times a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
LINGER_SECONDS = 5.0  # for a client to read the last answer


_encode = json.JSONEncoder(allow_nan=False).encode


def to_json(answer: Mapping[str, object]) -> bytes:
    return f"{_encode(answer)}\n".encode()


class Connection(HttpToolsProtocol):
    """``read_seconds`` limits each request from its first to its last byte, and the time between.

    ``answer_seconds`` limits the app, which has its own deadline, and the client that reads.
    """

    def __init__(
        self,
        *args: Any,
        read_seconds: float,
        answer_seconds: float,
        max_connections: int,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._read_seconds = read_seconds
        self._answer_seconds = answer_seconds
        self._max_connections = max_connections
        self._deadline = 0.0
        self._n_head_bytes = 0
        self._n_parsed_bytes = 0  # of names, values and the address, in the parsed part of the head
        self._reads_head = False
        self._reads_request = False
        self._has_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = time.monotonic() + self._read_seconds
        if len(self.connections) > self._max_connections:
            self._refuse(503, f"{self._max_connections} connections are open; try again later")
            transport.close()

    def check(self) -> None:
        """Close the connection if its deadline is over."""
        if time.monotonic() < self._deadline:
            return
        if self._has_ended or self.transport.is_closing():
            self.transport.abort()  # the client does not read the answer, or sends on and on
        elif self._reads_head or (self._reads_request and not self.cycle.response_started):
            self._refuse(408, f"the request did not arrive within {self._read_seconds:g} s")
        else:
            self.transport.close()
            self._deadline = time.monotonic() + LINGER_SECONDS

    def _refuse(self, status: int, reason: str) -> None:
        """Answer in place of the app, and end."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # uvicorn drops the app's answer
        body = to_json({"error": reason})
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        self._end()

    def _end(self) -> None:
        """Send no more, but read: a client that is still sending would miss the answer."""
        self.transport.write_eof()
        self._has_ended = True
        self._deadline = time.monotonic() + LINGER_SECONDS

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        super().data_received(data)
        if self._reads_head:
            self._n_head_bytes += len(data)
            if self._n_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the client sends no more, but still gets its answer."""
        if self._has_ended:
            return False
        if self._reads_request:
            self._refuse(400, "the connection ended before the request was complete")
        elif self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            return True
        return False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles the error of the parser."""
        error = sys.exc_info()[1]
        status = 501 if isinstance(error, httptools.HttpParserInvalidMethodError) else 400
        self._reads_head = False
        if self._n_parsed_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(status, f"the request is not valid HTTP: {error or msg}")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = self._reads_request = True
        self._n_head_bytes = self._n_parsed_bytes = 0
        self._deadline = time.monotonic() + self._read_seconds

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def _count(self, n_bytes: int) -> None:
        """A head that arrives in one piece is parsed before ``data_received`` can count it."""
        self._n_parsed_bytes += n_bytes
        if self._n_parsed_bytes > MAX_HEAD_BYTES:
            raise ValueError("too long")  # ends the parser, which calls send_400_response

    def on_headers_complete(self) -> None:
        self._reads_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_request = False
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()
        if self._reads_request and self.expect_100_continue:
            self._end()  # nobody knows whether the body follows

    def _set_deadline(self) -> None:
        answers = not self._reads_request and not self.cycle.response_complete
        limit = self._answer_seconds if answers else self._read_seconds
        self._deadline = time.monotonic() + limit
