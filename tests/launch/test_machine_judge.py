"""Machines that are at fault are left out, or it is said why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import make_run

from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.machine_judge import MachineJudge
from echelon.launch.node.membership import Member
from echelon.launch.node.node_reports import RankLoss
from echelon.runs.failure import make_failure_from_exit_code
from echelon.runs.history import BadMachine, read_history, record_start
from echelon.runs.run_folder import Run
from echelon.world.rounds import SlowMachine

GPU = "GPU 0: uncorrected memory errors rose from 0 to 1"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path, "a")
    record_start(run, "env", 2, 2, None)
    return run


def make_lifeline(*spares: str) -> Lifeline:
    """The one of a, which leads; b trains too."""
    lifeline = Lifeline(Member(0, "a", place=0, slots=(0,)))
    members = [lifeline.own, Member(1, "b", place=1, slots=(1,))]
    members += [Member(2 + number, host) for number, host in enumerate(spares)]
    known = replace(lifeline.membership, members={m.node: m for m in members}, can_lose_nodes=True)
    lifeline.membership = known
    return lifeline


def read_machines(run: Run) -> list[BadMachine]:
    [phase] = read_history(run, is_running=True).phases
    return [replace(machine, time=0.0) for machine in phase.bad_machines]


def lose(judge: MachineJudge, host: str, slot: int) -> None:
    failure = replace(make_failure_from_exit_code(-9, slot, 5), host=host)
    judge.count_losses([RankLoss([slot], failure)], {0, 1})


def test_a_gpu_with_an_error_is_enough(run: Run) -> None:
    lifeline = make_lifeline("c")
    judge = MachineJudge(lifeline, run, max_faults=0, min_nodes=2)
    lifeline.report_machine_fault(GPU)
    judge.judge_all(7, can_replace=True)
    judge.judge_all(0, can_replace=True)
    assert lifeline.membership.members[0].leaving == GPU
    assert lifeline.membership.excluded_hosts == ("a",)
    assert read_machines(run) == [BadMachine(0.0, "a", GPU, 7, True, "c")]


def test_where_ranks_cannot_be_replaced_the_machine_stays_until_they_can(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    lifeline = make_lifeline()
    judge = MachineJudge(lifeline, run, max_faults=2, min_nodes=1)
    lifeline.report_machine_fault(GPU)
    for _ in range(3):
        judge.judge_all(7, can_replace=False)
    assert lifeline.membership.members[0].leaving == ""
    said = f"a is at fault ({GPU}): it stays, since its ranks cannot be replaced\n"
    assert capsys.readouterr().err == said
    judge.judge_all(8, can_replace=True)
    assert [(m.is_left_out, m.step) for m in read_machines(run)] == [(False, 7), (True, 8)]


def test_a_machine_that_is_at_fault_twice(run: Run) -> None:
    lifeline = make_lifeline("c")
    judge = MachineJudge(lifeline, run, max_faults=2, min_nodes=1)
    lose(judge, "b", 1)
    judge.judge_all(5, can_replace=True)
    assert read_machines(run) == []
    lose(judge, "b", 1)
    judge.judge_all(6, can_replace=True)
    reason = "at fault 2 times, last: killed by SIGKILL"
    assert lifeline.membership.members[1].leaving == reason
    assert read_machines(run) == [BadMachine(0.0, "b", reason, 6, True, "c")]


def test_without_a_spare_a_machine_that_is_at_fault_stays_until_one_comes(run: Run) -> None:
    lifeline = make_lifeline()
    judge = MachineJudge(lifeline, run, max_faults=2, min_nodes=1)
    for _ in range(2):
        lose(judge, "b", 1)
    for step in (5, 6):
        judge.judge_all(step, can_replace=True)
    assert lifeline.membership.members[1].leaving == ""
    lifeline.membership = lifeline.membership.add(Member(2, "c"))
    judge.judge_all(7, can_replace=True)
    found = [(m.is_left_out, m.kept_because, m.step) for m in read_machines(run)]
    assert found == [(False, "no spare is there", 5), (True, "", 7)]


def test_a_machine_that_is_alone_is_not_counted(run: Run) -> None:
    lifeline = Lifeline(Member(0, "a", place=0, slots=(0, 1)))
    judge = MachineJudge(lifeline, run, max_faults=2, min_nodes=1)
    for _ in range(2):
        lose(judge, "a", 1)
        judge.judge_all(5, can_replace=True)
    assert lifeline.membership.faults == ()
    assert read_machines(run) == []


def test_a_slow_machine_is_replaced_only_by_a_spare(run: Run) -> None:
    slow = SlowMachine("b", 1, 2.5, 300.0)
    lifeline = make_lifeline()
    MachineJudge(lifeline, run, 2, 1).judge_all(5, True, slow)
    assert lifeline.membership.members[1].leaving == ""
    assert read_machines(run) == []  # that it is slow was said before
    lifeline = make_lifeline("c")
    MachineJudge(lifeline, run, 2, 1).judge_all(5, True, slow)
    reason = "2.5 × the time of the others for 300 s"
    assert read_machines(run) == [BadMachine(0.0, "b", reason, 5, True, "c")]
