"""Sweeps on the board: real ones, run to their end, and what is left of others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from board_requests import ask, ask_until
from board_sweeps import make_sweep, run_trials
from run_folders import lines, make_run

from echelon.board import sweep_pages
from echelon.board.server import Board
from echelon.commands.board import _read_sweep


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep_pages, "_reports", sweep_pages.SweepReports())


def get(board: Board, path: str) -> Any:
    answer = ask(board, sweep_pages.ROUTES, path)
    assert answer.status == 200, answer
    return answer.data


def get_list(board: Board) -> list[dict[str, Any]]:
    answer = ask_until(
        lambda a: not any(sweep["loading"] for sweep in a.data["sweeps"]),
        lambda: ask(board, sweep_pages.ROUTES, "/api/sweeps"),
    )
    return list(answer.data["sweeps"])


def test_a_sweep_while_it_runs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    store = make_sweep(root)
    run_trials(store, 9)
    leased = store.take_trial()
    assert not isinstance(leased, bool)
    store.report_history(leased, [5.0])
    make_run(root, "s-9", lines(), status={"state": "running", "step": 40})
    board = Board([root], read_sweep=_read_sweep)
    board.index.read_again("0:s-9")
    [summary] = get_list(board)
    assert (summary["id"], summary["metric"], summary["direction"]) == ("0:s", "loss", "minimize")
    assert summary["counts"] == {"finished": 9, "running": 1}
    sweep = get(board, "/api/sweep/0:s")
    assert len(sweep["trials"]) == 10
    assert set(sweep["importance"]) == {"lr", "samples"}
    assert sum(sweep["importance"].values()) == pytest.approx(1)
    best = min((t for t in sweep["trials"] if t["state"] == "finished"), key=lambda t: t["value"])
    assert sweep["best"]["number"] == best["number"]
    assert [entry[0] for entry in sweep["history"]] == list(range(9))
    assert [e[2] for e in sweep["history"]] == [
        min(e[1] for e in sweep["history"][: i + 1]) for i in range(9)
    ]
    last = sweep["trials"][9]
    assert (last["run"], last["state"], last["step"]) == ("0:s-9", "running", 40)
    assert sweep["trials"][0]["run"] is None
    assert sweep["parameters"] == ["lr", "samples"] or set(sweep["parameters"]) >= {"lr"}
    store.end_trial(leased, "pruned")
    assert get(board, "/api/sweep/0:s")["counts"] == {"finished": 9, "pruned": 1}
    assert get_list(board)[0]["counts"] == {"finished": 9, "pruned": 1}


def test_what_cannot_be_read_is_shown_by_its_runs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folder = root / "s"
    folder.mkdir(parents=True)
    settings = {"metric": {"name": "loss", "goal": "minimize"}, "run_cap": 4}
    (folder / "sweep.json").write_text(json.dumps(settings))
    for number in range(2):
        make_run(root, f"s-{number}", lines(), status={"best": 1.0 + number, "step": 40})
    make_run(root, "s-x", lines())
    for board in (Board([root]), Board([root], read_sweep=_read_sweep)):
        for name in ("s-0", "s-1", "s-x"):
            board.index.read_again(f"0:{name}")
        sweep = get(board, "/api/sweep/0:s")
        assert sweep["error"]
        assert [(t["number"], t["value"], t["run"]) for t in sweep["trials"]] == [
            (0, 1.0, "0:s-0"),
            (1, 2.0, "0:s-1"),
        ]
        assert sweep["best"]["number"] == 0
        sweep_pages._reports = sweep_pages.SweepReports()


@pytest.mark.parametrize("name", ["0:..", "0:nothing", "1:s", "s", "0:a%2Fb", "x:s", "0:link"])
def test_only_sweeps_of_the_roots_are_found(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    root.mkdir()
    (folder / "sweep.json").write_text("{}")
    (root / "link").symlink_to(folder)
    assert ask(Board([root]), sweep_pages.ROUTES, f"/api/sweep/{name}").status == 404
    assert get(Board([root]), "/api/sweeps") == {"sweeps": []}


def test_a_sweep_that_is_removed_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    make_sweep(root)
    board = Board([root], read_sweep=_read_sweep)
    assert len(get_list(board)) == 1
    shutil.rmtree(root / "s")
    assert get_list(board) == []
