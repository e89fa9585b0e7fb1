"""What of a run folder is news, told once and in few words."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import lines, make_run, write_phases

from echelon.config.schema import NEWS_EVENTS, Config, NotifyConfig, TrainerConfig
from echelon.notify.events import EventDetector, find_end
from echelon.notify.record import NewsRecord
from echelon.notify.run_view import RunView
from echelon.runs.run_folder import Run

NOTIFY = NotifyConfig(to=["webhook"], events=list(NEWS_EVENTS))
NOW = time.time()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(root: Path, metrics: Any = "", **status: Any) -> Run:
    return make_run(root / "runs", "a", metrics, status={"state": "running"} | status)


def view(run: Run, **more: Any) -> RunView:
    config = Config(notify=replace(NOTIFY, **more), trainer=TrainerConfig(best="rmse"))
    return RunView.read(run, config)


def add_events(run: Run, *found: dict[str, Any]) -> None:
    with run.history_file.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in found)


def test_a_start_is_told_once_it_trains_and_again_when_a_person_starts_it(tmp_path: Path) -> None:
    run = make(tmp_path, total_steps=40)
    finder = EventDetector()
    write_phases(run, (NOW - 60, NOW - 50, 0, 10), attempt=0)
    write_phases(run, (NOW - 40, None, 10, 10), attempt=1)
    (restarted,) = finder.find(view(run))
    assert (restarted.key, restarted.message.subject) == ("1/started", "a started")
    assert restarted.message.lines[0] == "1 process on 1 node, local, after step 10"
    write_phases(run, (NOW - 10, None, 20, 20), attempt=0)
    (resumed,) = finder.find(view(run))
    assert resumed.key == "2/started"


def test_no_progress_is_told_with_the_step_where_it_stands(tmp_path: Path) -> None:
    run = make(tmp_path, lines(20), total_steps=40)
    clock = 1000.0
    finder = EventDetector(lambda: clock)
    assert list(finder.find(view(run))) == []
    clock += 29 * 60
    assert list(finder.find(view(run))) == []
    clock += 60
    (found,) = finder.find(view(run))
    assert found.key == "0/stalled/20"
    assert found.message.subject == "a: no progress for 30m00s"
    assert found.message.lines[0].startswith("step 20 of 40 · loss ")
    assert found.message.lines[-1] == "where it stands: echelon stacks a"
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines(30)))
    assert list(finder.find(view(run))) == []


def test_a_program_without_steps_is_never_said_to_stand(tmp_path: Path) -> None:
    run, clock = make(tmp_path), 0.0
    finder = EventDetector(lambda: clock)
    seen = view(run)
    seen = replace(seen, config=replace(seen.config, program=["true"]))
    assert list(finder.find(seen)) == []
    clock += 1e6
    assert list(finder.find(seen)) == []


def test_starting_again_too_often_is_told_with_the_last_cause(tmp_path: Path) -> None:
    run = make(tmp_path)
    for number in range(4):
        at = NOW - 4000 + 1000 * number
        write_phases(run, (at, at + 500, number, number), job="7", requeues=number)
    found = {n.key: n.message for n in EventDetector().find(view(run))}
    assert list(found) == ["1/started", "1/requeued/3"]
    message = found["1/requeued/3"]
    assert message.subject == "a: started again 3 times within a day"
    assert message.lines[0] == "last because it was stopped by SIGTERM"
    assert [n.key for n in EventDetector().find(view(run, requeues=4))] == ["1/started"]


def test_losses_are_told_together(tmp_path: Path) -> None:
    run = make(tmp_path)
    write_phases(run, (NOW - 60, None, 0, 0))
    lost = {"number": 1, "processes": 3, "step": 9, "standstill_s": 1.0, "lost": [2]}
    machine = {"host": "n3", "reason": "a GPU computes wrong numbers", "step": 9}
    add_events(
        run,
        {"event": "round", "time": NOW - 20, **lost, "reason": "rank 2 on n3 was killed"},
        {"event": "machine", "time": NOW - 10, **machine, "is_left_out": True},
    )
    clock = 1000.0
    finder = EventDetector(lambda: clock)
    _, found = finder.find(view(run))
    assert found.message.subject == "a: 2 losses, goes on"
    assert found.message.lines[:3] == (
        "rank 2 on n3 was killed",
        "n3: a GPU computes wrong numbers",
        "goes on with 3 processes",
    )
    clock += 900
    assert len(list(finder.find(view(run)))) == 1, "the start alone, whose key is known"


def test_a_best_value_is_told_at_most_once_an_hour(tmp_path: Path) -> None:
    clock = 1000.0
    finder = EventDetector(lambda: clock)
    run = make(tmp_path, [{"step": 10, "eval_rmse": 0.9}, {"step": 20, "eval_rmse": 1.5}])
    (found,) = finder.find(view(run))
    assert (found.key, found.message.subject) == ("best/10", "a: best rmse 0.9")
    run.metrics_file.write_text(run.metrics_file.read_text() + '{"step": 30, "eval_rmse": 0.5}\n')
    clock += 3000
    assert list(finder.find(view(run))) == []
    clock += 601
    assert [each.key for each in finder.find(view(run))] == ["best/30"]


def test_a_metric_that_is_not_finite_is_told(tmp_path: Path) -> None:
    run = make(tmp_path, '{"step": 1, "loss": NaN}\n')
    (found,) = EventDetector().find(view(run))
    assert (found.key, found.message.event) == ("0/nan", "nan")


FAILURE = {"rank": 3, "host": "n7", "step": 120, "exit": 1, "detail": "", "summary": "no memory"}


@pytest.mark.parametrize(
    ("status", "event", "subject"),
    [
        ({"state": "finished"}, "finished", "a finished"),
        ({"state": "failed", "failure": FAILURE}, "failed", "a failed after step 120"),
        (
            {"state": "failed", "failure": FAILURE | {"summary": "the loss is nan at step 120"}},
            "nan",
            "a failed after step 120",
        ),
        ({"state": "preempted"}, "stopped", "a stopped, saved"),
        ({"state": "preempted", "launcher": "slurm", "job": "7"}, None, None),
        (
            {
                "state": "failed",
                "launcher": "slurm",
                "job": "7",
                "failure": FAILURE | {"exit": 5, "summary": "n7 is lost"},
            },
            "lost",
            "a lost a machine",
        ),
        ({"state": "running"}, "failed", "a failed"),
        ({"state": "running", "launcher": "slurm", "job": "7"}, None, None),
        ({"state": "pruned"}, None, None),
    ],
)
def test_the_end_of_a_run(
    status: dict[str, Any], event: str | None, subject: str | None, tmp_path: Path
) -> None:
    run = make(tmp_path, **status)
    found = find_end(view(run), has_leader_ended=False)
    assert (found and found.message.event) == event
    assert (found and found.message.subject) == subject
    if found is not None and event == "failed" and status["state"] == "failed":
        assert found.message.lines[0] == "rank 3 on n7: no memory"
        assert found.message.lines[-2:] == ("go on: echelon resume a", "logs: echelon logs a")
        assert found.message.facts["failure"]["summary"] == "no memory"
    if status == {"state": "running"}:
        assert found is not None
        assert found.message.lines[0] == "the process that led it was killed"


def test_damaged_folders_are_no_error(tmp_path: Path) -> None:
    run = make(tmp_path)
    for file in (run.status_file, run.history_file, run.summary_file, run.metrics_file):
        file.write_bytes(b'{"event": "start", "time": \xff\n[[[\n{"time": 1, "event": "round"}\n')
    run.get_heartbeat_file(0).write_bytes(b"x" * 17)
    assert list(EventDetector().find(view(run))) == []
    assert find_end(view(run), has_leader_ended=True) is not None


def test_one_of_many_claims_a_message(tmp_path: Path) -> None:
    (tmp_path / "news.jsonl").write_text('not json\n{"key": "1/started"}\n')
    claims: list[str] = []

    def claim() -> None:
        record = NewsRecord(tmp_path / "news.jsonl")
        claims.extend(key for key in ("1/started", "1/failed") if record.claim(key, "failed", "a"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claims == ["1/failed"]


def test_a_folder_that_cannot_be_written_keeps_nothing_from_being_told(tmp_path: Path) -> None:
    record = NewsRecord(tmp_path / "gone" / "news.jsonl")
    assert [record.claim("1/failed", "failed", "a") for _ in range(2)] == [True, False]
