"""Agents and node 0's, over real connections: losses, first failures and hangs are known to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from echelon.config import schema
from echelon.errors import EchelonError, ExitCode
from echelon.launch.node.hang_detection import HungRank
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.lifeline_sockets import LeaderConnection, NodeServer
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.message_channel import Message
from echelon.runs.failure import Failure
from echelon.world.rounds import Round

LIMIT_S = 300.0
KEY = b"a key of 32 bytes or of any size"


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


def failure(rank: int, summary: str = "boom") -> Failure:
    return Failure(rank, "here", 3, summary, "")


def heartbeat(rank: int, beats: int, still: float = 100.0) -> dict[str, Any]:
    still_signs = {"step": beats, "begun": True, "still": still, "stopped": False}
    return {"rank": rank, "beats": beats, **still_signs}


@contextmanager
def world(
    address: str = "127.0.0.1",
) -> Iterator[tuple[Lifeline, Lifeline, list[Failure]]]:
    """Two nodes, and what the second hears when it loses the first."""
    lost: list[Failure] = []
    hub, spoke = (Lifeline(Member(node, f"host {node}", place=node)) for node in range(2))
    port = hub.open_as_leader(address, address, KEY, 2)
    spoke.open_as_follower(f"{address}:{port}", KEY, 2, lost.append)
    until(lambda: 1 in hub.membership.members)
    yield hub, spoke, lost
    spoke.leave()
    hub.leave()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_failure_is_everybodys(address: str) -> None:
    with world(address) as (hub, spoke, _):
        assert spoke.agree_on_failure(0, failure(2)).rank == 2
        assert hub.find_failure(0) == failure(2)
        assert hub.agree_on_failure(0, failure(0, "broken pipe")).rank == 2, "it came later"
        assert hub.agree_on_failure(1, failure(0)).rank == 0, "another attempt"
        assert until(lambda: spoke.find_failure(1)).rank == 0


def test_an_agent_that_ends_without_a_word_is_named_in_every_attempt() -> None:
    with world() as (hub, spoke, _):
        spoke.begin_attempt(0, [2, 3], 1)
        spoke.report_heartbeats([heartbeat(2, 5), heartbeat(3, 5)])
        until(
            lambda: (
                hub.membership.members[1].slots and 1 in hub._reports and hub._reports[1].heartbeats
            )
        )
        spoke._leader.close()  # type: ignore[union-attr]
        told = until(lambda: hub.find_failure(0))
        assert told.exit == ExitCode.NODE_LOST
        assert "node 1" in told.summary
        assert "ranks 2–3" in told.summary
        assert hub.find_failure(7) == told


def test_node_0_that_ends_is_missed_at_once() -> None:
    with world() as (hub, _, lost):
        assert hub._server is not None
        hub._server.drop(1)
        assert until(lambda: lost)[0].exit == ExitCode.NODE_LOST


def test_the_rank_that_all_wait_for_is_found_on_another_node() -> None:
    with world() as (hub, spoke, _):
        hub.report_heartbeats([heartbeat(0, 40), heartbeat(1, 40)])
        spoke.report_heartbeats([heartbeat(2, 40), heartbeat(3, 39)])
        found = until(lambda: hub.find_hung_rank(0, 1.0))
        assert found.rank == 3
        assert until(lambda: spoke.find_hung_rank(0, 1.0)) == found


def test_heartbeats_that_are_stored_while_an_attempt_begins_are_not_taken_for_its_own() -> None:
    class ArrivingLate(dict[str, Any]):
        """A message that is being stored when the attempt begins."""

        def __getitem__(self, key: str) -> Any:
            if key == "heartbeats" and hub._attempt == 0:
                hub.begin_attempt(1)
            return super().__getitem__(key)

    with world() as (hub, spoke, _):
        hub.report_heartbeats([heartbeat(0, 40)])
        hub._handle_from_node(1, ArrivingLate(heartbeats=[heartbeat(1, 39)], attempt=0))
        assert hub.find_hung_rank(1, 1.0) is None, "node 1 has not reported in this attempt"
        spoke.begin_attempt(1)
        spoke.report_heartbeats([heartbeat(1, 39)])
        assert until(lambda: hub.find_hung_rank(1, 1.0)).rank == 1


def test_the_limit_is_the_one_that_the_help_says() -> None:
    lone, pair = (
        [heartbeat(0, 40, still=9.0)],
        [heartbeat(0, 6, still=9.0), heartbeat(1, 6, still=9.0)],
    )
    first_steps = Lifeline()
    first_steps.report_heartbeats(pair)
    assert first_steps.find_hung_rank(0, 1.0) == HungRank(0, 8.0)
    assert first_steps.find_hung_rank(0, 2.0) is None
    assert "It is 8 times as long" in Path(schema.__file__).read_text(encoding="utf-8")
    alone = Lifeline()
    alone.report_heartbeats(lone)
    assert alone.find_hung_rank(0, 9.0) == HungRank(0, 9.0)
    alone.report_heartbeats(pair[:1])
    assert alone.find_hung_rank(0, 1.0) is None, "a process that is alone may take any time"


def test_a_slow_rank_is_not_stuck_and_a_stranger_is_not_heard() -> None:
    with world() as (hub, spoke, _):
        hub.report_heartbeats([heartbeat(0, 40)])
        spoke.report_heartbeats([heartbeat(1, 39, still=0.1)])
        until(lambda: 1 in hub._reports and hub._reports[1].heartbeats)
        assert hub.find_hung_rank(0, 1.0) is None
        stranger = Lifeline(Member(5, "elsewhere"))
        with pytest.raises(EchelonError, match="has another key"):
            stranger.open_as_follower(hub.own.lifeline, b"guessed", 2, lambda failure: None)
        assert set(hub.membership.members) == {0, 1}


# --- another node leads ---


@contextmanager
def nodes(count: int, silence_s: float = 5.0) -> Iterator[tuple[list[Lifeline], list[Failure]]]:
    """Nodes whose ranks can go on without one of them, and what those hear that end."""
    ended: list[Failure] = []
    made = [
        Lifeline(Member(n, f"host {n}", store="here", place=n, slots=(n,)), silence_s)
        for n in range(count)
    ]
    port = made[0].open_as_leader("127.0.0.1", "127.0.0.1", KEY, count)
    for each in made[1:]:
        each.open_as_follower(
            f"127.0.0.1:{port}", KEY, count, ended.append, lambda address: "there"
        )
    until(lambda: len(made[0].membership.members) == count)
    made[0].set_can_lose_nodes(True)
    until(
        lambda: all(
            m.membership.can_lose_nodes and m.membership == made[0].membership for m in made
        )
    )
    yield made, ended
    for each in made:
        each._is_over = True


def kill(node: Lifeline) -> None:
    """Close all its connections, as the end of its process does."""
    node._is_over = True
    if node._leader is not None:
        node._leader.close()
    assert node._server is not None
    for other in node._server.nodes:
        node._server.drop(other)


def test_a_lost_node_is_taken_out_once_a_quorum_has_accepted() -> None:
    with nodes(3) as (made, ended):
        kill(made[2])
        [lost] = until(made[0].take_lost_nodes)
        assert (lost.member.node, lost.member.slots) == (2, (2,))
        assert lost.failure.exit == ExitCode.NODE_LOST
        until(lambda: set(made[1].membership.members) == {0, 1})
        assert made[0].find_failure(0) is None
        assert ended == []


def test_the_lowest_node_that_lives_leads_with_all_that_was_reported() -> None:
    with nodes(4) as (made, ended):
        made[0].announce_round(0, Round(3, (0, 1, 2, 3)))
        until(lambda: made[3].find_round(0))
        made[3].report_done(0, 0)
        kill(made[0])
        until(lambda: made[1].is_leader)
        until(lambda: made[2].membership.leader == made[3].membership.leader == 1)
        [lost] = until(made[1].take_lost_nodes)
        assert lost.member.node == 0
        assert made[1].find_round(0) == Round(3, (0, 1, 2, 3))
        assert made[1]._done == {0: {3: 0}}
        made[1].announce_round(0, Round(4, (1, 2, 3)))
        until(lambda: made[2].find_round(0) == Round(4, (1, 2, 3)))
        assert made[1].membership.lost_hosts == ("host 0",)
        kill(made[1])
        until(lambda: made[2].is_leader)  # two of three
        assert ended == []


def test_a_node_without_a_majority_ends_and_says_so() -> None:
    with nodes(2, silence_s=0.5) as (made, ended):
        kill(made[0])
        assert "1 of 2 nodes are no majority" in until(lambda: ended)[0].summary
        assert made[1].is_isolated
        assert not made[1].is_leader


def test_a_leader_without_a_majority_ends() -> None:
    with nodes(4) as (made, _):
        connections = [each._leader for each in made[1:]]
        for each in made[1:]:
            each._is_over, each._leader = True, None  # it accepts nothing any more
        for connection in connections:
            assert connection is not None
            connection.close()
        assert "1 of 4 nodes are no majority" in until(lambda: made[0].find_failure(0)).summary
        assert made[0].is_isolated


@pytest.mark.parametrize(
    ("present", "may"),
    [({0, 1}, True), ({2, 3}, False), ({1, 2, 3}, True), ({1}, False), ({0}, False)],
)
def test_half_of_the_nodes_go_on_with_the_leader_alone(present: set[int], may: bool) -> None:
    four = Membership(0, 0, {n: Member(n, f"host {n}") for n in range(4)})
    assert four.has_quorum(present) is may


# --- nodes that leave on purpose ---


def test_a_node_leaves_on_purpose_and_is_not_lost() -> None:
    with nodes(3) as (made, ended):
        made[1].ask_to_leave(2, "too slow")  # any node may ask for it
        until(lambda: all(m.membership.members[2].leaving == "too slow" for m in made))
        assert made[0].membership.find_spare(1) is None
        made[0].release(2)
        until(lambda: made[2].is_released)
        made[2].leave()
        until(lambda: set(made[1].membership.members) == {0, 1})
        until(lambda: made[0].committed == made[0].membership)
        assert made[0].membership.left_nodes == (2,)
        assert made[0].membership.lost_hosts == ()
        assert made[0].list_free_places() == ((2, (2,)),)
        assert made[0].take_lost_nodes() == []
        assert made[0].find_failure(0) is None
        assert ended == []


def test_a_leader_that_is_to_leave_resigns_and_stays_a_member_until_it_is_released() -> None:
    with nodes(3) as (made, ended):
        made[0].set_wanted_nodes(2)
        made[0].announce_round(0, Round(3, (0, 1, 2)))
        made[2].ask_to_leave(0, "maintenance")
        until(lambda: all(m.membership.members[0].leaving for m in made))
        assert made[0].resign()
        until(lambda: made[1].is_leader)
        until(lambda: made[0].membership.leader == made[2].membership.leader == 1)
        until(lambda: not any(m.is_electing for m in made))
        assert made[1].is_handed_over
        assert made[1].take_lost_nodes() == []
        assert made[1].membership.members[0].leaving == "maintenance"
        assert made[1].membership.wanted_nodes == 2
        assert made[1].find_round(0) == Round(3, (0, 1, 2))
        made[1].announce_round(0, Round(4, (1, 2)))
        until(lambda: made[0].find_round(0) == made[2].find_round(0) == Round(4, (1, 2)))
        made[1].release(0)
        until(lambda: made[0].is_released)
        made[0].leave()
        until(lambda: set(made[2].membership.members) == {1, 2})
        assert made[1].membership.has_lost_nodes
        assert ended == []


def test_a_node_that_would_follow_another_hears_nothing_of_the_leader_over_it() -> None:
    """It was the first to know that the leader resigns. To hear so again would end its try."""
    with nodes(2) as (made, _):
        passed_on: list[Message] = []
        candidate, heard = made[1].own.lifeline, threading.Event()
        made[1].on_stack_message = lambda message: heard.set()
        server = NodeServer(
            "127.0.0.1", KEY, 3, LIMIT_S, lambda *_: None, lambda *_: None, lambda: None
        )
        follower = LeaderConnection(
            candidate,
            KEY,
            LIMIT_S,
            LIMIT_S,
            dict,
            passed_on.append,
            lambda how: None,
            lambda how: None,
            lambda: "",
        )
        introduction = {"member": asdict(Member(2, "host 2")), "knows": [0, 0], "rounds": []}
        follower.start(server, 2, lambda: introduction)
        candidate_server = made[1]._server
        assert candidate_server is not None
        until(lambda: 2 in candidate_server.nodes)
        made[0].send_stack_message({"to": "all"})
        assert heard.wait(LIMIT_S)
        candidate_server.send(2, {"to": "this one"})
        until(lambda: {"to": "this one"} in passed_on)
        assert [m for m in passed_on if "alive" not in m] == [{"to": "this one"}]
        follower.close()
        server.close()


def test_nobody_resigns_where_nobody_else_may_lead() -> None:
    with nodes(2) as (made, _):
        made[0].ask_to_leave(1, "maintenance")
        until(lambda: made[0].membership.members[1].leaving)
        assert not made[0].resign()
        assert made[0].is_leader


def test_a_leaving_node_that_is_lost_is_lost() -> None:
    with nodes(3) as (made, _):
        made[0].ask_to_leave(2, "maintenance")
        until(lambda: made[1].membership.members[2].leaving)
        kill(made[2])
        [lost] = until(made[0].take_lost_nodes)
        assert lost.member.node == 2
        assert made[0].list_free_places() == ((2, (2,)),)


def test_vacant_places_are_known_to_the_next_leader() -> None:
    with nodes(4) as (made, _):
        kill(made[3])
        until(made[0].take_lost_nodes)
        until(lambda: made[1].membership.free_places)
        kill(made[0])
        until(lambda: made[1].is_leader)
        until(made[1].take_lost_nodes)
        assert sorted(made[1].list_free_places()) == [(0, (0,)), (3, (3,))]
