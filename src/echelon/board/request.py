"""What a handler of the board is given and what it returns.

A handler is a plain function from a `Request` to a `Response`. A module lists its handlers as
``ROUTES``, and `server` knows these modules by name:

    def show_jobs(request: Request) -> Response:
        return json_response({"jobs": [...]})

    ROUTES: list[Route] = [("GET", "/api/jobs", show_jobs)]

A handler raises EchelonError for a mistake of the user (400), or a `RequestError` with another
status. Nothing that a page or a file says is trusted here: names are values, never paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.board.server import Board

JSON_TYPE = "application/json; charset=utf-8"
BYTES_TYPE = "application/octet-stream"
TEXT_TYPE = "text/plain; charset=utf-8"


class RequestError(Exception):
    """A request that is refused: a status, what is wrong, and what to do about it."""

    status = 400

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class ForbiddenError(RequestError):
    """What is asked for is not allowed here."""

    status = 403


class NotFoundError(RequestError):
    """What is asked for is not there, or not any more."""

    status = 404


class ConflictError(RequestError):
    """What is asked for cannot be done in the present state."""

    status = 409


@dataclass(frozen=True)
class Response:
    """A whole answer."""

    body: bytes
    content_type: str = JSON_TYPE
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamResponse:
    """An answer that is sent piece by piece, until the iterator or the connection ends.

    The iterator is closed when the page has gone, so that a generator's ``finally`` is run.
    """

    pieces: Iterator[bytes]
    content_type: str = BYTES_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One request of a page that has shown its token."""

    method: str
    path: str
    """Decoded, without the query."""
    board: Board
    path_values: Mapping[str, str] = field(default_factory=dict)
    """The values of `{name}` in the route's pattern, decoded."""
    query: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case."""
    body: bytes = b""

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a name in the query."""
        return self.query.get(name, [default])[0]

    def get_all(self, name: str) -> list[str]:
        """Return all values of a name in the query, none where it is missing."""
        return list(self.query.get(name, ()))

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return a whole number in the query; RequestError for what is none, and for a missing
        one without a default."""
        text = self.get(name)
        if not text and default is not None:
            return default
        try:
            return int(text)
        except ValueError:
            raise RequestError(f"{name}={text[:80]!r} is not a whole number") from None

    def get_float(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number in the query, or the default where it is missing or empty."""
        text = self.get(name)
        if not text:
            return default
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise RequestError(f"{name}={text[:80]!r} is not a number")
        return number

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object in the body; RequestError where there is none."""
        try:
            data = json.loads(self.body)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise RequestError("the body is not a JSON object")
        return data


Handler = Callable[[Request], "Response | StreamResponse"]
Route = tuple[str, str, Handler]
"""Method, pattern and handler: ``("GET", "/api/run/{id}/logs", show_logs)``."""


def json_response(data: Any, status: int = 200) -> Response:
    """Return a value as JSON. NaN and infinities, which JSON does not have, become null."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(
            replace_not_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
    return Response(text.encode("utf-8", "replace"), JSON_TYPE, status)


def replace_not_finite(value: Any) -> Any:
    """Return JSON data with None in the place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_not_finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_not_finite(each) for each in value]
    return value
