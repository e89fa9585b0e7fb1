"""Which machine is at fault, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import ExitCode
from echelon.launch.node.bad_machines import (
    Verdict,
    describe_faults,
    find_faulty_host,
    is_machine_at_fault,
    judge_machine,
    list_new_faults,
)
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.node_reports import RankLoss
from echelon.runs.failure import Failure, make_failure_from_exit_code


def make_membership(*hosts: str, spares: tuple[str, ...] = (), procs: int = 2) -> Membership:
    """A node for every name, with so many ranks each; the spares have the last numbers."""
    members = {}
    for node, host in enumerate((*hosts, *spares)):
        is_spare = node >= len(hosts)
        slots = () if is_spare else tuple(range(node * procs, node * procs + procs))
        members[node] = Member(node, host, procs, place=-1 if is_spare else node, slots=slots)
    return Membership(1, 0, members, can_lose_nodes=True)


def make_loss(host: str, *slots: int, code: int = -9) -> RankLoss:
    return RankLoss(list(slots), replace(make_failure_from_exit_code(code, slots[0], 5), host=host))


@pytest.mark.parametrize(
    ("failure", "is_machine"),
    [
        (make_failure_from_exit_code(-9, 0, 5), True),
        (make_failure_from_exit_code(-11, 0, 5), True),
        (make_failure_from_exit_code(1, 0, 5), False),
        (Failure(0, "a", 5, "ValueError: no", ""), False),
        (Failure(0, "a", 5, "injected", "", int(ExitCode.TRANSIENT)), False),
        (Failure(0, "a", 5, "no progress for 60 s", "", may_be_machine=True), True),
        (Failure(0, "a", 5, "wrong numbers", "", int(ExitCode.WRONG_NUMBERS)), True),
        (Failure(0, "a", 5, "closed its connection", "", int(ExitCode.NODE_LOST)), True),
    ],
)
def test_what_a_machine_can_be_at_fault_for(failure: Failure, is_machine: bool) -> None:
    assert is_machine_at_fault(failure) == is_machine


def test_ranks_that_are_lost_together_are_one_fault() -> None:
    known = make_membership("a", "b")
    both = [make_loss("b", 2), make_loss("b", 3)]
    assert [f.rank for f in list_new_faults(known, both, range(4))] == [2]
    assert list_new_faults(known, [make_loss("b", 3)], {0, 1, 3}) == []  # a moment later
    assert [f.rank for f in list_new_faults(known, [make_loss("a", 0)], {0, 1, 3})] == [0]


def test_a_replacement_that_is_lost_as_well_is_another_fault() -> None:
    known = make_membership("a", "b")
    assert [f.rank for f in list_new_faults(known, [make_loss("b", 2)], {0, 1, 3})] == [2]
    assert list_new_faults(known, [make_loss("b", 2, code=1)], {0, 1, 3}) == []


def test_a_lost_node_is_a_fault_of_its_machine() -> None:
    """It is no member any more."""
    known = make_membership("a", "b").remove(1)
    failure = Failure(2, "b", 5, "is silent", "", int(ExitCode.NODE_LOST))
    assert list_new_faults(known, [RankLoss([2, 3], failure)], range(4)) == [failure]


@pytest.mark.parametrize(
    ("faults", "most", "found"),
    [
        ("", 2, None),
        ("b", 2, None),
        ("bb", 2, "b"),
        ("abb", 2, None),
        ("abbb", 2, "b"),
        ("abab", 2, None),
        ("b", 1, "b"),
        ("bbbb", 0, None),
    ],
)
def test_a_machine_that_was_at_fault_more_often_than_any_other(
    faults: str, most: int, found: str | None
) -> None:
    known = replace(make_membership("a", "b"), faults=tuple((host, "gone") for host in faults))
    assert find_faulty_host(known, most) == found
    assert find_faulty_host(replace(known, excluded_hosts=("a", "b")), most) is None


def test_what_is_said_of_a_machine() -> None:
    known = replace(make_membership("a", "b"), faults=(("b", "x"), ("a", "y"), ("b", "z")))
    assert describe_faults(known, "b") == "at fault 2 times, last: z"
    assert describe_faults(known, "a") == "at fault once, last: y"


def test_a_spare_takes_the_place_of_a_bad_machine() -> None:
    known = make_membership("a", "b", spares=("c",))
    assert judge_machine(known, "b", 2) == Verdict("", (1,), "c")
    assert judge_machine(known, "b", 1, needs_spare=True) == Verdict("", (1,), "c")
    assert judge_machine(known, "a", 2) == Verdict("", (0,), "c")


def test_without_a_spare_the_others_go_on_if_they_are_enough() -> None:
    known = make_membership("a", "b", "c")
    assert judge_machine(known, "b", 1) == Verdict("", (1,))
    kept = judge_machine(known, "b", 3)
    assert kept == Verdict("2 nodes would be left, and launch.min_nodes=3")
    assert judge_machine(known, "b", 1, needs_spare=True).kept_because == "no spare is there"


def test_the_last_machine_stays() -> None:
    known = make_membership("a", "a", spares=("b",))
    assert judge_machine(known, "a", 1).kept_because == "no other machine has the state of the run"


def test_all_nodes_of_a_machine_leave_and_its_spares_are_not_used() -> None:
    known = make_membership("a", "b", "b", spares=("b", "c"))
    assert judge_machine(known, "b", 1) == Verdict("", (1, 2, 3), "c")
    assert judge_machine(known, "b", 3).kept_because


def test_a_spare_that_is_too_small_does_not_count() -> None:
    known = make_membership("a", "b", spares=("c",))
    small = known.add(replace(known.members[2], procs=1))
    assert judge_machine(small, "b", 1, needs_spare=True).kept_because
    assert judge_machine(small, "b", 1) == Verdict("", (1,))


def test_a_machine_whose_node_is_lost_is_left_out_without_anybody_leaving() -> None:
    known = make_membership("a", "b", spares=("c",)).remove(1)
    assert judge_machine(known, "b", 2) == Verdict("", (), "c")


def test_a_node_that_is_leaving_already_is_not_asked_again() -> None:
    known = make_membership("a", "b", "c")
    leaving = known.add(replace(known.members[1], leaving="asked to"))
    assert judge_machine(leaving, "b", 1) == Verdict("")
    assert judge_machine(leaving, "c", 2).kept_because  # one would be left
