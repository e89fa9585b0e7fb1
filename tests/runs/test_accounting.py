"""What became of the time of a run: every second is effective or has a cause of loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, echelon, lines, make_run

from echelon.runs.accounting import CAUSES, RunAccounting, account_for_run
from echelon.runs.history import read_history
from echelon.runs.run_folder import Run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(at: float, attempt: int | None = 0, **more: Any) -> Any:
    where = {"host": "here", "launcher": "slurm", "job": None, "nodes": 1, "processes": 3}
    said = {} if attempt is None else {"attempt": attempt}
    return {"event": "start", "time": STARTED + at, **where, **said, **more}


def train(at: float, step: int | None) -> Any:
    return {"event": "train", "time": STARTED + at, "step": step, "samples": None}


def stop(at: float, step: int | None, cause: str = "failed: it") -> Any:
    return {"event": "stop", "time": STARTED + at, "step": step, "samples": None, "cause": cause}


def round_(at: float, standstill_s: float, processes: int, **more: Any) -> Any:
    numbers = {"number": 1, "step": 10, "standstill_s": standstill_s, "step_s": 1.0}
    return {"event": "round", "time": STARTED + at, "processes": processes, **numbers, **more}


def write_history(run: Run, *events: Any) -> None:
    run.history_file.write_text("".join(json.dumps(event) + "\n" for event in events))


def account(*events: Any, step: int | None = None, now: float | None = None) -> RunAccounting:
    run = make_run(Path("runs"), "a")
    write_history(run, *events)
    is_running = now is not None
    found = account_for_run(
        read_history(run, is_running), step, None if now is None else STARTED + now
    )
    assert found is not None
    assert found.effective_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s)
    return found


def lost(**by_cause: float) -> dict[str, Any]:
    return {cause: pytest.approx(by_cause.get(cause, 0.0), abs=1e-6) for cause in CAUSES}


def test_one_start_loses_the_time_until_its_first_step() -> None:
    found = account(start(0), train(5, 0), stop(105, 100, "finished"))
    assert (found.wall_s, found.effective_s, found.steps_kept) == (105, 100, 100)
    assert found.lost_s == lost(starting=5)
    assert found.effective_share == pytest.approx(100 / 105)
    assert not found.is_disturbed


def test_a_restart_costs_its_pause_its_start_and_the_steps_that_are_made_again() -> None:
    """100 steps of a second each; 40 of them are made again after 3 + 2 s."""
    found = account(
        *(start(0), train(5, 0), stop(105, 100)),
        *(start(108, attempt=1), train(110, 60), stop(150, 100, "finished")),
    )
    assert found.lost_s == lost(starting=5, restarts=5, redone_steps=40)
    assert (found.effective_s, found.steps_kept, found.steps_redone) == (100, 100, 40)
    assert (found.starts, found.restarts, found.requeues) == (2, 1, 0)


def test_steps_are_lost_to_the_earliest_step_that_a_later_start_went_on_after() -> None:
    """The third start finds only an older snapshot than the second one did."""
    found = account(
        *(start(0), train(0, 0), stop(100, 100)),
        *(start(100, attempt=1), train(100, 80), stop(110, 90)),
        *(start(110, attempt=2), train(110, 60), stop(150, 100, "finished")),
    )
    assert (found.steps_redone, found.steps_kept) == (40 + 10, 100)
    assert found.lost_s == lost(redone_steps=50)
    assert found.restarts == 2


def test_a_start_that_ended_in_its_first_step_has_made_nothing() -> None:
    found = account(
        *(start(0), train(2, 0), stop(10, None)),
        *(start(10, attempt=1), train(11, 0), stop(21, 10, "finished")),
    )
    assert found.lost_s == lost(starting=2, restarts=1, redone_steps=8)
    assert (found.steps_kept, found.steps_redone, found.effective_s) == (10, 0, 10)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"job": "7", "requeues": 1}, "queue"),
        ({"job": "8", "requeues": 1}, "stopped"),  # its own first start left no line
        ({"job": "7", "requeues": 0}, "stopped"),  # by hand, in a shell of `salloc`
        ({"job": "7", "attempt": None}, "stopped"),  # of an old history
    ],
)
def test_the_time_between_two_starts_is_spent_in_the_queue_or_stopped(
    how: dict[str, Any], cause: str
) -> None:
    found = account(
        *(start(0, job="7", requeues=0), train(1, 0), stop(11, 10, "stopped by SIGUSR2")),
        *(start(71, **how), train(72, 10), stop(82, 20, "finished")),
    )
    assert found.lost_s == lost(starting=2, **{cause: 60})
    assert (found.requeues, found.restarts) == (int(cause == "queue"), 0)


def test_replaced_ranks_cost_the_standstill_but_the_step_in_it() -> None:
    """A rank is lost 20 s after the first step, and its replacement joins 10 s later."""
    found = account(
        *(start(0), train(0, 0)),
        round_(20, 1.5, processes=2, lost=[1], joined=[]),
        round_(30, 1.25, processes=3, lost=[], joined=[1]),
        stop(100, 99, "finished"),
    )
    assert found.lost_s == lost(replaced_ranks=0.5 + 0.25)
    assert (found.lost_ranks, found.replaced_ranks, found.fewer_processes_s) == (1, 1, 10)
    assert found.is_disturbed
    assert (found.starts, found.restarts, found.steps_kept) == (1, 0, 99)


def test_ranks_beyond_those_of_the_start_replace_nobody() -> None:
    """As `echelon scale` adds them."""
    found = account(
        *(start(0), train(0, 0)),
        round_(20, 1.5, processes=5, lost=[], joined=[3, 4]),
        round_(30, 1.5, processes=4, lost=[1], joined=[]),
        round_(40, 1.5, processes=5, lost=[], joined=[1]),
        stop(100, 99, "finished"),
    )
    assert (found.lost_ranks, found.replaced_ranks) == (1, 1)


def test_steps_after_a_copy_in_memory_are_made_again() -> None:
    back = {"event": "return", "time": STARTED + 50.0, "from_step": 45, "step": 20}
    found = account(start(0), train(0, 0), back, stop(125, 100, "finished"))
    assert (found.steps_kept, found.steps_redone) == (100, 25)
    assert found.lost_s == lost(redone_steps=25)


def test_a_standstill_after_the_end_of_a_phase_is_counted_once() -> None:
    """The agent wrote the round when it gave up, 5 s after the last line of metrics."""
    found = account(
        *(start(0), train(0, 0), stop(20, 20, "killed")),
        round_(25, 5.0, processes=2, lost=[1], step_s=None),
        *(start(26, attempt=1), train(27, 20), stop(47, 40, "finished")),
    )
    assert found.lost_s == lost(restarts=7)
    assert found.lost_ranks == 1


def test_a_run_that_runs_is_counted_until_now() -> None:
    found = account(start(0), train(5, 0), step=30, now=35)
    assert (found.wall_s, found.effective_s, found.steps_kept) == (35, 30, 30)


def test_a_run_that_has_not_begun_to_train_has_lost_all_its_time() -> None:
    found = account(start(0), now=2)
    assert (found.effective_s, found.lost_s) == (0, lost(starting=2))


def test_nothing_is_said_of_programs_and_of_runs_without_a_history() -> None:
    run = make_run(Path("runs"), "a")
    assert account_for_run(read_history(run, is_running=False)) is None
    write_history(run, start(0), train(1, None), stop(9, None, "finished"))
    assert account_for_run(read_history(run, is_running=False)) is None


def test_rounds_that_are_damaged_are_skipped() -> None:
    broken = [
        round_(20, float("nan"), processes=2),
        round_(20, 1.0, processes=2, number=None),
        round_(20, 1.0, processes=True),
        {"event": "round", "time": STARTED + 20},
    ]
    odd = round_(20, 2.0, processes=2, lost={"a": 1}, joined=[None, 2], reason=3, step_s="x")
    found = account(
        round_(0, 1.0, processes=2), start(0), train(0, 0), *broken, odd, stop(30, 30, "finished")
    )
    assert (found.lost_ranks, found.replaced_ranks) == (0, 1)
    assert found.lost_s == lost(replaced_ranks=2)


def test_show_has_one_line_where_nothing_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("runs"), "a", lines())
    write_history(run, start(0), train(10, 0), stop(40, 40, "finished"))
    out = " ".join(echelon(capsys, "show", "a")[1].split())
    assert "effective 75.0 % of 40.0 s; starting took 10.0 s" in out
    assert "LOST BY" not in out


def test_show_counts_losses_by_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of earlier starts, and of those that did not write down where a rank was lost."""
    run = make_run(Path("runs"), "a", lines())
    write_history(
        run,
        *(start(0), train(5, 0), round_(20, 2.0, processes=2, lost=[1], hosts=["a"])),
        *(stop(45, 40), start(48, attempt=1), train(50, 20)),
        round_(55, 1.0, processes=2, lost=[0], hosts=7),
        round_(60, 2.0, processes=1, lost=[1, 2], hosts=["b", "b", None]),
        stop(72, 40, "finished"),
    )
    out = " ".join(echelon(capsys, "show", "a")[1].split())
    assert "at fault b 2 times, a once" in out
    said = json.loads(echelon(capsys, "show", "a", "--json")[1])["accounting"]
    assert list(said["losses_by_host"].items()) == [("b", 2), ("a", 1)]
    assert [round_["hosts"] for round_ in said["rounds"]] == [["a"], [], ["b", "b"]]


