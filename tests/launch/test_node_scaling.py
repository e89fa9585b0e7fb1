"""Which nodes leave or are given ranks when a person wants another number of nodes."""

from __future__ import annotations

import pytest

from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.node_scaling import ScaleAnswer, ScaleLimits, scale_nodes

LIMITS = ScaleLimits(min_nodes=1, max_nodes=4, batch_size=16)


def lead(nodes: int, spares: int = 0, can_lose_nodes: bool = True) -> Lifeline:
    """The leader of nodes with two ranks each, without connections to them."""
    lifeline = Lifeline(Member(0, "host 0", procs=2, place=0, slots=(0, 1)))
    members = [
        Member(n, f"host {n}", procs=2, place=n, slots=(2 * n, 2 * n + 1)) for n in range(nodes)
    ]
    members += [Member(nodes + n, f"spare {n}", procs=2) for n in range(spares)]
    lifeline.membership = Membership(0, 0, {m.node: m for m in members}, can_lose_nodes)
    return lifeline


def test_the_last_nodes_leave() -> None:
    lifeline = lead(3)
    answer = scale_nodes(lifeline, 1, LIMITS)
    hosts = ("host 1", "host 2")
    assert answer == ScaleAnswer((), 3, hosts, leaving_nodes=(1, 2), vacated_hosts=hosts)
    assert ScaleAnswer.from_json(answer.to_json()) == answer
    known, why = lifeline.membership, "scaled to 1 node"
    assert [m.leaving for m in known.members.values()] == ["", why, why]
    assert known.wanted_nodes == 1
    again = scale_nodes(lifeline, 2, LIMITS)  # they do not come back; others take their places
    assert (again.before, again.missing, again.leaving, again.first_node) == (1, 1, (), 3)
    assert lifeline.membership.count_missing_nodes() == 1
    assert lifeline.membership.free_places == ()


def test_a_host_is_given_back_when_no_node_of_the_runs_own_job_is_left_there() -> None:
    """Slurm may start the node of a further job where one of the run's own is."""
    lifeline = lead(2)
    for node, host in ((2, "host 1"), (3, "host 4")):
        added = Member(node, host, 2, place=node, slots=(2 * node, 2 * node + 1), is_added=True)
        lifeline.membership = lifeline.membership.add(added)
    answer = scale_nodes(lifeline, 2, LIMITS)
    assert (answer.leaving, answer.leaving_nodes) == (("host 1", "host 4"), (2, 3))
    assert answer.vacated_hosts == ()
    lifeline = lead(2)
    added = Member(2, "host 1", 2, place=2, slots=(4, 5), is_added=True)
    lifeline.membership = lifeline.membership.add(added)
    lifeline.ask_to_leave(1, "it was sent SIGTERM")
    assert scale_nodes(lifeline, 1, LIMITS).vacated_hosts == ()  # node 1 left before
    lifeline = lead(3)
    assert scale_nodes(lifeline, 1, LIMITS).vacated_hosts == ("host 1", "host 2")


def test_spares_take_part_in_places_of_their_own() -> None:
    lifeline = lead(2, spares=1)
    answer = scale_nodes(lifeline, 4, LIMITS)
    assert (answer.joining, answer.missing) == (("spare 0",), 1)
    assert lifeline.membership.free_places == ((2, (4, 5)), (3, (6, 7)))
    assert lifeline.membership.count_missing_nodes() == 1


def test_places_that_are_vacant_come_first() -> None:
    lifeline = lead(3)
    lifeline.membership = lifeline.membership.remove(1)
    assert lifeline.membership.free_places == ((1, (2, 3)),)
    assert scale_nodes(lifeline, 3, LIMITS).missing == 1
    assert lifeline.membership.free_places == ((1, (2, 3)),)


@pytest.mark.parametrize(
    ("count", "limits", "words"),
    [
        (1, LIMITS, "cannot go on without one of them"),
        (1, ScaleLimits(2, 4, 16), "launch.min_nodes=2"),
        (5, LIMITS, "there are 4 nodes for this run"),
        (4, ScaleLimits(1, 0, 16), "there are 3 nodes for this run"),
        (4, ScaleLimits(1, None, 7), "trainer.batch_size=7 is smaller"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    count: int, limits: ScaleLimits, words: str
) -> None:
    lifeline = lead(3, can_lose_nodes="cannot" not in words)
    before = lifeline.membership
    [fault] = scale_nodes(lifeline, count, limits).faults
    assert words in fault.what
    assert lifeline.membership == before
