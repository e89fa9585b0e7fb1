"""Rows of runs, and the files in which they are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, lines, make_run, write_phases

from echelon.board import row_reader
from echelon.board.request import NotFoundError
from echelon.board.row_reader import read_rows
from echelon.board.run_index import RunIndex, find_board_folder, read_index_file
from echelon.board.run_rows import (
    UNSETTLED,
    LiveRow,
    answer_nothing,
    compute_signature,
    read_row_text,
)
from echelon.runs.annotations import annotate_run
from echelon.runs.process_record import identify_this_process
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run
from echelon.views.run_row import RunRow


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


_SECONDS = count()


def settle(*runs: Run) -> None:
    """Let the files of runs be old: what has just changed is read again anyhow."""
    for run in runs:
        for path in (run.metrics_file, run.history_file, run.folder):
            if path.exists():
                os.utime(path, (STARTED, STARTED + next(_SECONDS)))


def check(index: RunIndex) -> list[str]:
    """Bring an index up to date, and return the names of the runs that were read."""
    read = []
    for number, folder in enumerate(index.roots):
        names, gone, _ = index.find_differences(number)
        index.update(number, (), gone)
        folders = [str(folder / name) for name in names]
        for rows in read_rows(folders, index.get_sweeps(number), answer_nothing):
            index.update(number, rows)
        read += names
    return sorted(read)


def get_rows(index: RunIndex) -> dict[str, Any]:
    return {row["id"]: row for row in json.loads(index.render_rows()[2])}


def test_a_row_says_what_the_lists_of_runs_say(root: Path) -> None:
    run = make_run(root, "sweep-7", lines(), {"best": "acc", "epochs": 4}, lr=0.5, hidden=[1, 2])
    write_phases(run, (STARTED, STARTED + 20, 0, 20), (STARTED + 30, STARTED + 40, 20, 40))
    annotate_run(run, "a note", ["x"], [])
    (root / "sweep").mkdir()
    (root / "sweep" / "sweep.json").write_text("{}")
    settle(run)
    index = RunIndex([root.parent / "other", root])
    check(index)
    [row] = get_rows(index).values()
    [record], _ = read_run_records([run])
    known = RunRow(record).own_values
    shown = {**row, "time": row["trained_s"], "why": row["why"], "tags": ",".join(row["tags"])}
    same = ("name", "folder", "experiment", "state", "step", "total_steps", "best", "time", "note")
    assert {key: shown[key] for key in same} == {key: known[key] for key in same}
    assert (row["id"], row["root"], row["sweep"]) == ("1:sweep-7", 1, "sweep")
    assert (row["best_name"], row["best_is"], row["trained_s"]) == ("acc", "max", 30.0)
    assert row["settings"] == {
        **{"lr": 0.5, "hidden": [1, 2], "trainer.best": "acc", "trainer.epochs": 4}
    }
    assert row["metrics"]["eval_acc"] == [0.4, 0.1, 0.4, 4, "max"]
    assert row["metrics"]["loss"] == [0.1, 0.1, 4.0, 40, "min"]


def test_names_and_values_are_text_of_any_kind(root: Path) -> None:
    strange = ['"},{"', "<script>alert(1)<_script>", '","source":', "ü 走", "a\\b\n"]
    for name in strange:
        make_run(root, name, [{"step": 1, "</script>": 1.0, "x" * 5000: 2.0, "loss": math.nan}])
    make_run(root, "long", lines(), note="x" * 1_000_000, many=["y" * 1000] * 1000, large=10**400)
    undecodable = os.fsdecode(b"raw-\xff")
    make_run(root, undecodable, lines())
    settle(*(Run(path) for path in root.iterdir()))
    index = RunIndex([root])
    check(index)
    rows = get_rows(index)
    assert {row["name"] for row in rows.values()} == {*strange, "long", "raw-\\xff"}
    assert all(row["id"] == f"0:{row['name']}" for row in rows.values())
    assert all(len(json.dumps(row)) < 10_000 for row in rows.values())
    assert list(rows["0:ü 走"]["metrics"]) == ["</script>"]
    assert index.find_folder("0:raw-\\xff") == root / undecodable
    index.save()
    again = RunIndex([root])
    assert again.load()
    assert get_rows(again) == {key: row for key, row in rows.items() if key != "0:raw-\\xff"}
    assert check(again) == [undecodable]


def test_what_is_known_is_not_read_again(root: Path) -> None:
    runs = {name: make_run(root, name, lines()) for name in "abcde"}
    write_phases(runs["d"], (STARTED, None, 0, 20))
    settle(*runs.values())
    first = RunIndex([root])
    assert check(first) == list("abcde")
    first.save()
    second = RunIndex([root])
    assert second.load()
    assert check(second) == []
    assert get_rows(second) == get_rows(first)
    annotate_run(runs["a"], "new", [], [])
    with runs["b"].metrics_file.open("a") as file:
        file.write('{"step": 41, "loss": 0.0}\n')
    shutil.rmtree(runs["c"].folder)
    write_phases(runs["d"], (STARTED + 100, STARTED + 200, 20, 40))
    shutil.rmtree(runs["e"].folder)
    settle(make_run(root, "e", lines(), lr=9.0))
    assert check(second) == ["a", "b", "d", "e"]
    rows = get_rows(second)
    assert set(rows) == {"0:a", "0:b", "0:d", "0:e"}
    assert rows["0:a"]["note"] == "new"
    assert rows["0:b"]["metrics"]["loss"][1] == 0.0
    assert rows["0:e"]["settings"]["lr"] == 9.0


def test_a_run_that_has_just_changed_or_is_active_is_not_trusted(root: Path) -> None:
    new = make_run(root, "new", lines())
    process = identify_this_process()
    active = make_run(root, "active", lines(), status={"state": "running", "process": process})
    settle(active)
    assert read_row_text(str(new.folder)).signature == UNSETTLED
    assert read_row_text(str(active.folder)).signature == UNSETTLED
    settle(new)
    assert read_row_text(str(new.folder)).signature == compute_signature(str(new.folder))[0]
    index = RunIndex([root])
    check(index)
    assert check(index) == ["active"]
    assert index.list_unsettled(0) == ["active"]
    with pytest.raises(FileNotFoundError):
        compute_signature(str(root / "missing"))
    with pytest.raises(NotADirectoryError):
        compute_signature(str(new.config_file))


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"\n", b"nonsense", b"[]\n", b'{"format": 99, "defaults": {}}\n', b"\xff" * 1000),
        *(b'{"format": 1}\n', b'{"format": 1, "defaults": 3}\n', b"[" * 100_000),
    ],
)
def test_a_file_of_something_else_is_no_index(root: Path, damage: bytes) -> None:
    settle(make_run(root, "a", lines()))
    index = RunIndex([root])
    check(index)
    index.save()
    file = find_board_folder(root) / "index.jsonl"
    file.write_bytes(damage)
    again = RunIndex([root])
    assert not again.load()
    assert check(again) == ["a"]
    assert get_rows(again) == get_rows(index)


def test_a_damaged_line_is_a_run_that_is_read_again(root: Path) -> None:
    settle(*(make_run(root, name, lines()) for name in "abcd"))
    index = RunIndex([root])
    check(index)
    index.save()
    file = find_board_folder(root) / "index.jsonl"
    header, *rows = file.read_bytes().splitlines(keepends=True)
    flipped = rows[1].replace(b'"finished"', b'"finisheD"')
    file.write_bytes(b"".join([header, rows[0], flipped, b"garbage\n", rows[2][:-30]]))
    again = RunIndex([root])
    assert again.load()
    intact = json.loads(rows[0].split(b" ", 2)[2])["name"]
    assert list(get_rows(again)) == [f"0:{intact}"]
    assert check(again) == sorted(set("abcd") - {intact})
    assert get_rows(again) == get_rows(index)


def test_rows_that_leave_out_other_defaults_are_forgotten(root: Path) -> None:
    settle(make_run(root, "a", lines()))
    index = RunIndex([root])
    check(index)
    index.save()
    file = find_board_folder(root) / "index.jsonl"
    header, rest = file.read_bytes().split(b"\n", 1)
    defaults = json.loads(header)
    defaults["defaults"]["trainer.epochs"] = 77
    file.write_bytes(json.dumps(defaults).encode() + b"\n" + rest)
    again = RunIndex([root])
    assert again.load()
    generation = again.generation
    assert again.drop_old_defaults()
    assert again.get_changes(generation) is None, "a page has to begin anew"
    assert again.get_defaults()["trainer.epochs"] == 3
    assert check(again) == ["a"]
    assert not again.drop_old_defaults()


def test_two_boards_may_write_at_once(root: Path) -> None:
    settle(*(make_run(root, f"run-{i}", lines(4)) for i in range(8)))
    indexes = [RunIndex([root]) for _ in range(2)]
    for index in indexes:
        check(index)

    def save(index: RunIndex) -> None:
        for _ in range(50):
            index.needs_saving = True
            index.save()

    threads = [threading.Thread(target=save, args=(index,)) for index in indexes]
    file = find_board_folder(root) / "index.jsonl"
    indexes[0].save()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(read_index_file(file)[1]) == 8
    assert [path.name for path in file.parent.iterdir()] == ["index.jsonl"]


def test_a_root_that_cannot_be_looked_at_loses_no_rows(root: Path) -> None:
    settle(make_run(root, "a", lines()))
    index = RunIndex([root])
    check(index)
    aside = root.rename(root.with_name("aside"))
    root.write_text("not a folder")
    assert index.find_differences(0) == ([], [], False)
    root.unlink()
    assert index.find_differences(0) == ([], ["a"], True)
    aside.rename(root)
    assert check(index) == []


def test_changes_since_a_generation(root: Path) -> None:
    settle(*(make_run(root, name, lines()) for name in "ab"))
    index = RunIndex([root])
    start = index.generation
    check(index)
    changes = index.get_changes(start)
    assert changes is not None
    assert len(changes.changed) == 2
    later = index.generation
    shutil.rmtree(root / "a")
    check(index)
    changes = index.get_changes(later)
    assert changes is not None
    assert (changes.changed, changes.removed) == ([], ["0:a"])
    for unknown in (0, start - 1, index.generation + 1):
        assert index.get_changes(unknown) is None


def test_many_rows_are_read_by_processes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(*(make_run(root, f"s-{i}", lines(4)) for i in range(120)))
    (root / "s").mkdir()
    (root / "s" / "sweep.json").write_text("{}")
    folders = [str(root / f"s-{i}") for i in range(120)] + [str(root / "missing")]
    here = [row for rows in read_rows(folders, {"s"}, answer_nothing) for row in rows]
    monkeypatch.setattr(row_reader, "_MIN_FOLDERS", 1)
    there = [row for rows in read_rows(folders, {"s"}, answer_nothing) for row in rows]
    assert sorted(there) == sorted(here)
    assert len(there) == 120
    assert b'"sweep":"s"' in there[0].text


def test_processes_that_cannot_be_had_are_not_needed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(*(make_run(root, f"s-{i}", lines(4)) for i in range(60)))
    folders = [str(root / f"s-{i}") for i in range(60)]
    monkeypatch.setattr(row_reader, "_MIN_FOLDERS", 1)
    for program in ("/bin/false", "/nowhere"):
        monkeypatch.setattr("sys.executable", program)
        assert sum(len(rows) for rows in read_rows(folders, (), answer_nothing)) == 60


def test_a_row_that_is_followed_is_the_one_that_is_read(root: Path) -> None:
    process = identify_this_process()
    status = {"state": "running", "process": process, "total_steps": 100}
    run = make_run(root, "a", lines(20), status=status)
    live = LiveRow(str(run.folder), ())
    live.read()
    assert live.read_growth() is None
    with run.metrics_file.open("a") as file:
        file.write('{"step": 21, "loss": 0.01, "new": 1}\n{"step": 22')
    grown = live.read_growth()
    assert grown is not None
    volatile = ("eta_s", "updated")

    def strip(text: bytes) -> dict[str, Any]:
        return {key: value for key, value in json.loads(text).items() if key not in volatile}

    assert strip(grown.text) == strip(read_row_text(str(run.folder)).text)
    assert json.loads(grown.text)["metrics"]["new"] == [1, 1, 1, 1, "min"]
    assert not live.has_other_state()
    make_run(root, "b", [{"step": 1, "loss": 5.0}]).metrics_file.replace(run.metrics_file)
    anew = live.read_growth()
    assert anew is not None
    assert json.loads(anew.text)["metrics"]["loss"] == [5.0, 5.0, 5.0, 1, "min"]
    run.update_status(process=process | {"pid": 2**22 - 1})
    live.read()
    assert json.loads(live.read().text)["state"] == "lost"


def test_rows_of_other_programs(root: Path, tmp_path: Path) -> None:
    settle(make_run(root, "a", lines()))
    index = RunIndex([root])
    check(index)
    row = {"id": "0:wandb:x/y", "root": 0, "name": "y", "source": "wandb", "best": math.nan}
    assert index.update_foreign(0, [(row, str(tmp_path / "converted"))])
    assert not index.update_foreign(0, [(row, str(tmp_path / "converted"))])
    assert get_rows(index)["0:wandb:x/y"]["best"] is None
    assert index.find_folder("0:wandb:x/y") == tmp_path / "converted"
    assert check(index) == [], "they are not looked for as runs of ours"
    index.needs_saving = True
    index.save()
    again = RunIndex([root])
    again.load()
    assert list(get_rows(again)) == ["0:a"]
    assert index.update_foreign(0, (), ["0:wandb:x/y"])
    with pytest.raises(NotFoundError):
        index.get_row("0:wandb:x/y")
