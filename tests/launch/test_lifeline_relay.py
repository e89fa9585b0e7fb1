"""Many agents in a tree, over real connections: messages reach all, and losses are survived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from echelon.errors import EchelonError, ExitCode
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.lifeline_relay import RelayQueue, choose_moves
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.message_channel import connect_channel
from echelon.runs.failure import Failure
from echelon.world.rounds import Round

LIMIT_S = 300.0
KEY = b"a key of 32 bytes or of any size"
FANOUT = 3
COUNT = 30


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


def make_node(node: int, silence_s: float) -> Lifeline:
    return Lifeline(Member(node, f"host {node}", place=node, slots=(node,)), silence_s, FANOUT)


class Tree:
    """Agents whose ranks can go on without one of them. Node 0 leads."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.ended: list[Failure] = []
        self.leader = make_node(0, silence_s)
        self.leader.open_as_leader("127.0.0.1", "127.0.0.1", KEY, COUNT)
        self.nodes = {0: self.leader}

    def join(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.nodes[number] = node = make_node(number, self.silence_s)
            node.open_as_follower(self.leader.own.lifeline, KEY, COUNT, self.ended.append)

    def settle(self, count: int) -> None:
        """Wait until so many nodes are there and none has too many connections."""
        until(lambda: len(self.leader.membership.members) == count)
        until(lambda: all(get_server(n).peer_count <= FANOUT for n in self.nodes.values()))

    def wait_until_all_know(self, numbers: set[int], leader: int = 0) -> None:
        """Wait until these nodes are the world, and all of them know it."""
        here = [self.nodes[n] for n in numbers if n in self.nodes]
        until(lambda: all(set(n.membership.members) == numbers for n in here))
        until(lambda: all(n.membership.leader == leader for n in here))
        until(lambda: self.nodes[leader].is_leader)
        assert self.ended == []

    def kill(self, number: int) -> None:
        """Close all connections of a node, as the end of its process does."""
        node = self.nodes.pop(number)
        node._is_over = True
        if node._leader is not None:
            node._leader.stop_watching()
        get_server(node).close()

    def find_parents(self) -> dict[int, int]:
        """Node → the node to which it is connected."""
        listening = {n.own.lifeline: number for number, n in self.nodes.items()}
        return {
            number: listening[n._leader.parent] if n._leader.parent else self.leader.own.node
            for number, n in self.nodes.items()
            if n._leader is not None
        }

    def find_relay(self) -> int:
        """A node between the leader and others."""
        parents = self.find_parents()
        leader = self.leader.own.node
        return next(p for n, p in sorted(parents.items()) if p != leader and parents[p] == leader)

    def find_leaf(self) -> int:
        parents = self.find_parents()
        return max(n for n in parents if n not in parents.values())

    def exchange_numbers(self, numbers: set[int]) -> None:
        """Send numbers to and from every node, which arrive in order."""
        here = {n: self.nodes[n] for n in numbers if n != self.leader.own.node}
        came: dict[int, list[int]] = {n: [] for n in numbers}
        for number, node in here.items():
            node.on_stack_message = partial(_keep, came[number])
        self.leader.on_stack_message = lambda m: came[m["from"]].append(m["at"])
        for at in range(20):
            self.leader.send_stack_message({"at": at})
        until(lambda: all(came[n] == list(range(20)) for n in here))
        came.update({n: [] for n in here})
        for at in range(20):
            for number, node in here.items():
                node.send_stack_message({"from": number, "at": at})
        until(lambda: all(came[n] == list(range(20)) for n in here))


def _keep(came: list[int], message: dict[str, Any]) -> None:
    came.append(message["at"])


def get_server(node: Lifeline) -> Any:
    assert node._server is not None
    return node._server


@contextmanager
def open_tree(
    first: Sequence[int] = range(1, COUNT), later: Sequence[int] = (), silence_s: float = 60.0
) -> Iterator[Tree]:
    tree = Tree(silence_s)
    try:
        for numbers in (first, later):
            tree.join(numbers)
            tree.settle(len(tree.nodes))
        tree.leader.set_can_lose_nodes(True)
        tree.wait_until_all_know(set(tree.nodes))
        yield tree
    finally:
        for number in list(tree.nodes):
            tree.kill(number)


def test_no_agent_has_too_many_connections_and_messages_arrive_in_order() -> None:
    with open_tree() as tree:
        assert len(set(tree.find_parents().values())) > FANOUT, "there are relays"
        tree.exchange_numbers(set(range(COUNT)))
        tree.leader.announce_round(0, Round(3, tuple(range(COUNT))))
        until(lambda: all(n.find_round(0) for n in tree.nodes.values()))


def test_one_node_is_told_alone_and_heartbeats_of_all_come_together() -> None:
    with open_tree() as tree:
        leaf = tree.find_leaf()
        leader = tree.leader
        for number, node in tree.nodes.items():
            sign = {"rank": number, "beats": 40, "step": 40, "begun": True, "still": 100.0}
            node.report_heartbeats([sign | {"stopped": number == leaf}])
        assert until(lambda: leader.find_hung_rank(0, 1.0)).rank == leaf
        until(lambda: all(n.find_hung_rank(0, 1.0) for n in tree.nodes.values()))
        get_server(leader).send(leaf, {"over": 3})
        until(lambda: tree.nodes[leaf].over_code == 3)
        assert [n for n, node in tree.nodes.items() if node.over_code is not None] == [leaf]


def test_a_lost_leaf_is_taken_out_everywhere() -> None:
    with open_tree() as tree:
        leaf = tree.find_leaf()
        tree.kill(leaf)
        [lost] = until(tree.leader.take_lost_nodes)
        assert (lost.member.node, lost.failure.exit) == (leaf, ExitCode.NODE_LOST)
        tree.wait_until_all_know(set(range(COUNT)) - {leaf})


def test_the_nodes_behind_a_lost_relay_find_another_way() -> None:
    with open_tree() as tree:
        relay = tree.find_relay()
        tree.kill(relay)
        [lost] = until(tree.leader.take_lost_nodes)
        assert lost.member.node == relay
        left = set(range(COUNT)) - {relay}
        tree.wait_until_all_know(left)
        until(lambda: set(get_server(tree.leader).nodes) == left - {0})
        tree.settle(COUNT - 1)
        tree.exchange_numbers(left)
        assert tree.leader.take_lost_nodes() == []


@pytest.mark.slow
def test_a_node_that_is_lost_with_its_relay_is_known_a_limit_later() -> None:
    with open_tree(silence_s=10.0) as tree:
        child = tree.find_leaf()
        relay = tree.find_parents()[child]
        tree.kill(child)
        tree.kill(relay)
        tree.wait_until_all_know(set(range(COUNT)) - {relay, child})


_A_NODE = f"""
import time
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.membership import Member
own = Member(1, "host 1", place=1, slots=(1,))
lifeline = Lifeline(own, SILENCE, {FANOUT})
lifeline.open_as_follower("LEADER", {KEY!r}, {COUNT}, print)
time.sleep(3600)
"""


@contextmanager
def start_node_1(tree: Tree) -> Iterator[int]:
    """Start node 1 in a process of its own; yields its process id."""
    code = _A_NODE.replace("LEADER", tree.leader.own.lifeline)
    code = code.replace("SILENCE", str(tree.silence_s))
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            until(lambda: 1 in tree.leader.membership.members)
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.slow
def test_a_relay_of_another_process_is_stopped_or_killed(how: signal.Signals) -> None:
    tree = Tree(silence_s=10.0)
    with start_node_1(tree) as process:
        try:
            tree.join(range(2, COUNT))
            tree.settle(COUNT)
            own = tree.leader.membership.members[1].lifeline
            until(lambda: any(n._leader and n._leader.parent == own for n in tree.nodes.values()))
            tree.leader.set_can_lose_nodes(True)
            tree.wait_until_all_know(set(range(COUNT)))
            os.kill(process, how)
            [lost] = until(tree.leader.take_lost_nodes)
            assert lost.member.node == 1
            left = set(range(COUNT)) - {1}
            until(lambda: set(get_server(tree.leader).nodes) == left - {0})
            tree.wait_until_all_know(left)
            tree.exchange_numbers(left)
        finally:
            for number in list(tree.nodes):
                tree.kill(number)


def test_the_next_leader_has_all_nodes_and_hears_what_was_reported() -> None:
    with open_tree() as tree:
        tree.leader.announce_round(0, Round(3, tuple(range(COUNT))))
        until(lambda: all(n.find_round(0) for n in tree.nodes.values()))
        leaf = tree.find_leaf()
        tree.nodes[leaf].report_done(0, 0)
        for number in (0, 1):
            tree.kill(number)
            tree.leader = tree.nodes[number + 1]
            left = set(range(number + 1, COUNT))
            tree.wait_until_all_know(left, leader=number + 1)
            assert [n.member.node for n in until(tree.leader.take_lost_nodes)] == [number]
            until(lambda: not any(n.is_electing for n in tree.nodes.values()))
            assert tree.leader._done == {0: {leaf: 0}}
            assert tree.leader.find_round(0) == Round(3, tuple(range(COUNT)))
            tree.settle(len(left))
            tree.exchange_numbers(left)


@pytest.mark.slow
def test_the_leader_and_a_relay_are_lost_at_once() -> None:
    with open_tree() as tree:
        relay = tree.find_relay()
        tree.kill(0)
        tree.kill(relay)
        left = set(tree.nodes)
        tree.leader = tree.nodes[min(left)]
        tree.wait_until_all_know(left, leader=min(left))
        tree.exchange_numbers(left)


def test_a_leaf_leads_if_it_has_the_lowest_number() -> None:
    with open_tree(range(2, COUNT), [1]) as tree:
        assert 1 not in tree.find_parents().values()
        tree.kill(0)
        tree.leader = tree.nodes[1]
        tree.wait_until_all_know(set(range(1, COUNT)), leader=1)
        tree.settle(COUNT - 1)
        tree.exchange_numbers(set(range(1, COUNT)))


def test_a_node_that_missed_a_change_is_told_all() -> None:
    with open_tree() as tree:
        behind = tree.nodes[tree.find_leaf()]
        behind.membership = Membership(-1, -1)
        tree.kill(min(n for n in tree.nodes if n not in (0, behind.own.node)))
        tree.wait_until_all_know(set(tree.nodes))


def test_strangers_are_not_heard_by_a_relay() -> None:
    with open_tree() as tree:
        relay = tree.nodes[tree.find_relay()]
        host, _, port = relay.own.lifeline.rpartition(":")
        with pytest.raises(EchelonError, match="has another key"):
            connect_channel(host, int(port), b"guessed", LIMIT_S)
        tree.exchange_numbers(set(tree.nodes))


def test_all_leave_over_their_relays_and_nobody_is_missed() -> None:
    with open_tree() as tree:
        parents = tree.find_parents()
        leaves = [n for n in parents if n not in parents.values()]
        for number in leaves:
            tree.nodes[number].leave()
        until(lambda: not set(leaves) & set(tree.leader.membership.members))
        assert tree.leader.take_lost_nodes() == []
        assert tree.leader.find_failure(0) is None


def test_messages_that_go_up_together_keep_their_order_and_the_newest_heartbeat() -> None:
    queue = RelayQueue()
    for message in ({"heartbeats": 1}, {"lost": 1}, {"heartbeats": 2}, {"lost": 2}):
        queue.put(7, message)
    queue.put(8, {"heartbeats": 3})
    items = [(7, {"lost": 1}), (7, {"heartbeats": 2}), (7, {"lost": 2}), (8, {"heartbeats": 3})]
    assert queue.take() == [{"tree": "relayed", "items": items}]
    assert queue.take() == []


def test_the_highest_nodes_of_the_smallest_subtrees_are_sent_on_to_the_next() -> None:
    assert choose_moves({1: 1, 2: 1, 3: 1}, [1, 2, 3], 3) == {}
    assert choose_moves({1: 1, 2: 4, 3: 1, 9: 7, 5: 1}, [1, 2, 3, 9, 5], 3) == {5: 1, 3: 1}
    assert choose_moves({1: 1, 2: 1, 3: 1, 4: 1}, [3], 2) == {3: 1}
    assert choose_moves({1: 9, 2: 7, 3: 2, 4: 2}, [1, 2, 3, 4], 3) == {4: 3}


def test_a_change_makes_the_next_membership_of_the_one_before_alone() -> None:
    before = Membership(4, 0, {n: Member(n, f"host {n}") for n in range(4)}, True)
    after = before.remove(2).add(Member(7, "new", slots=(2,)))
    change = after.to_change(before)
    assert before.apply_change(change) == after
    assert after.apply_change(change) is None
