"""Views of the table and its curves that a person gave a name: query strings of the page's URL.

They are kept beside the index of the first root, so that everybody who opens the board on these
runs as this user has the same ones.
"""

from __future__ import annotations

from pathlib import Path

from echelon.board.request import Request, RequestError, Response, Route, json_response
from echelon.board.run_index import find_board_folder
from echelon.errors import EchelonError, Fault
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.os_errors import format_os_error_reason

_VIEWS_FILE = "views.json"
_MAX_VIEWS = 500
_MAX_NAME = 200
_MAX_QUERY = 20_000


def read_views(root: Path) -> dict[str, str]:
    """Return the saved views of a root, by name; what is damaged is missing."""
    data = read_json_object(find_board_folder(root) / _VIEWS_FILE) or {}
    views = data.get("views")
    return _select_views(views) if isinstance(views, dict) else {}


def _select_views(views: dict[str, object]) -> dict[str, str]:
    return {name: query for name, query in views.items() if isinstance(query, str)}


def write_views(root: Path, views: dict[str, str]) -> None:
    """Replace the saved views of a root; EchelonError where that cannot be written."""
    folder = find_board_folder(root)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json_atomically(folder / _VIEWS_FILE, {"version": 1, "views": views})
    except OSError as error:
        what = f"{folder / _VIEWS_FILE} cannot be written: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, "free some space there")) from error


def show_views(request: Request) -> Response:
    """Answer with the saved views: ``{"views": {name: query string}}``."""
    return json_response({"views": read_views(request.board.roots[0])})


def save_views(request: Request) -> Response:
    """Replace the saved views, and answer with them."""
    views = request.json.get("views")
    if not isinstance(views, dict) or len(_select_views(views)) != len(views):
        raise RequestError("views is not an object of query strings by name")
    if len(views) > _MAX_VIEWS:
        raise RequestError(f"there are more than {_MAX_VIEWS} views", "remove some")
    for name, query in views.items():
        if not name.strip() or len(name) > _MAX_NAME or len(query) > _MAX_QUERY:
            raise RequestError(f"the view {name[:_MAX_NAME]!r} is too long, or has no name")
    write_views(request.board.roots[0], views)
    return show_views(request)


ROUTES: list[Route] = [
    ("GET", "/api/views", show_views),
    ("POST", "/api/views", save_views),
]