def test_show_names_machines_that_were_slow(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(at: float, rank: Any, host: str, factor: Any, step: Any) -> Any:
        fields = {"rank": rank, "host": host, "factor": factor, "step": step}
        return {"event": "slow", "time": STARTED + at, **fields}

    run = make_run(Path("runs"), "a", lines())
    write_history(
        run,
        *(start(0), train(5, 0), slow(10, 2, "b", 1.7, 10), slow(20, 2, "b", None, 20)),
        *(slow(21, 0, "a", 3.25, 21), slow(22, "0", "c", 2.0, 22), slow(23, 1, "c", 2.0, None)),
        *(stop(45, 40), start(48, attempt=1), train(50, 20), slow(60, 3, "b", 2.08, 30)),
        *(slow(65, 3, "b", None, 35), stop(72, 40, "finished")),
    )
    out = " ".join(echelon(capsys, "show", "a")[1].split())
    b = "b 2 times, last rank 3 from step 30 to 35 (2.08 × the median)"
    assert f"slow {b}; a rank 0 from step 21 on (3.25 × the median)" in out
    said = json.loads(echelon(capsys, "show", "a", "--json")[1])["accounting"]["slow_ranks"]
    assert [(s["phase"], s["rank"], s["until_step"]) for s in said] == [
        *((0, 2, 20), (0, 0, None)),
        (1, 3, 35),
    ]


def test_show_names_machines_that_were_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def machine(at: float, host: Any, step: Any, **fields: Any) -> Any:
        known = {"event": "machine", "time": STARTED + at, "host": host, "step": step}
        return known | {"reason": "2 faults", "is_left_out": True} | fields

    run = make_run(Path("runs"), "a", lines())
    write_history(
        run,
        *(start(0), train(5, 0), machine(10, "b", 10, replaced_by="c")),
        *(machine(11, 7, 10), machine(12, "d", None), stop(45, 40)),
        *(start(48, attempt=1), train(50, 20), machine(60, "c", 30, reason="GPU 0 lost")),
        machine(61, "a", 31, is_left_out=False, kept_because="0 nodes would be left"),
        stop(72, 40, "finished"),
    )
    out = " ".join(echelon(capsys, "show", "a")[1].split())
    b, c = "b after step 10 (2 faults): c took over", "c after step 30 (GPU 0 lost): no other"
    assert f"left out {b}; {c} took over" in out
    assert "kept a after step 31 (2 faults), since 0 nodes would be left" in out
    said = json.loads(echelon(capsys, "show", "a", "--json")[1])["accounting"]["bad_machines"]
    assert [(m["phase"], m["host"], m["is_left_out"], m["replaced_by"]) for m in said] == [
        *((0, "b", True, "c"), (1, "c", True, "")),
        (1, "a", False, ""),
    ]


def test_show_has_a_row_for_each_cause(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("runs"), "a", lines())
    reason = "lost rank 1 on b after step 10: killed by SIGKILL; going on with 2 processes"
    write_history(
        run,
        *(start(0), train(5, 0), stop(45, 40)),
        *(start(48, attempt=1), train(50, 20)),
        round_(60, 2.0, processes=2, lost=[1], reason=reason),
        round_(65, 2.0, processes=3, joined=[1]),
        stop(72, 40, "finished"),
    )
    code, out, err = echelon(capsys, "show", "a")
    assert (code, err) == (0, "")
    shown = [" ".join(line.split()) for line in out.splitlines()]
    happened = "2 starts, 1 lost rank, 1 replacement, 20 steps made again"
    assert f"effective 55.6 % of 1m12s; {happened}" in shown
    table = shown[shown.index("LOST BY TIME SHARE") + 1 :]
    assert table[: table.index("")] == [
        "starting 5.0 s 6.9 %",
        "restarts 5.0 s 6.9 % 1 restart",
        "steps made again 20.0 s 27.8 % 20 steps",
        "replacing ranks 2.0 s 2.8 % 1 lost rank, 1 replacement; 5.0 s with fewer processes",
    ]
    said = json.loads(echelon(capsys, "show", "a", "--json")[1])["accounting"]
    assert said["effective_share"] == pytest.approx(40 / 72)
    assert said["lost_s"] == lost(starting=5, restarts=5, redone_steps=20, replaced_ranks=2)
    counts = ("starts", "restarts", "requeues", "lost_ranks", "replaced_ranks", "steps_redone")
    assert [said[name] for name in counts] == [2, 1, 0, 1, 1, 20]
    first, second = said["rounds"]
    assert (first["phase"], first["standstill_s"], first["lost_ranks"]) == (1, 2.0, [1])
    assert (first["reason"], second["joined_ranks"]) == (reason, [1])
