"""The server of the board: its table of routes, and the gate before it.

Every request passes the same gate before a handler sees it: the name of the host (a page elsewhere
may have rebound its own name to this address), the token, and for a change also the token in a
header and the page's own origin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

from echelon.board import live_updates, saved_views
from echelon.board.http_connection import HttpConnection, HttpMessage
from echelon.board.page_files import answer_page, answer_page_file
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

_ROUTE_MODULES = (
    *("curves.curve_queries", "curves.media", "run_page", "log_lines"),
    *("machines", "sweep_pages", "actions", "foreign.foreign_runs", "plot_file"),
)
"""Of this package, each with ROUTES. They are imported when a page has its table, or before that
when a route is asked for that is not known yet."""
_OTHER_SITES = ("cross-site", "same-site")
"""As browsers say where a request is from; other ports of this machine are the same site."""
_MAX_CONNECTIONS = 256
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


def _make_method_error(path: str, method: str) -> RequestError:
    error = RequestError(f"{path[:200]} does not take {method}")
    error.status = 405
    return error


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
            raise _make_method_error(path, method)
        raise NotFoundError(f"there is no {path[:200]}")

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
                    print_exception()
                    continue
                self._routes += [(method, p.split("/"), handler) for method, p, handler in routes]
            self._is_whole = True


# --- the server ---


class BoardServer:
    """Serves one board, a thread for each connection."""

    def __init__(self, board: Board, host: str, port: int, token: str) -> None:
        self.board = board
        self.token = token
        self.host = host
        self.routes = RouteTable(_ROUTES)
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(128)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.server_port = int(self._socket.getsockname()[1])
        self._is_closed = False

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/?token={self.token}"

    def serve_forever(self, wake: int | None = None) -> None:
        """Accept connections until server_close() is called.

        A signal may reach any thread, and its handler waits for the main one: with `wake`, a
        handle that can be read when one has come, this thread is woken up for it.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        while not self._is_closed:
            poll.poll()
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError:
                if not self._is_closed:
                    time.sleep(0.1)  # too many open files: some will be closed
                continue
            connection.setblocking(True)
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def server_close(self) -> None:
        """Stop accepting connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up accept()
        self._socket.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            HttpConnection(connection, self._respond).serve()
        finally:
            self._connections.release()

    def _respond(self, message: HttpMessage) -> Response | StreamResponse:
        """Return the answer to a request, whatever comes of it."""
        try:
            return self._find_response(message)
        except RequestError as error:
            return json_response({"error": error.what, "hint": error.hint}, error.status)
        except EchelonError as error:
            what = "; ".join(fault.what for fault in error.faults)
            hint = "; ".join(fault.do for fault in error.faults)
            return json_response({"error": what, "hint": hint}, 400)
        except Exception:
            print_exception()
            hint = "the terminal of `echelon board` shows more"
            return json_response({"error": "an error of the board", "hint": hint}, 500)

    def _find_response(self, message: HttpMessage) -> Response | StreamResponse:
        # 1. The gate: nobody who was led here by another page gets anything.
        headers = message.headers
        if not self._is_own_host(headers.get("host", "")):
            raise ForbiddenError("this is not the address of the board", "use the printed URL")
        site = headers.get("sec-fetch-site", "none")
        if site in _OTHER_SITES and headers.get("sec-fetch-mode") != "navigate":
            raise ForbiddenError("the board answers its own page alone")
        query = _parse_query(message.query)
        # 2. The page, whose files hold nothing of the user's.
        if not message.path.startswith("/api/"):
            if message.method == "POST":
                raise _make_method_error(message.path, message.method)
            return self._find_page(message, query)
        # 3. What needs the token.
        if not self._has_token(headers):
            error = RequestError("the token is missing", "open the URL that was printed")
            error.status = 401
            raise error
        if message.method == "POST":
            self._require_own_page(headers)
        method = "GET" if message.method == "HEAD" else message.method
        handler, values = self.routes.find(method, message.path)
        given = {**headers, "x-board-token": self.token}
        path = unquote(message.path)
        response = handler(
            Request(message.method, path, self.board, values, query, given, message.body)
        )
        if isinstance(response, StreamResponse):
            # A page that listens has drawn its rows. What it asks for next is imported meanwhile.
            threading.Thread(target=self.routes.import_modules, daemon=True).start()
        return response

    # --- the gate ---

    def _is_own_host(self, header: str) -> bool:
        """Return whether a request was sent to this server by its own address, not by a name that
        somebody made lead here."""
        name = _split_host(header)[0]
        if name in {self.host, "127.0.0.1", "localhost", "::1"} - {""}:
            return True
        if is_loopback(self.host):
            return False
        return _is_ip_address(name) or name in (socket.gethostname(), socket.getfqdn())

    def _is_token(self, given: str) -> bool:
        from hmac import compare_digest

        return compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        if self._is_token(headers.get("x-echelon-token", "")):
            return True
        name = _make_cookie_name(headers)
        cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        return any(key == name and self._is_token(value) for key, _, value in cookies)

    def _require_own_page(self, headers: Mapping[str, str]) -> None:
        if headers.get("origin", "") != f"http://{headers.get('host', '')}":
            raise ForbiddenError("changes are made from the board's own page alone")
        if not self._is_token(headers.get("x-echelon-token", "")):
            raise ForbiddenError("a change needs the token in the header X-Echelon-Token")

    # --- the page ---

    def _find_page(self, message: HttpMessage, query: dict[str, list[str]]) -> Response:
        if message.path != "/":
            return answer_page_file(message.path[1:], message.headers)
        if self._is_token(query.get("token", [""])[0]):
            rest = urlencode([(k, v) for k, each in query.items() for v in each if k != "token"])
            cookie = f"{_make_cookie_name(message.headers)}={self.token}"
            headers = {
                "Location": f"/?{rest}" if rest else "/",
                "Set-Cookie": f"{cookie}; HttpOnly; SameSite=Strict; Path=/",
            }
            return Response(b"", "text/plain", 303, headers)
        if not self._has_token(message.headers):
            return answer_page("login.html", 401)
        return answer_page("index.html")


def print_exception() -> None:
    """Print an exception that is a bug of ours, for the person at the terminal."""
    import traceback

    traceback.print_exc()


def _parse_query(text: str) -> dict[str, list[str]]:
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=10_000)
    except ValueError:
        raise RequestError("there is too much in the address") from None


def _split_host(header: str) -> tuple[str, str]:
    """Return host and port of a header; an empty host for nonsense."""
    if header.startswith("["):
        name, _, rest = header[1:].partition("]")
        return name.lower(), rest.removeprefix(":")
    name, _, port = header.partition(":")
    return ("", "") if not port.isdecimal() and port else (name.lower(), port)


def _make_cookie_name(headers: Mapping[str, str]) -> str:
    # A browser sends the cookies of a host to all its ports: each has one of its own.
    return f"echelon-board-{_split_host(headers.get('host', ''))[1] or 80}"


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
    import secrets

    token = secrets.token_hex(32)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = file.with_name(f".token.{secrets.token_hex(4)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as opened:
            opened.write(token + "\n")
        os.replace(temporary, file)
    return token
