"""The server of the board: HTTP/1.1 of the standard library, a table of routes, and its guard.

Every request passes the same gate before a handler sees it: the name of the host (a page elsewhere
may have rebound its own name to this address), the token, and for a change also the token in a
header and the page's own origin.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from echelon.board import live_updates, saved_views
from echelon.board.request import (
    ForbiddenError,
    Handler,
    NotFoundError,
    Request,
    RequestError,
    Response,
    Route,
    StreamResponse,
    json_response,
)
from echelon.board.run_index import RunIndex, find_board_cache
from echelon.errors import EchelonError

_PAGE_FOLDER = Path(__file__).parent / "page"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
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
_ROUTE_MODULES = (
    *("curve_queries", "media", "run_page", "log_lines"),
    *("machines", "sweep_pages", "actions", "foreign_runs", "plot_file"),
)
"""Of this package, each with ROUTES. They are imported when a route is asked for that is not known
yet."""
_MAX_BODY = 1_000_000
_IDLE_S = 60.0
_POOL_SIZE = 4


class Board:
    """What all handlers share: the roots, the index of their runs, and what may be done."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        can_act: bool = False,
        read_sweep: Callable[[Path, bool], dict[str, Any]] | None = None,
    ) -> None:
        self.roots = [Path(os.path.realpath(root)) for root in roots]
        self.can_act = can_act
        self.read_sweep = read_sweep
        """From the folder of a sweep, and whether importance is wanted, to its report; given from
        outside, since a board does not know sweeps."""
        self.index = RunIndex(self.roots)
        self.watch = live_updates.LiveUpdates(self.index)
        self.ask_slurm = self.index.ask_slurm = self.watch.slurm.ask
        """Answers about jobs at once; Slurm itself is asked seldom, in the background."""
        self.index.read_foreign_row = self.watch.foreign.read_row

    def find_run(self, run_id: str) -> Any:
        """Return the Run of an id; NotFoundError where there is none."""
        from echelon.runs.run_folder import Run

        return Run(self.index.find_folder(run_id))

    @cached_property
    def _pool(self) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(_POOL_SIZE, "board-work")

    def submit(self, work: Callable[[], Any]) -> Any:
        """Have slow work done in one of a few threads; returns its future."""
        return self._pool.submit(work)


# --- handlers of the shell ---


def show_hello(request: Request) -> Response:
    """Answer with what a page must know first, among it the token for changes."""
    from echelon import __version__

    board = request.board
    return json_response(
        {
            "version": __version__,
            "token": request.headers.get("x-board-token", ""),
            "host": socket.gethostname(),
            "can_act": board.can_act,
            "roots": [{"path": str(root)} for root in board.roots],
            "generation": board.index.generation,
        }
    )


def show_runs(request: Request) -> Response:
    """Answer with all rows, joined as they are in the index."""
    board = request.board
    generation, is_complete, rows = board.index.render_rows()
    board.watch.request_check()
    head = {
        "version": 1,
        "generation": generation,
        "complete": is_complete,
        "can_act": board.can_act,
        "host": socket.gethostname(),
        "roots": [{"path": str(root)} for root in board.roots],
        "defaults": board.index.get_defaults(),
    }
    return Response(json.dumps(head).encode()[:-1] + b',"rows":' + rows + b"}")


def annotate(request: Request) -> Response:
    """Write the note and tags of a run into its folder, and answer with its new row."""
    from echelon.runs.annotations import annotate_run, require_valid_tags

    run = request.board.find_run(request.path_values["id"])
    data = request.json
    note, added, removed = data.get("note"), data.get("add_tags", []), data.get("remove_tags", [])
    if note is not None and not isinstance(note, str):
        raise RequestError("note is not a text")
    for tags in (added, removed):
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise RequestError("tags are not a list of texts")
    require_valid_tags(added)
    if run.folder.stat().st_uid != os.geteuid():
        raise ForbiddenError(
            f"{run.folder} belongs to another user", "the board writes into folders of its user"
        )
    annotate_run(run, note, added, removed)
    row = request.board.index.read_again(request.path_values["id"])
    request.board.watch.tell()
    return Response(row)


