"""The board's curves as the one page of `echelon plot`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_folders import lines, make_run

from echelon.board.plot_file import send_plot_file
from echelon.board.request import NotFoundError, Request, RequestError
from echelon.board.server import Board


def read_page(board: Board, **query: Any) -> dict[str, Any]:
    """The data in the page that is sent for a query."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in query.items()}
    response = send_plot_file(Request("GET", "/api/plot.html", board, query=lists))
    assert response.headers["Content-Disposition"] == 'attachment; filename="curves.html"'
    assert response.content_type.startswith("text/html")
    text = response.body.decode()
    found = re.search('<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_runs_and_metrics_of_the_query_are_in_the_page(tmp_path: Path) -> None:
    make_run(tmp_path, "a", lines())
    make_run(tmp_path, "<script>b", lines())
    make_run(tmp_path, "empty")
    board = Board([tmp_path])
    ids = ["0:a", "0:<script>b", "0:empty"]
    data = read_page(board, run=ids, metric=["loss", "eval_acc", "unknown"], x="epoch", log="0")
    assert [run["name"] for run in data["runs"]] == ["a", "<script>b"]
    assert [panel["metric"] for panel in data["panels"]] == ["loss", "eval_acc"]
    assert data["x"] == "epoch"
    assert not any(panel["log"] for panel in data["panels"])


def test_without_metrics_it_is_what_echelon_plot_draws(tmp_path: Path) -> None:
    make_run(tmp_path, "a", lines())
    data = read_page(Board([tmp_path]), run="0:a")
    assert [panel["metric"] for panel in data["panels"]] == ["loss", "eval_loss", "eval_acc"]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({}, RequestError),
        ({"run": "0:gone"}, NotFoundError),
        ({"run": "0:../a"}, NotFoundError),
        ({"run": "0:empty"}, NotFoundError),
        ({"run": "0:a", "metric": "unknown"}, NotFoundError),
        ({"run": "0:a", "x": "clock"}, RequestError),
        ({"run": "0:a", "smooth": "1"}, RequestError),
        ({"run": "0:a", "smooth": "much"}, RequestError),
        ({"run": "0:a", "log": "yes"}, RequestError),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, query: dict[str, str], error: type[RequestError]
) -> None:
    make_run(tmp_path, "a", lines())
    make_run(tmp_path, "empty")
    board = Board([tmp_path])
    with pytest.raises(error):
        send_plot_file(
            Request("GET", "/api/plot.html", board, query={k: [v] for k, v in query.items()})
        )
