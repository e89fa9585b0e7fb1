"""Acting on runs from the board, with the real commands and a real training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from board_requests import Answer, ask
from run_folders import TOY, lines, make_run

from echelon.board import actions
from echelon.board.server import Board
from echelon.config.bundled_experiments import read_defaults
from echelon.jobs.cancel import cancel_runs
from echelon.runs.find import list_runs
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(actions, "_claims", actions._Claims())


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    for run in list_runs(tmp_path / "runs"):
        if read_run_status(run).is_active:
            cancel_runs([run], now=True)


def post(board: Board, action: str, *runs: str, **more: Any) -> Answer:
    body = {"action": action, "runs": list(runs), **more}
    return ask(board, actions.ROUTES, "/api/act", body)


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_without_act_nothing_is_done(root: Path) -> None:
    make_run(root, "a", lines())
    for action in actions.ACTIONS:
        assert post(Board([root]), action, "0:a").status == 403


def test_what_is_asked_for_is_checked(root: Path) -> None:
    make_run(root, "a", lines())
    board = Board([root], can_act=True)
    assert post(board, "remove", "0:a").status == 400
    assert post(board, "stop").status == 400
    assert post(board, "stop", "0:b").status == 404
    assert post(board, "stop", "0:../a").status == 404
    assert post(board, "stop", "0:a", overrides=["lr=0.1"]).status == 400
    for word in ("--now", "-c", "lr", "=1", "a b=1", "$(x)=1", 7, "lr=\0"):
        assert post(board, "resume", "0:a", overrides=[word]).status == 400, word
    assert post(board, "requeue", "0:a").status == 409
    assert ask(board, actions.ROUTES, "/api/act", {"action": "stop", "runs": "0:a"}).status == 400
    foreign = root / "b"
    foreign.mkdir()
    (foreign / "metrics.jsonl").write_text("{}\n")
    assert post(board, "submit", "0:b").status == 403, "it has no configuration"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_runs_of_others_are_left_alone(root: Path) -> None:
    run = make_run(root, "a", lines())
    os.chown(run.folder, 12345, 12345)
    board = Board([root], can_act=True)
    for action in actions.ACTIONS:
        assert post(board, action, "0:a", confirm=True).status == 403


@pytest.mark.slow
def test_the_plan_is_a_dry_run_of_the_command(root: Path) -> None:
    run = make_run(root, "a", lines(), {"epochs": 4}, lr=0.5)
    board = Board([root], can_act=True)
    before = sorted(os.listdir(root))
    plan = post(board, "submit", "0:a", overrides=["lr=0.25", "launch=local", "launch.procs=2"])
    assert plan.data["ok"], plan
    assert plan.data["plan"].startswith("launch=local\nrank  host")
    command = f"echelon train --like {run.folder} lr=0.25 launch=local launch.procs=2"
    assert plan.data["command"] == command
    assert plan.data["folder"] == str(root.parent)
    resume = post(board, "resume", "0:a", overrides=["trainer.epochs=8"])
    assert resume.data["plan"].startswith("launch=inline\nrank  host")
    wrong = post(board, "submit", "0:a", overrides=["lrr=0.25"])
    assert not wrong.data["ok"]
    assert "there is no such setting" in wrong.data["plan"]
    stop = post(board, "stop", "0:a")
    assert stop.data["plan"] == "run a is not running: it is finished, there is nothing to do"
    assert stop.data["command"] == f"echelon cancel {run.folder}"
    assert post(board, "cancel", "0:a").data["command"] == f"echelon cancel --now {run.folder}"
    assert sorted(os.listdir(root)) == before


def test_where_a_command_is_typed(root: Path, tmp_path: Path) -> None:
    run = make_run(root, "a")
    assert actions.find_typing_folder(run) == tmp_path
    config = json.loads(run.config_file.read_text())
    name = f"{tmp_path.name}/runs"
    run.config_file.write_text(json.dumps(config | {"run": {"name": "a", "dir": name}}))
    assert actions.find_typing_folder(run) == tmp_path.parent
    run.config_file.write_text("nonsense")
    assert actions.find_typing_folder(run) == tmp_path


@pytest.mark.slow
def test_a_training_is_started_stopped_resumed_and_begun_again(root: Path) -> None:
    settings_of_toy = {k: v for k, v in read_defaults(TOY).items() if "." not in k}
    make_run(root, "a", lines(), **settings_of_toy | {"lr": 0.05, "samples": 4096})
    board = Board([root], can_act=True)
    local = ["launch=local", "launch.procs=1", "trainer.epochs=100000"]

    # 1. A new run with the settings of the old one, by two clicks at once: one is started.
    settings = {"overrides": [*local, "lr=0.01"], "confirm": True}
    with ThreadPoolExecutor(2) as clicks:
        answers = list(clicks.map(lambda _: post(board, "submit", "0:a", **settings), range(2)))
    assert sorted(answer.status for answer in answers) == [200, 409], answers
    [started] = [answer.data for answer in answers if answer.status == 200]
    assert (started["ok"], started["running"]) == (True, True), started
    [run_id] = started["runs"]
    run: Run = board.find_run(run_id)
    assert [each.name for each in list_runs(root)] == sorted(["a", run.name])
    config = run.read_config()
    assert (config.experiment["lr"], config.experiment["samples"]) == (0.01, 4096)
    wait_until(lambda: run.metrics_file.exists() and run.metrics_file.stat().st_size > 0)

    # 2. Stopped: it saves.
    plan = post(board, "stop", run_id)
    assert "would be asked to save and end" in plan.data["plan"]
    assert read_run_status(run).is_active
    stopped = post(board, "stop", run_id, confirm=True).data
    assert stopped["ok"], stopped
    assert "was asked to save and end" in stopped["output"]
    wait_until(lambda: not read_run_status(run).is_active)
    assert run.has_snapshots()
    step = run.find_newest_step()

    # 3. Resumed in its own folder, and killed.
    resumed = post(board, "resume", run_id, confirm=True).data
    assert (resumed["ok"], resumed["runs"]) == (True, [run_id]), resumed
    wait_until(lambda: read_run_status(run).state == "running")
    again = post(board, "resume", run_id, overrides=["trainer.epochs=200000"], confirm=True).data
    assert not again["ok"], "it runs already"
    assert "is running already" in again["output"]
    size = run.metrics_file.stat().st_size
    wait_until(lambda: run.metrics_file.stat().st_size != size)
    killed = post(board, "cancel", run_id, confirm=True).data
    assert "was killed" in killed["output"]
    wait_until(lambda: not read_run_status(run).is_active)
    assert run.find_newest_step() >= step > 0


@pytest.mark.slow
def test_a_command_that_fails_says_why(root: Path) -> None:
    make_run(root, "a", lines(), {"epochs": 4})
    board = Board([root], can_act=True)
    answer = post(board, "submit", "0:a", overrides=["trainer.epochs=nonsense"], confirm=True)
    assert (answer.status, answer.data["ok"], answer.data["runs"]) == (200, False, [])
    assert "error: trainer.epochs=nonsense" in answer.data["output"]
