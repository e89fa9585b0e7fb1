"""What the board shows of one run beside its curves and its logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from board_requests import ask
from run_folders import STARTED, lines, make_run, write_phases

from echelon.board import run_page
from echelon.board.server import Board
from echelon.runs.history import BadMachine, RoundRecord, record_bad_machine, record_round
from echelon.runs.run_folder import Run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "runs"


def get(root: Path, path: str, **query: Any) -> Any:
    answer = ask(Board([root]), run_page.ROUTES, path, **query)
    assert answer.status == 200, answer
    return answer.data


def add_snapshot(run: Run, step: int, content: bytes) -> None:
    folder = run.snapshots_folder / f"step-{step:09d}"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(content)


def test_what_a_run_was_and_what_became_of_it(root: Path) -> None:
    split: Any = {"step_ms": 10.0, "data_ms": 1.0, "compute_ms": 8.0, "memory_gb": 3.5}
    run = make_run(
        root, "a", lines(**split), {"epochs": 4}, {"step": 40, "total_steps": 40}, lr=0.5
    )
    write_phases(run, (STARTED, STARTED + 20, 0, 20), (STARTED + 30, STARTED + 40, 20, 40))
    add_snapshot(run, 20, b"x" * 100)
    add_snapshot(run, 40, b"x" * 200)
    (run.snapshots_folder / "best").symlink_to("step-000000020")
    data = get(root, "/api/run/0:a")
    assert data["row"]["id"] == "0:a"
    details = data["details"]
    assert details["settings"] == {"lr": "0.5", "trainer.epochs": "4"}
    flags = {each["name"]: (each["value"], each["default"]) for each in details["all_settings"]}
    assert flags["lr"] == (0.5, False)
    assert flags["trainer.batch_size"][1]
    assert details["metrics"]["eval_loss"] == {
        **{"is": "min", "best": 1.0, "best_step": 30, "last": 1.1, "last_step": 40},
        **{"min": 1.0, "max": 1.2, "count": 4},
    }
    assert [each["kind"] for each in details["timeline"][:6]] == [
        *("start", "train", "stop", "start", "train", "stop")
    ]
    assert details["timeline"][2] == {
        **{"t": STARTED + 20, "kind": "stop", "text": "stopped by SIGTERM", "step": 20}
    }
    first, last = details["snapshots"]
    assert (first["step"], first["best"], first["bytes"]) == (20, True, 100)
    assert (last["step"], last["best"], last["bytes"]) == (40, False, 200)
    assert first["resume_command"] == (
        f"echelon resume {run.folder} trainer.resume={run.snapshots_folder}/step-000000020"
    )
    assert details["speed"]["compute_ms"] == 8.0
    assert details["memory"] == {"last_gb": 3.5, "max_gb": 3.5, "max_step": 1}
    assert details["command"] == f"echelon train --like {run.folder}"
    assert details["machines"][0]["host"] == "here"
    assert details["accounting"]["starts"] == 2
    assert details["own"]


def test_faults_are_on_the_time_line(root: Path) -> None:
    run = make_run(root, "a", lines(), status={"state": "failed", "failure": {"rank": 1}})
    write_phases(run, (STARTED, None, 0, 40), launcher="ssh")
    lost = RoundRecord(STARTED + 10, 1, 3, 9, 2.0, 0.1, (2,), (), "", ("b",))
    reason = "lost rank 1 on b after step 10: killed by SIGKILL; going on with 2 processes"
    record_round(run, lost)
    record_round(run, RoundRecord(STARTED + 11, 2, 2, 10, 2.0, 0.1, (1,), (), reason, ("b",)))
    record_bad_machine(run, BadMachine(STARTED + 12, "b", "2 faults", 11, True, "c"))
    (run.logs_folder / "hang-20231114-221500.txt").write_text("rank 0 stands here\n")
    details = get(root, "/api/run/0:a")["details"]
    kinds = {each["kind"]: each for each in details["timeline"]}
    lost_events = [each for each in details["timeline"] if each["kind"] == "lost"]
    assert [(each["text"].rpartition("; ")[0], each["step"]) for each in lost_events] == [
        ("rank 2 lost; 3 processes go on", 9),
        (reason, 10),
    ]
    assert "c took over" in kinds["machine"]["text"]
    assert kinds["fault"]["text"] == "killed"
    assert kinds["hang"]
    losses = {each["host"]: each["losses"] for each in details["machines"]}
    assert losses == {"here": 0, "b": 2}
    text = ask(
        Board([root]), run_page.ROUTES, "/api/run/0:a/file", name="logs/hang-20231114-221500.txt"
    )
    assert text.data == b"rank 0 stands here\n"


@pytest.mark.parametrize(
    "name", ["config.json", "logs/../config.json", "../a/job.sh", "job.sh", "/etc/passwd", ""]
)
def test_only_files_that_are_meant_to_be_read_are(root: Path, name: str, tmp_path: Path) -> None:
    run = make_run(root, "a")
    (tmp_path / "secret").write_text("secret")
    run.script_file.symlink_to(tmp_path / "secret")
    assert ask(Board([root]), run_page.ROUTES, "/api/run/0:a/file", name=name).status == 404


def test_a_broken_run_is_shown(root: Path) -> None:
    run = make_run(root, "a", "nonsense\n{}\n[1]\n")
    run.config_file.write_text("{")
    run.history_file.write_text('{"event": "slow", "time": 1, "step": 2, "rank": []}\n[]\n')
    details = get(root, "/api/run/0:a")["details"]
    assert (details["state"], details["command"]) == ("broken", None)
    assert ask(Board([root]), run_page.ROUTES, "/api/run/0:a/plan").status == 400


def test_the_settings_of_two_runs(root: Path) -> None:
    make_run(root, "a", lr=0.5)
    make_run(root, "b", lr=0.25, noise=0.1)
    data = get(root, "/api/run/0:a/settings", **{"with": "0:b"})
    assert data["differ"] == [
        {"name": "lr", "mine": 0.5, "theirs": 0.25},
        {"name": "noise", "mine": None, "theirs": 0.1, "only": "theirs"},
    ]
    assert data["same"] > 20
    assert ask(Board([root]), run_page.ROUTES, "/api/run/0:a/settings").status == 404


def test_the_plan_is_that_of_a_dry_run(root: Path) -> None:
    make_run(root, "a")
    assert get(root, "/api/run/0:a/plan")["text"].startswith("launch=inline\nrank  host")


def test_a_trace_is_sent_whole(root: Path) -> None:
    from echelon.board.request import Request, StreamResponse

    run = make_run(root, "a")
    run.traces_folder.mkdir()
    content = os.urandom(3 << 20)
    (run.traces_folder / "rank-0.json.gz").write_bytes(content)
    request = Request(
        *("GET", "/", Board([root]), {"id": "0:a"}, {"name": ["traces/rank-0.json.gz"]})
    )
    response = run_page.show_file(request)
    assert isinstance(response, StreamResponse)
    assert b"".join(response.pieces) == content
    files = {each["name"]: each for each in run_page.read_details(run)["files"]}
    assert files["traces/rank-0.json.gz"]["bytes"] == len(content)


def test_a_run_of_another_program_has_what_is_known(root: Path, tmp_path: Path) -> None:
    run = make_run(root, "a", lines())
    row = {"settings": {"lr": 0.1}}
    details = run_page._describe_foreign_run(run, row)
    assert details["metrics"]["loss"]["count"] == 40
    json.dumps(details)
