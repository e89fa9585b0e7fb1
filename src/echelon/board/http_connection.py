"""HTTP/1.1 over one connection: a request read within limits, an answer written.

It knows what browsers, curl and tests send and refuses all else. The standard library's
`http.server` reads more kinds of requests, answers errors without our headers, and takes as long to
import as the rows of 3,000 runs to load.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from echelon.board.request import RequestError, Response, StreamResponse, json_response

_MAX_LINE = 65_536
_MAX_HEAD = 131_072
_MAX_HEADERS = 100
_MAX_BODY = 1_000_000
_MAX_DRAINED = 4_000_000
_IDLE_S = 75.0
"""Between two requests."""
_READ_S = 20.0
"""For the rest of a request once it has begun, and for a page to take what is sent."""
_METHODS = ("GET", "HEAD", "POST")
_REASONS = {
    200: "OK",
    303: "See Other",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""On every answer."""


class HttpMessage(NamedTuple):
    """One request as it was sent."""

    method: str
    path: str
    """Not decoded, without the query."""
    query: str
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes


Respond = Callable[[HttpMessage], "Response | StreamResponse"]


class _ConnectionEnded(Exception):
    """The page has gone, between two requests or within one."""


class HttpConnection:
    """Answers the requests of one connection, until it ends."""

    def __init__(self, connection: socket.socket, respond: Respond) -> None:
        self._connection = connection
        self._respond = respond
        self._file = connection.makefile("rb")
        self._is_last = False
        self._is_head = False
        """Whether only the head of the answer is asked for."""

    def serve(self) -> None:
        """Answer requests one after the other. A page that goes away is no error."""
        with contextlib.suppress(OSError, _ConnectionEnded), self._connection, self._file:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._is_last:
                self._is_head = False
                try:
                    message = self._read_request()
                except RequestError as error:
                    self._is_last = True
                    self._send(
                        json_response({"error": error.what, "hint": error.hint}, error.status)
                    )
                    self._drain()
                    return
                response = self._respond(message)
                if isinstance(response, StreamResponse):
                    self._send_stream(response)
                else:
                    self._send(response)

    # --- reading ---

    def _read_request(self) -> HttpMessage:
        self._connection.settimeout(_IDLE_S)
        first = self._read_line(414)
        began = time.monotonic()
        self._connection.settimeout(_READ_S)
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            raise RequestError("this is not a request of HTTP")
        method, target, version = words
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise _make_error(505, "HTTP/1.1 is spoken here")
        headers = self._read_headers(began)
        closes = headers.get("connection", "").lower() == "close"
        self._is_last = version == "HTTP/1.0" or closes
        self._is_head = method == "HEAD"
        if method not in _METHODS:
            raise _make_error(405, f"{method[:20]} is not a method of the board")
        if not target.startswith("/"):
            raise RequestError("the address is not a path")
        path, _, query = target.partition("?")
        return HttpMessage(method, path, query, headers, self._read_body(headers))

    def _read_headers(self, began: float) -> dict[str, str]:
        headers: dict[str, str] = {}
        size = 0
        while line := self._read_line(431):
            size += len(line)
            if size > _MAX_HEAD or len(headers) >= _MAX_HEADERS:
                raise _make_error(431, "the headers are too long")
            if time.monotonic() - began > _READ_S:
                raise _ConnectionEnded
            name, colon, value = line.partition(":")
            name = name.lower()
            if not colon or not name or name != name.strip():
                raise RequestError("a header is not one of HTTP")
            if name in headers and name in ("host", "content-length", "origin"):
                raise RequestError(f"there are two headers {name}")
            headers[name] = value.strip()
        return headers

    def _read_line(self, status_if_long: int) -> str:
        line = self._file.readline(_MAX_LINE + 1)
        if not line:
            raise _ConnectionEnded
        if not line.endswith(b"\n"):
            if len(line) > _MAX_LINE:
                raise _make_error(status_if_long, f"a line is longer than {_MAX_LINE} bytes")
            raise _ConnectionEnded
        return line.rstrip(b"\r\n").decode("latin-1")

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
            raise RequestError("a body needs its Content-Length")
        if len(length) > 12 or int(length) > _MAX_BODY:
            raise _make_error(413, f"the body is longer than {_MAX_BODY} bytes")
        if headers.get("expect", "").lower() == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._file.read(int(length))
        if len(body) < int(length):
            raise _ConnectionEnded
        return body

    def _drain(self) -> None:
        """Read what is still sent: a connection that is closed before would lose the answer."""
        self._connection.shutdown(socket.SHUT_WR)
        self._connection.settimeout(1.0)
        drained = 0
        while drained < _MAX_DRAINED and (data := self._connection.recv(65_536)):
            drained += len(data)

    # --- writing ---

    def _send(self, response: Response) -> None:
        head = self._make_head(response.status, response.content_type, response.headers)
        head += f"Content-Length: {len(response.body)}\r\n"
        head += "Connection: close\r\n\r\n" if self._is_last else "\r\n"
        self._connection.settimeout(_READ_S)
        self._connection.sendall(head.encode("latin-1"))
        if not self._is_head and response.status != 304:
            self._connection.sendall(response.body)

    def _send_stream(self, response: StreamResponse) -> None:
        self._is_last = True
        head = self._make_head(200, response.content_type, response.headers)
        self._connection.settimeout(_READ_S)
        try:
            self._connection.sendall(f"{head}Connection: close\r\n\r\n".encode("latin-1"))
            if not self._is_head:
                for piece in response.pieces:
                    self._connection.sendall(piece)
        finally:
            if isinstance(response.pieces, Generator):
                response.pieces.close()

    def _make_head(self, status: int, content_type: str, more: Mapping[str, str]) -> str:
        own = {"Content-Type": content_type, "Cache-Control": "no-store"}
        headers = _SECURITY_HEADERS | own | dict(more)
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
        # No value may begin a header of its own.
        lines += [f"{name}: {' '.join(value.split())}" for name, value in headers.items()]
        return "\r\n".join(lines) + "\r\n"


def _make_error(status: int, what: str) -> RequestError:
    error = RequestError(what)
    error.status = status
    return error
