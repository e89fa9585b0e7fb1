"""The logs of a run on the board: pages of lines in order of time, followed and searched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from board_requests import Answer, ask, ask_until
from run_folders import make_run

from echelon.board import log_lines
from echelon.board.server import Board
from echelon.jobs.log_reader import LogFile, merge_logs
from echelon.runs.run_folder import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "runs", "a")


@pytest.fixture
def board(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(log_lines, "_indexes", log_lines.LogIndexes())
    return Board([run.folder.parent])


def get(board: Board, **query: Any) -> Answer:
    return ask(board, log_lines.ROUTES, "/api/run/0:a/logs", **query)


def get_whole(board: Board, **query: object) -> dict[str, Any]:
    answer = ask_until(
        lambda a: a.status != 200 or (a.data["complete"] and not a.data.get("searching")),
        lambda: get(board, **query),
    )
    assert answer.status == 200, answer
    return dict(answer.data)


def texts(data: dict[str, Any]) -> list[str]:
    return [line["text"] for line in data["lines"]]


def write_logs(run: Run, stamps: list[tuple[float, str, int]], **logs: bytes) -> None:
    for name, text in logs.items():
        (run.logs_folder / f"{name.replace('_', '-')}.log").write_bytes(text)
    with run.get_stamps_file(0).open("a") as file:
        file.writelines(f"{moment:.3f} {name} {size}\n" for moment, name, size in stamps)


def test_lines_are_merged_as_echelon_logs_merges_them(run: Run, board: Board) -> None:
    count = 3000
    lines = {rank: [b"rank %d line %d\n" % (rank, i) for i in range(count)] for rank in (0, 1)}
    stamps, sizes = [], {0: 0, 1: 0}
    for i in range(0, count, 7):
        for rank in (i // 7 % 2, 1 - i // 7 % 2):
            sizes[rank] += sum(map(len, lines[rank][i : i + 7]))
            stamps.append((1000.0 + 2 * i + rank, f"rank-{rank}", sizes[rank] - 3 * (i % 2)))
    write_logs(run, sorted(stamps), rank_0=b"".join(lines[0]), rank_1=b"".join(lines[1]))
    expected = [
        (line.log, line.text.decode().rstrip("\n"))
        for line in merge_logs(run, [LogFile(run, "rank-0"), LogFile(run, "rank-1")])
    ]
    data = get_whole(board, **{"from": 0, "count": 5000})
    rest = get_whole(board, **{"from": 5000, "count": 5000})
    found = [(line["name"], line["text"]) for line in data["lines"] + rest["lines"]]
    assert data["total"] == len(expected) == 2 * count
    assert found == expected
    assert [line["n"] for line in rest["lines"]] == list(range(5000, 2 * count))
    moments = [line["t"] for line in data["lines"]]
    assert moments == sorted(moments)
    for start in (0, 1, 2221, 4444, 5990):  # a page anywhere is a part of the whole
        page = get_whole(board, **{"from": start, "count": 20})
        assert [(x["name"], x["text"]) for x in page["lines"]] == expected[start : start + 20]
    assert texts(get_whole(board, count=3)) == [text for _, text in expected[-3:]]
    only = get_whole(board, names="rank-1", **{"from": 10, "count": 2})
    assert texts(only) == ["rank 1 line 10", "rank 1 line 11"]
    assert (only["names"], only["selected"]) == (["rank-0", "rank-1"], ["rank-1"])


def test_growing_logs_keep_the_numbers_of_their_lines(run: Run, board: Board) -> None:
    write_logs(run, [], rank_0=b"one\ntwo\nthr")
    data = get_whole(board)
    assert texts(data) == ["one", "two", "thr"]
    assert [line.get("partial", False) for line in data["lines"]] == [False, False, True]
    with (run.logs_folder / "rank-0.log").open("ab") as file:
        file.write(b"ee\nfour\n")
    write_logs(run, [], rank_1=b"another\n")
    data = get_whole(board)
    assert sorted(texts(data)) == ["another", "four", "one", "three", "two"]
    assert texts(data)[:2] == ["one", "two"]
    mark = data["mark"]
    (run.logs_folder / "rank-0.log").write_bytes(b"anew\n")
    data = get_whole(board)
    assert sorted(texts(data)) == ["anew", "another"]
    assert data["mark"] != mark


def test_lines_of_any_kind(run: Run, board: Board) -> None:
    bar = b"\r".join(b"step %d" % i for i in range(100_000))
    long = b"x" * (10 << 20)
    garbage = bytes(range(256)).replace(b"\n", b"")
    write_logs(
        run,
        [],
        rank_0=b"\x1b[31mred\x1b[0m\n" + long + b"\n" + bar + b"\n\n" + garbage + b"\nend\r\n",
    )
    data = get_whole(board, **{"from": 0})
    red, cut, progress, empty, noise, end = data["lines"]
    assert red["text"] == "\x1b[31mred\x1b[0m"
    assert (len(cut["text"]), cut["cut"]) == (1 << 16, (10 << 20) + 1 - (1 << 16))
    assert progress["text"] == "step 99999"
    assert empty["text"] == ""
    assert "\x00" in noise["text"] or noise["text"]
    assert end["text"] == "end"
    found = get_whole(board, search="END")
    assert found["matches"] == [5]
    assert get_whole(board, search="xxxxxx")["matches"] == [1]


def test_a_page_of_long_lines_is_small(run: Run, board: Board) -> None:
    write_logs(run, [], rank_0=(b"y" * 60_000 + b"\n") * 400)
    data = get_whole(board, **{"from": 0, "count": 400})
    assert len(data["lines"]) == 400
    assert sum(len(text) for text in texts(data)) < 4 << 20
    assert "cut" not in data["lines"][0]
    assert data["lines"][-1]["cut"] > 0


def test_searching_text_and_expressions(run: Run, board: Board) -> None:
    rank_0 = b"".join(b"step %d loss %.3f\n" % (i, 1 / (i + 1)) for i in range(5000))
    write_logs(run, [], rank_0=rank_0 + b"caf\xc3\xa9 \x1b[1mEr\x1b[0mror\n", rank_1=b"error\n" * 3)
    whole = get_whole(board, **{"from": 0, "count": 5000})["lines"]
    whole += get_whole(board, **{"from": 5000, "count": 5000})["lines"]

    def search(text: str, **how: int) -> list[str]:
        data = get_whole(board, search=text, **how)
        assert data["match_count"] == len(data["matches"])
        assert data["matches"] == sorted(data["matches"])
        return [whole[n]["text"] for n in data["matches"]]

    assert search("step 4999 ") == ["step 4999 loss 0.000"]
    assert sorted(search("error")) == ["café \x1b[1mEr\x1b[0mror", *["error"] * 3]
    assert search("error", case=1) == ["error"] * 3
    assert search("CAFÉ") == ["café \x1b[1mEr\x1b[0mror"]
    assert search(r"^step (1|2)\d\d\d loss", regex=1) == [w["text"] for w in whole[1000:3000]]
    assert search(r"0\.000\s+", regex=1) == [], "nothing is found beyond the end of its line"
    assert search("nothing of this") == []
    with (run.logs_folder / "rank-1.log").open("ab") as file:
        file.write(b"one more error\n")
    data = get_whole(board, search="error", case=1)
    assert len(data["matches"]) == 4, "a search goes on with what is new"


def test_many_matches_are_counted(run: Run, board: Board) -> None:
    write_logs(run, [], rank_0=b"same\n" * 12_000)
    data = get_whole(board, search="same")
    assert (len(data["matches"]), data["match_count"]) == (10_000, 12_000)


def test_an_expression_without_an_end_is_stopped(
    run: Run, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.board.log_search._TIME_LIMIT_S", 0.5)
    write_logs(run, [], rank_0=b"found a\n" + b"a" * 60 + b"!\n")
    data = get_whole(board, search="(a+)+$", regex=1)
    assert "took longer than 0.5 s" in data["search_fault"]
    assert "not a regular expression" in get_whole(board, search="(", regex=1)["search_fault"]
    assert get(board, search="x" * 2000).status == 400


def test_what_is_not_a_log_of_the_run_is_not_shown(run: Run, board: Board, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (run.logs_folder / "rank-0.log").symlink_to(secret)
    os.mkfifo(run.logs_folder / "rank-1.log")
    write_logs(run, [], rank_2=b"mine\n")
    assert texts(get_whole(board)) == ["mine"]
    assert get(board, names="../../secret").status == 404
    assert get(board, names="rank-3").status == 404
    assert ask(board, log_lines.ROUTES, "/api/run/0:..%2Fa/logs").status == 404
    assert get_whole(board, search="secret")["matches"] == []


def test_a_run_without_logs(run: Run, board: Board) -> None:
    data = get_whole(board)
    assert (data["total"], data["names"], data["lines"]) == (0, [], [])