_ROUTES: list[Route] = [
    ("GET", "/api/hello", show_hello),
    ("GET", "/api/runs", show_runs),
    ("POST", "/api/run/{id}/annotations", annotate),
    *live_updates.ROUTES,
    *saved_views.ROUTES,
]


class RouteTable:
    """Finds the handler of a path. The modules of handlers are imported when they are needed."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [
            (method, pattern.split("/"), handler) for method, pattern, handler in routes
        ]
        self._is_whole = False
        self._lock = threading.Lock()

    def find(self, method: str, path: str) -> tuple[Handler, dict[str, str]]:
        """Return the handler of a path and the values in it. The path is not decoded yet."""
        found = self._match(path)
        if method not in found:
            self.import_modules()
            found = self._match(path)
        if method in found:
            return found[method]
        if found:
            error = RequestError(f"{path} does not take {method}")
            error.status = 405
            raise error
        raise NotFoundError(f"there is no {path}")

    def _match(self, path: str) -> dict[str, tuple[Handler, dict[str, str]]]:
        words = path.split("/")
        found: dict[str, tuple[Handler, dict[str, str]]] = {}
        for method, pattern, handler in self._routes:
            if len(pattern) == len(words) and all(
                ours == theirs or (ours.startswith("{") and theirs)
                for ours, theirs in zip(pattern, words, strict=True)
            ):
                values = {
                    ours[1:-1]: unquote(theirs)
                    for ours, theirs in zip(pattern, words, strict=True)
                    if ours.startswith("{")
                }
                found.setdefault(method, (handler, values))
        return found

    def import_modules(self) -> None:
        """Import all modules of handlers, once."""
        with self._lock:
            if self._is_whole:
                return
            for name in _ROUTE_MODULES:
                module = f"{__package__}.{name}"
                try:
                    routes = import_module(module).ROUTES
                except Exception:  # one that cannot be had must not take the others with it
                    traceback.print_exc()
                    continue
                self._routes += [(method, p.split("/"), handler) for method, p, handler in routes]
            self._is_whole = True


# --- the server ---


class BoardServer(ThreadingHTTPServer):
    """Serves one board. Its thread is the caller's."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, board: Board, host: str, port: int, token: str) -> None:
        self.board = board
        self.token = token
        self.host = host
        self.routes = RouteTable(_ROUTES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), BoardRequestHandler)

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.server_address[1]

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a page that has gone; print what is a bug of ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()

    def is_own_host(self, host_header: str) -> bool:
        """Return whether a request was sent to this server by its own address, not by a name that
        somebody made lead here."""
        name = urlsplit(f"//{host_header}").hostname or ""
        own = {self.host, "127.0.0.1", "localhost", "::1"}
        if not is_loopback(self.host):
            own |= {socket.gethostname(), socket.getfqdn()}
            return name in own or _is_ip_address(name)
        return name in own


