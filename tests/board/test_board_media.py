"""Images, histograms and texts of a run, as a page asks for them; and no other file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import lines, make_run

from echelon.board.curves.curve_builds import build_curves
from echelon.board.curves.media import list_media, show_media_value
from echelon.board.request import ConflictError, NotFoundError, Request, Response
from echelon.runs.run_folder import Run
from echelon.train.media import Histogram, Image, encode_media

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


class OneRunBoard:
    """A board of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def find_run(self, _: str) -> Run:
        return self.run


def make_request(run: Run, **query: Any) -> Request:
    board: Any = OneRunBoard(run)
    values = {name: [str(value)] for name, value in query.items()}
    return Request("GET", "/api/run/0:a/media", board, {"id": "0:a"}, values)


def ask_for_list(run: Run) -> dict[tuple[str, str], list[float]]:
    answer = list_media(make_request(run))
    assert isinstance(answer, Response)
    return {(i["name"], i["kind"]): i["steps"] for i in json.loads(answer.body)["items"]}


def ask_for_value(run: Run, name: str, **more: Any) -> Response:
    answer = show_media_value(make_request(run, name=name, **more))
    assert isinstance(answer, Response)
    return answer


def log_media(run: Run, step: int, name: str, value: Any) -> None:
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": step, name: encode_media(run, name, step, value)}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path, "a", lines(40))
    for step in (10, 20, 30):
        log_media(run, step, "samples/a b", Image(np.full((4, 4, 3), step, np.uint8)))
        log_media(run, step, "weights", Histogram(np.arange(step)))
        log_media(run, step, "said", f"<b>at {step}</b>")
    return run


def test_the_list_has_names_kinds_and_steps(run: Run) -> None:
    assert ask_for_list(run) == {
        ("samples/a b", "image"): [10, 20, 30],
        ("weights", "histogram"): [10, 20, 30],
        ("said", "text"): [10, 20, 30],
    }


def test_values_are_those_of_their_step(run: Run) -> None:
    said = json.loads(ask_for_value(run, "said", step=20).body)
    assert said == {"name": "said", "kind": "text", "step": 20, "value": "<b>at 20</b>"}
    weights = json.loads(ask_for_value(run, "weights", step=10).body)
    assert (weights["kind"], sum(weights["value"]["counts"])) == ("histogram", 10)
    image = ask_for_value(run, "samples/a b", step=30)
    assert (image.content_type, image.headers["X-Step"]) == ("image/png", "30")
    [path] = run.media_folder.glob("*30.png")
    assert image.body == path.read_bytes()


def test_between_two_steps_it_is_the_one_before(run: Run) -> None:
    assert json.loads(ask_for_value(run, "said", step=29.5).body)["step"] == 20
    assert json.loads(ask_for_value(run, "said").body)["step"] == 30
    with pytest.raises(NotFoundError):
        ask_for_value(run, "said", step=9)


def test_what_is_logged_later_is_there(run: Run) -> None:
    assert ("new", "text") not in ask_for_list(run)
    log_media(run, 50, "new", "a text")
    log_media(run, 50, "said", "again")
    log_media(run, 50, "said", "and again")
    assert ask_for_list(run)["new", "text"] == [50]
    assert json.loads(ask_for_value(run, "said").body)["value"] == "and again"


def test_media_of_a_long_run_are_found_by_another_process(tmp_path: Path) -> None:
    text = "".join(
        json.dumps({"step": n, "loss": n / 7, **({"said": f"at {n}"} if n % 1000 == 0 else {})})
        + ("\n" if n % 77 else "\nhalf a li\n")
        for n in range(9000)
    )
    run = make_run(tmp_path, "a", text)
    assert build_curves(run) == ""
    assert ask_for_list(run) == {("said", "text"): [1000.0 * n for n in range(9)]}
    for step in (0, 5000, 8000):
        assert json.loads(ask_for_value(run, "said", step=step).body)["value"] == f"at {step}"


def test_one_name_of_several_kinds(run: Run) -> None:
    log_media(run, 40, "mixed", "a text")
    log_media(run, 41, "mixed", Histogram(np.arange(3)))
    with run.metrics_file.open("a") as file:
        file.write('{"step": 42, "mixed": 5.0}\n')
    assert ask_for_list(run)["mixed", "text"] == [40]
    assert ask_for_list(run)["mixed", "histogram"] == [41]
    assert json.loads(ask_for_value(run, "mixed").body)["kind"] == "histogram"
    assert json.loads(ask_for_value(run, "mixed", kind="text").body)["value"] == "a text"


def test_lines_that_have_changed_meanwhile_are_not_believed(run: Run) -> None:
    ask_for_list(run)
    with run.metrics_file.open("r+b") as file:
        data = file.read()
        file.seek(data.index(b"<b>at 20") - 9)
        file.write(b"x")
    with pytest.raises(ConflictError):
        ask_for_value(run, "said", step=20)


# --- no other file ---


def log_image_line(run: Run, name: Any) -> None:
    with run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 60, "picture": {"image": name}}) + "\n")


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "/etc/passwd", "media/../../secret.png", "media/..", ".", "", "media/\0",
     "media/" + "x" * 5000, "config.json"],
)  # fmt: skip
def test_a_path_out_of_the_media_folder_leads_nowhere(run: Run, name: str) -> None:
    (run.folder / "secret.png").write_bytes(PNG + b"secret")
    (run.folder.parent / "secret.png").write_bytes(PNG + b"secret")
    log_image_line(run, name)
    with pytest.raises(NotFoundError):
        ask_for_value(run, "picture")


def test_links_out_of_the_run_lead_nowhere(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG + b"secret")
    (run.media_folder / "link.png").symlink_to(secret)
    log_image_line(run, "media/link.png")
    with pytest.raises(NotFoundError):
        ask_for_value(run, "picture")
    kept = run.media_folder.rename(tmp_path / "elsewhere")
    run.media_folder.symlink_to(kept)
    with pytest.raises(NotFoundError):
        ask_for_value(run, "samples/a b", step=10)


def test_what_is_no_picture_is_not_served(run: Run) -> None:
    (run.media_folder / "page.png").write_bytes(b"<html><script>alert(1)</script>")
    log_image_line(run, "media/page.png")
    with pytest.raises(NotFoundError):
        ask_for_value(run, "picture")
    os.mkfifo(run.media_folder / "pipe.png")
    log_image_line(run, "media/pipe.png")
    with pytest.raises(NotFoundError):
        ask_for_value(run, "picture")


def test_an_image_that_is_gone_is_said(run: Run) -> None:
    for path in run.media_folder.glob("*10.png"):
        path.unlink()
    with pytest.raises(NotFoundError, match="10"):
        ask_for_value(run, "samples/a b", step=10)


def test_a_run_without_lines_has_no_media(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    assert ask_for_list(run) == {}
    run.metrics_file.unlink()
    with pytest.raises(NotFoundError):
        ask_for_list(run)
