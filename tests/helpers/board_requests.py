"""Requests to handlers of the board, as its server hands them over, without a connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from echelon.board.request import Request, RequestError, Response, Route, json_response
from echelon.board.server import Board, RouteTable
from echelon.errors import EchelonError


class Answer(NamedTuple):
    """What a page gets."""

    status: int
    data: Any
    """Of JSON; else the bytes."""


def ask(
    board: Board,
    routes: list[Route],
    path: str,
    body: dict[str, Any] | None = None,
    **query: object,
) -> Answer:
    """The answer to a GET, or to a POST of the body."""
    method = "GET" if body is None else "POST"
    table = RouteTable(routes)
    table._is_whole = True  # only these
    try:
        handler, values = table.find(method, path)
        texts = {name: [str(value)] for name, value in query.items()}
        content = b"" if body is None else json.dumps(body).encode()
        response = handler(Request(method, path, board, values, texts, {}, content))
    except RequestError as error:
        response = json_response({"error": error.what, "hint": error.hint}, error.status)
    except EchelonError as error:
        response = json_response({"error": str(error)}, 400)
    assert isinstance(response, Response)
    is_json = response.content_type.startswith("application/json")
    return Answer(response.status, json.loads(response.body) if is_json else response.body)


def ask_until(
    condition: Callable[[Answer], bool], request: Callable[[], Answer], limit_s: float = 60.0
) -> Answer:
    """The first answer of which the condition holds."""
    until = time.monotonic() + limit_s
    while not condition(answer := request()):
        assert time.monotonic() < until, answer
        time.sleep(0.02)
    return answer
