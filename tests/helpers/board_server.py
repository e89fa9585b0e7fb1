"""A board in a process of its own, and a page that talks to it through a plain socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 60.0


class HttpAnswer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    """By their names in lower case."""
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


@dataclass
class RunningBoard:
    """A board that serves, its address and its token."""

    process: subprocess.Popen[str]
    port: int
    token: str
    url: str
    streams: list[socket.socket] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)
        self.streams.append(connection)
        return connection

    def send(self, text: bytes) -> HttpAnswer:
        """Send bytes as they are, over a connection of their own."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # it may refuse to read all of it
                connection.sendall(text)
            return read_answer(connection, has_body=not text.startswith(b"HEAD "))

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str | None
    ) -> HttpAnswer:
        """A request with the token; `Host=None` leaves out a header, `X_Echelon_Token=…` replaces
        it."""
        return self.send(self.make_request(path, method, body, **headers))

    def make_request(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str | None
    ) -> bytes:
        given: dict[str, str | None] = {"Host": self.host, "X_Echelon_Token": self.token}
        if method == "POST":
            given["Origin"] = f"http://{self.host}"
        if body:
            given["Content_Length"] = str(len(body))
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [
            f"{name.replace('_', '-')}: {value}"
            for name, value in (given | headers).items()
            if value is not None
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def post(self, path: str, data: Any, **headers: str | None) -> HttpAnswer:
        return self.ask(path, "POST", json.dumps(data).encode(), **headers)

    def get(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, answer
        return answer.data

    def get_rows_until(self, condition: Callable[[Any], bool]) -> Any:
        """The answer of /api/runs as soon as a condition holds."""
        until = time.monotonic() + LIMIT_S
        while not condition(answer := self.get("/api/runs")):
            assert time.monotonic() < until, answer
            time.sleep(0.05)
        return answer

    def listen(self, generation: int, *watched: str) -> Events:
        """Open a page's stream of events."""
        connection = self.connect()
        watch = "".join(f"&watch={each}" for each in watched)
        path = f"/api/events?generation={generation}{watch}"
        connection.sendall(self.make_request(path))
        return Events(connection)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


class Events:
    """The events that one page gets."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lines = connection.makefile("rb")
        status = self._lines.readline()
        assert b" 200 " in status, status
        while self._lines.readline().strip():
            pass

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in self._lines:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])

    def wait_for(self, condition: Callable[[str, Any], bool]) -> Any:
        """The data of the first event for which a condition holds."""
        until = time.monotonic() + LIMIT_S
        for name, data in self:
            if condition(name, data):
                return data
            assert time.monotonic() < until
        raise AssertionError("the stream has ended")

    def wait_for_row(self, run_id: str, condition: Callable[[Any], bool] = bool) -> Any:
        """The row of a run, as soon as an event has it and a condition holds."""
        found: list[Any] = []

        def has_row(name: str, data: Any) -> bool:
            rows = data.get("changed", []) if name == "rows" else []
            found[:] = [row for row in rows if row["id"] == run_id and condition(row)]
            return bool(found)

        self.wait_for(has_row)
        return found[0]

    def close(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def read_answer(connection: socket.socket, has_body: bool = True) -> HttpAnswer:
    """Read one answer; status 0 if the connection was closed without one."""
    with connection.makefile("rb") as file:
        try:
            status = file.readline().split(b" ")
            headers: dict[str, str] = {}
            while line := file.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            body = file.read(int(headers.get("content-length", 0)) if has_body else 0)
        except ConnectionResetError:
            return HttpAnswer(0, {}, b"")
    return HttpAnswer(int(status[1]) if len(status) > 1 else 0, headers, body)


@contextlib.contextmanager
def run_board(
    *words: str, cache: Path, cwd: Path | None = None, **variables: str
) -> Iterator[RunningBoard]:
    """`echelon board WORDS`, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", "board", *words, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or cache.parent,
        env=os.environ | {"ECHELON_CACHE": str(cache)} | variables,
        start_new_session=True,
    )
    board: RunningBoard | None = None
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=LIMIT_S)[1]
        data = json.loads(line)
        board = RunningBoard(process, data["port"], data["token"], data["url"])
        yield board
    finally:
        for stream in board.streams if board else ():
            stream.close()
        process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