class BoardRequestHandler(BaseHTTPRequestHandler):
    """One connection of a page."""

    protocol_version = "HTTP/1.1"
    server_version = "echelon"
    sys_version = ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    server: BoardServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests hold names of runs and the token."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            response = self._find_response()
        except RequestError as error:
            response = json_response({"error": error.what, "hint": error.hint}, error.status)
        except EchelonError as error:
            what = "; ".join(fault.what for fault in error.faults)
            hint = "; ".join(fault.do for fault in error.faults)
            response = json_response({"error": what, "hint": hint}, 400)
        except Exception:
            traceback.print_exc()
            hint = "the terminal of `echelon board` shows more"
            response = json_response({"error": "an error of the board", "hint": hint}, 500)
        if isinstance(response, StreamResponse):
            self._send_stream(response)
        else:
            self._send(response)

    def _find_response(self) -> Response | StreamResponse:
        body = self._read_body()
        target = urlsplit(self.path)
        if not self.server.is_own_host(self.headers.get("Host", "")):
            raise ForbiddenError("this is not the address of the board", "use the printed URL")
        query = parse_qs(target.query, keep_blank_values=True, max_num_fields=20_000)
        is_page = self.command in ("GET", "HEAD") and not target.path.startswith("/api/")
        if is_page and self._is_token(query.get("token", [""])[0]):
            return self._set_cookie(target.path, query)
        if is_page and target.path != "/":
            return self._find_page_file(target.path)
        if not self._has_token():
            if is_page:
                return Response(_read_page_file("login.html"), _CONTENT_TYPES[".html"], 401)
            error = RequestError("the token is missing", "open the URL that was printed")
            error.status = 401
            raise error
        if is_page:
            return Response(_read_page_file("index.html"), _CONTENT_TYPES[".html"])
        if self.command == "POST":
            self._require_own_page()
        method = "GET" if self.command == "HEAD" else self.command
        handler, values = self.server.routes.find(method, target.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        headers["x-board-token"] = self.server.token
        return handler(
            Request(
                self.command, unquote(target.path), self.server.board, values, query, headers, body
            )
        )

    # --- the gate ---

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True
            raise RequestError("a body needs its Content-Length")
        if int(length) > _MAX_BODY:
            self.close_connection = True
            error = RequestError(f"the body is longer than {_MAX_BODY} bytes")
            error.status = 413
            raise error
        return self.rfile.read(int(length))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    def _has_token(self) -> bool:
        if self._is_token(self.headers.get("X-Echelon-Token", "")):
            return True
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie_name and self._is_token(value):
                return True
        return False

    @property
    def _cookie_name(self) -> str:
        # A browser sends the cookies of a host to all its ports: each has one of its own.
        port = urlsplit(f"//{self.headers.get('Host', '')}").port or 80
        return f"echelon-board-{port}"

    def _require_own_page(self) -> None:
        if self.headers.get("Origin", "") != f"http://{self.headers.get('Host', '')}":
            raise ForbiddenError("changes are made from the board's own page alone")
        if not self._is_token(self.headers.get("X-Echelon-Token", "")):
            raise ForbiddenError("a change needs the token in the header X-Echelon-Token")

    def _set_cookie(self, path: str, query: dict[str, list[str]]) -> Response:
        rest = urlencode([(k, v) for k, values in query.items() for v in values if k != "token"])
        place = "/" + quote(unquote(path).lstrip("/\\")) + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        return Response(b"", "text/plain", 303, {"Location": place, "Set-Cookie": cookie})

    # --- answers ---

    def _find_page_file(self, path: str) -> Response:
        name = path[1:]
        if name not in os.listdir(_PAGE_FOLDER) or Path(name).suffix not in _CONTENT_TYPES:
            raise NotFoundError(f"there is no {path[:200]}")
        return Response(_read_page_file(name), _CONTENT_TYPES[Path(name).suffix])

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self._send_headers(response.content_type, response.headers)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _send_stream(self, response: StreamResponse) -> None:
        self.close_connection = True
        self.send_response(200)
        self._send_headers(response.content_type, response.headers)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            if self.command != "HEAD":
                for piece in response.pieces:
                    self.wfile.write(piece)
        finally:
            if isinstance(response.pieces, Generator):
                response.pieces.close()

    def _send_headers(self, content_type: str, more: Any) -> None:
        for name, value in (_SECURITY_HEADERS | {"Cache-Control": "no-store"} | more).items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)


def _read_page_file(name: str) -> bytes:
    try:
        return (_PAGE_FOLDER / name).read_bytes()
    except OSError:
        return f"<!doctype html><title>echelon board</title><p>{name} is missing.".encode()


def is_loopback(host: str) -> bool:
    """Return whether an address is of this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_ip_address(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, name)
            return True
    return False


# --- the token ---


def read_or_make_token() -> str:
    """Return the token of this user's boards: kept, so that a page that is open knows a server
    that was started again."""
    file = find_board_cache() / "token"
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, encoding="ascii") as opened:
            found = os.fstat(handle)
            token = opened.read(200).strip()
        is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if is_private and not found.st_mode & 0o077 and len(token) == 64:
            return token
    token = secrets.token_hex(32)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = file.with_name(f".token.{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as opened:
            opened.write(token + "\n")
        os.replace(temporary, file)
    return token
