"""The server of the board: what it serves to its own page, and what it refuses to all others."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from board_server import LIMIT_S, RunningBoard, read_answer, run_board
from other_users import give_away, needs_root
from run_folders import echelon, lines, make_run

import echelon.board as echelon_board
from echelon.board.run_index import find_board_cache
from echelon.board.server import read_or_make_token


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    (folder / "secret.json").write_text('{"secret": true}')
    make_run(folder / "runs", "a", lines(), lr=0.5)
    linked = make_run(folder / "runs", "linked", lines())
    linked.config_file.unlink()
    linked.config_file.symlink_to(folder / "secret.json")
    outside = make_run(folder / "outside", "b")
    (folder / "runs" / "link").symlink_to(outside.folder)
    return folder


@pytest.fixture(scope="module")
def board(root: Path) -> Iterator[RunningBoard]:
    with run_board("runs", cache=root / "cache") as running:
        running.get_rows_until(lambda data: data["complete"])
        yield running


# --- who may ask ---


def test_the_token_of_the_url_becomes_a_cookie(board: RunningBoard) -> None:
    page = board.ask(f"/?token={board.token}&page=machines&q=a%20b", X_Echelon_Token=None)
    assert (page.status, page.headers["location"]) == (303, "/?page=machines&q=a+b")
    cookie = page.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    pair = cookie.partition(";")[0]
    assert board.ask("/api/hello", X_Echelon_Token=None, Cookie=f"x=1; {pair}").status == 200
    assert board.ask("/", X_Echelon_Token=None, Cookie=pair).status == 200
    assert board.token not in page.headers["location"]


def test_a_redirect_leads_nowhere_else(board: RunningBoard) -> None:
    for path in ("//evil.example/", "/\\evil.example", "/%2F/evil.example", "http://evil.example/"):
        answer = board.ask(f"{path}?token={board.token}", X_Echelon_Token=None)
        assert answer.status in (400, 404)
        assert "location" not in answer.headers
    answer = board.ask(f"/?token={board.token}&a=%0d%0aX-Evil:1", X_Echelon_Token=None)
    assert (answer.status, "x-evil" in answer.headers) == (303, False)


@pytest.mark.parametrize("token", [None, "", "0" * 64, "é" * 32, "a" * 10_000])
def test_without_the_token_nothing_is_told(board: RunningBoard, token: str | None) -> None:
    for path in ("/", "/api/hello", "/api/runs", "/api/events", "/api/run/0:a", "/api/nothing"):
        answer = board.ask(path, X_Echelon_Token=token)
        assert answer.status == 401
        assert b"lr" not in answer.body
        assert board.token.encode() not in answer.body


def test_a_token_is_kept_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    token = read_or_make_token()
    file = find_board_cache() / "token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_or_make_token() == token, "a page that is open knows the next server"
    file.chmod(0o644)
    other = read_or_make_token()
    assert other != token, "somebody may have read it"
    file.write_text("short")
    assert len(read_or_make_token()) == 64
    stolen = tmp_path / "elsewhere"
    stolen.write_text("a" * 64)
    stolen.chmod(0o600)
    file.unlink()
    file.symlink_to(stolen)
    assert read_or_make_token() != "a" * 64


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", None, "10.0.0.1", "127.0.0.1.evil.example", "["]
)
def test_a_name_that_was_made_to_lead_here_is_refused(
    board: RunningBoard, host: str | None
) -> None:
    answer = board.ask("/api/runs", Host=host)
    assert answer.status in (400, 403)
    assert b"rows" not in answer.body


def test_a_tunnel_may_have_another_port(board: RunningBoard) -> None:
    assert board.ask("/api/hello", Host="127.0.0.1:9999").status == 200
    assert board.ask("/api/hello", Host="localhost:9999").status == 200


def test_a_change_needs_the_page_itself(board: RunningBoard) -> None:
    body: Any = {"views": {}}
    assert board.post("/api/views", body).status == 200
    assert board.post("/api/views", body, Origin=None).status == 403
    assert board.post("/api/views", body, Origin="http://evil.example").status == 403
    assert board.post("/api/views", body, Origin="null").status == 403
    other_port = f"http://127.0.0.1:{board.port + 1}"
    assert board.post("/api/views", body, Origin=other_port).status == 403
    cookie = f"echelon-board-{board.port}={board.token}"
    for token in (None, "", "0" * 64):
        answer = board.post("/api/views", body, Cookie=cookie, X_Echelon_Token=token)
        assert answer.status == 403, "the cookie alone would be sent by any page"


def test_pages_of_other_servers_of_this_machine_get_nothing(board: RunningBoard) -> None:
    cookie = f"echelon-board-{board.port}={board.token}"
    for site in ("cross-site", "same-site"):
        answer = board.ask("/api/hello", X_Echelon_Token=None, Cookie=cookie, Sec_Fetch_Site=site)
        assert answer.status == 403
        assert board.token.encode() not in answer.body


def test_every_answer_has_the_policy_and_none_allows_others(board: RunningBoard) -> None:
    for path, method in (
        *(("/", "GET"), ("/api/runs", "GET"), ("/api/nothing", "GET"), ("/nothing.js", "GET")),
        *(("/api/hello", "HEAD"), ("/api/hello", "OPTIONS"), ("/api/hello", "DELETE")),
    ):
        headers = board.ask(path, method, Origin="http://evil.example").headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert not [name for name in headers if name.startswith("access-control")]


def test_other_methods(board: RunningBoard) -> None:
    with board.connect() as connection:
        connection.sendall(board.make_request("/api/hello", "HEAD", Connection="close"))
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert body == b""
    for method in ("OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "BREW"):
        assert board.ask("/api/hello", method).status in (405, 501)
    assert board.post("/api/runs", {}).status == 405
    assert board.ask("/api/views", "GET").status == 200


# --- what is outside ---


def test_files_of_the_page_are_sent_compressed_where_that_is_taken(board: RunningBoard) -> None:
    plain = board.ask("/app.js")
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == "Accept-Encoding"
    packed = board.ask("/app.js", Accept_Encoding="br, gzip;q=0.8")
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["content-type"] == plain.headers["content-type"]
    assert gzip.decompress(packed.body) == plain.body
    assert board.ask("/app.js", Accept_Encoding="gzip").body == packed.body
    for refusal in ("identity", "br", "gzip;q=0", "gzip; q=0.0", "xgzip"):
        assert board.ask("/app.js", Accept_Encoding=refusal).body == plain.body
    # Each of the two is known again by its own mark alone.
    marks = {"identity": plain.headers["etag"], "gzip": packed.headers["etag"]}
    assert marks["identity"] != marks["gzip"]
    for encoding, mark in marks.items():
        known = board.ask("/app.js", Accept_Encoding=encoding, If_None_Match=mark)
        assert (known.status, known.body, known.headers["etag"]) == (304, b"", mark)
        other = marks["gzip" if encoding == "identity" else "identity"]
        assert board.ask("/app.js", Accept_Encoding=encoding, If_None_Match=other).status == 200


def test_all_of_the_page_is_small_on_its_way(board: RunningBoard) -> None:
    names = sorted(path.name for path in (Path(echelon_board.__file__).parent / "page").iterdir())
    answers = [board.ask(f"/{name}", Accept_Encoding="gzip") for name in names]
    assert {answer.status for answer in answers} == {200}
    assert 50_000 < sum(len(answer.body) for answer in answers) < 300_000


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret.json", "/%2e%2e/secret.json", "/..%2fsecret.json", "/....//secret.json"),
        *("/../server.py", "/%2e%2e%2fserver.py", "/__init__.py", "/.hidden", "/page/index.html"),
        *("//etc/passwd", "/%00index.html", "/index.html%00.js"),
    ],
)
def test_files_outside_the_page_are_not_served(board: RunningBoard, path: str) -> None:
    answer = board.ask(path)
    assert answer.status in (400, 404)
    assert b'secret":' not in answer.body
    assert b"import" not in answer.body


@pytest.mark.parametrize(
    "run_id",
    [
        *("0:../outside/b", "0:..%2Foutside%2Fb", "0:%2e%2e", "0:.", "0:", "0", "", "1:a", "-1:a"),
        *("0:link", "0:missing", "0:a%2F..%2Fa", "0:a%00", "0:.board", "²:a", "0:tensorboard:../a"),
        "x" * 5000,
    ],
)
def test_no_id_leads_out_of_the_roots(board: RunningBoard, run_id: str) -> None:
    from urllib.parse import quote

    for text in {run_id, quote(run_id, safe="%")}:
        answer = board.post(f"/api/run/{text}/annotations", {"note": "x"})
        assert answer.status in (400, 404), answer


def test_a_link_to_a_file_outside_is_not_read(board: RunningBoard, root: Path) -> None:
    [row] = [row for row in board.get("/api/runs")["rows"] if row["name"] == "linked"]
    assert row["state"] == "broken"
    assert "config.json is a link" in row["why"]
    assert "secret" not in json.dumps(row)
    assert board.post("/api/run/0:linked/annotations", {"note": "x"}).status == 404


def test_a_link_to_a_run_is_not_a_run(board: RunningBoard) -> None:
    names = {row["name"] for row in board.get("/api/runs")["rows"]}
    assert names == {"a", "linked"}


# --- requests that are too much ---


def test_requests_that_are_too_large_are_refused(board: RunningBoard) -> None:
    assert board.ask("/?" + "a" * 100_000).status in (0, 400, 414)
    assert board.ask("/", X_Long="a" * 100_000).status in (0, 400, 431)
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(1000))
    request = board.make_request("/").replace(b"\r\n\r\n", b"\r\n" + many + b"\r\n")
    assert board.send(request).status in (0, 400, 431)
    assert board.ask("/api/views", "POST", Content_Length="2000000").status == 413
    assert board.ask("/api/views", "POST", Content_Length="-1").status == 400
    assert board.ask("/api/views", "POST", Content_Length="1e3").status == 400
    assert board.ask("/api/views", "POST", Transfer_Encoding="chunked").status == 400
    assert board.get("/api/hello"), "and it serves on"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"\xff", b'{"views": 1}', b"[" * 100_000, b'{"views": {"a": 1}}']
)
def test_bodies_that_are_nonsense(board: RunningBoard, body: bytes) -> None:
    answer = board.ask("/api/views", "POST", body)
    assert answer.status == 400
    assert answer.data["error"]


@pytest.mark.parametrize(
    "text",
    [
        *(b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x00"),
        *(b"GET\r\n", b"GET / HTTP/1.1\r\n folded: 1\r\n\r\n"),
        *(b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    ],
)
def test_what_is_no_request(board: RunningBoard, text: bytes) -> None:
    with board.connect() as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        assert read_answer(connection).status in (0, 400, 403, 505)
    assert board.get("/api/hello")


def test_a_connection_is_used_again(board: RunningBoard) -> None:
    with board.connect() as connection:
        for _ in range(3):
            connection.sendall(board.make_request("/api/hello"))
            assert read_answer(connection).status == 200
        connection.sendall(board.make_request("/api/nothing"))
        assert read_answer(connection).status == 404
        connection.sendall(board.make_request("/api/hello"))
        assert read_answer(connection).status == 200


# --- what is kept ---


def test_views_are_kept_beside_the_runs(board: RunningBoard, root: Path) -> None:
    views = {"the best": "sort=loss&filter=lr%3E0.1", "<script>": "q=<b>"}
    assert board.post("/api/views", {"views": views}).data == {"views": views}
    assert board.get("/api/views") == {"views": views}
    assert json.loads((root / "runs" / ".board" / "views.json").read_text())["views"] == views
    assert board.post("/api/views", {"views": {"a": "x" * 100_000}}).status == 400
    assert board.post("/api/views", {"views": {}}).data == {"views": {}}


def test_notes_and_tags_are_written_into_the_run(board: RunningBoard, root: Path) -> None:
    path = "/api/run/0%3Aa/annotations"
    row = board.post(path, {"note": "<script>alert(1)</script>", "add_tags": ["x", "y"]}).data
    assert (row["note"], row["tags"]) == ("<script>alert(1)</script>", ["x", "y"])
    row = board.post(path, {"remove_tags": ["x"]}).data
    assert (row["note"], row["tags"]) == ("<script>alert(1)</script>", ["y"])
    kept = json.loads((root / "runs" / "a" / "annotations.json").read_text())
    assert kept == {"tags": ["y"], "note": "<script>alert(1)</script>"}
    for body in ({"note": 1}, {"add_tags": "x"}, {"add_tags": ["a b"]}, {"add_tags": [1]}):
        assert board.post(path, body).status == 400
    assert board.post("/api/run/0:gone/annotations", {}).status == 404
    board.post(path, {"note": "", "remove_tags": ["y"]})


@needs_root
def test_files_of_other_users_are_never_written(root: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "theirs", lines())
    give_away(run.folder)
    give_away(run.folder.parent)
    with run_board("runs", cache=tmp_path / "cache") as board:
        board.get_rows_until(lambda data: data["complete"] and data["rows"])
        answer = board.post("/api/run/0:theirs/annotations", {"note": "x"})
        assert answer.status == 403
        assert board.post("/api/views", {"views": {"a": "b"}}).status == 200
        until_saved = list((tmp_path / "cache" / "board" / "roots").rglob("views.json"))
        assert len(until_saved) == 1
    assert not run.annotations_file.exists()
    assert not (tmp_path / "runs" / ".board").exists()


# --- the command ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    make_run(tmp_path / "runs", "a", lines())
    with run_board(cache=tmp_path / "cache") as board:
        rows = board.get_rows_until(lambda data: data["complete"])
        events = board.listen(rows["generation"])
        assert board.stop(number) == 0
        assert [name for name, _ in events if name == "reload"] == []


def test_a_board_that_is_started_again_knows_its_pages(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "a", lines())
    with run_board(cache=tmp_path / "cache") as first:
        generation = first.get_rows_until(lambda data: data["complete"])["generation"]
        first.stop()
    with run_board("--port", str(first.port), cache=tmp_path / "cache") as second:
        assert second.token == first.token
        events = second.listen(generation)
        assert next(iter(events))[0] == "reload", "what it knew is of another start"


def test_what_cannot_be_served_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = echelon(capsys, "board", "nowhere")
    assert code == 3
    assert "nowhere does not exist" in said
    (tmp_path / "file").write_text("")
    assert "is not a folder" in echelon(capsys, "board", "file")[2]
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, said = echelon(capsys, "board", "--port", port)
    assert code == 2
    assert f"127.0.0.1:{port} cannot be bound: address already in use" in said
    assert "hint: leave out --port" in said
    assert "cannot be bound" in echelon(capsys, "board", "--host", "203.0.113.1")[2]


def test_another_address_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with run_board("--host", "0.0.0.0", "--act", cache=tmp_path / "cache") as board:
        assert board.get("/api/hello")["can_act"] is True
        assert board.ask("/api/hello", Host=f"{socket.gethostname()}:1").status == 200
        assert board.ask("/api/hello", Host="192.0.2.7:80").status == 200
        assert board.ask("/api/hello", Host="evil.example").status == 403
        board.stop()
        assert board.process.stderr is not None
        said = board.process.stderr.read()
    assert said.startswith("warning: the board is served on 0.0.0.0")
    assert "act on them" in said


@pytest.mark.slow
def test_the_start_imports_nothing_slow(tmp_path: Path) -> None:
    import subprocess
    import sys

    make_run(tmp_path / "runs", "a", lines())
    with run_board(cache=tmp_path / "cache") as board:
        board.get_rows_until(lambda data: data["complete"])
        index = tmp_path / "runs" / ".board" / "index.jsonl"
        board.get_rows_until(lambda data: index.exists())
        board.stop()
    code = """
import sys
from pathlib import Path
import echelon.commands.board
from echelon.board.server import Board, BoardServer, show_runs
from echelon.board.request import Request
board = Board([Path("runs")])
board.watch.request_check = lambda: None
board.index.load()
BoardServer(board, "127.0.0.1", 0, "x").server_close()
assert b'"0:a"' in show_runs(Request("GET", "/api/runs", board)).body
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"ECHELON_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    slow = {"rich", "hydra", "omegaconf", "numpy", "torch", "yaml", "asyncio", "ctypes", "ssl"}
    assert not slow & set(done.stdout.split())
    assert "echelon.config.schema" not in done.stdout.split()
