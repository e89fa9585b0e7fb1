"""How soon thousands of agents know the next group, over the real lifelines of one machine.

    python benchmarks/many_agents.py [--agents 4096] [--rounds 3] [--processes 3]

Every agent is a `Lifeline` with its own listener and connections, real handshakes and messages:
heartbeats every second, acceptances, memberships, rounds of one rank per agent. Those that are to
be lost are processes of their own, killed with SIGKILL; the others share a few processes. A leaf,
a relay or the leader is killed, and the time runs until a quorum has accepted the membership
without it, and every agent that lives knows it and the round that follows.

All agents share the cores of this machine: what 4,096 machines do at once is done one after the
other here, and is most of the time. So `silence_s` is long; killed processes are missed at once.
The agents of a process share the first membership in memory; each reads its message, and each
applies the changes that follow to a copy of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from common import Result, make_figure
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.lifeline_relay import is_heartbeat
from echelon.launch.node.lifeline_sockets import LeaderConnection, NodeServer
from echelon.launch.node.membership import Member, Membership
from echelon.launch.node.message_channel import Message
from echelon.world.rounds import Round

AGENTS = 4096
PROCESSES = 3
ROUNDS = 3
AT_MOST_S = 5.0
KEY = b"the key of a simulated job"
SILENCE_S = 300.0
LIMIT_S = 600.0
TICK_S = 0.02
"""An agent looks at losses so often."""


def measure(rounds: int = ROUNDS, agents: int = AGENTS, processes: int = PROCESSES) -> Result:
    leaders = list(range(rounds))
    relays = list(range(rounds + 1, 2 * rounds + 1))
    leaves = list(range(agents - rounds, agents))
    alone = [*leaders, rounds, *relays, *leaves]
    others = [n for n in range(agents) if n not in alone]
    shares = [[n] for n in alone] + [others[i::processes] for i in range(processes)]
    with start_processes(agents, shares) as world:
        joined_s, told_s = world.join()
        steady = world.count_connections()
        lost = {
            "a leaf": [world.kill(node) for node in leaves],
            "a relay": [world.kill(node) for node in relays],
            "the leader": [world.kill(node) for node in leaders],
        }
        return make_result(agents, processes, joined_s, told_s, steady, lost)


class Change(NamedTuple):
    """What the loss of one agent came to."""

    seconds: float
    messages: int
    """At the agent that got the most, without heartbeats."""
    connections: int
    """At the agent that has the most."""
    cpu_s: float
    """Of all agents together, their heartbeats among it."""


def make_result(
    agents: int,
    processes: int,
    joined_s: float,
    told_s: float,
    connections: int,
    lost: dict[str, list[Change]],
) -> Result:
    times = {
        what: make_figure(
            f"{what} of {agents:,} agents lost: all others know the new group",
            [change.seconds for change in changes],
            AT_MOST_S,
            "s",
        )
        for what, changes in lost.items()
    }
    counts = [
        make_figure(
            f"{what} lost: messages at the busiest agent, without heartbeats",
            [float(change.messages) for change in changes],
            unit="messages",
        )
        for what, changes in lost.items()
    ]
    counts += [
        make_figure(
            f"{what} lost: processor time of all agents together",
            [change.cpu_s for change in changes],
            unit="s",
        )
        for what, changes in lost.items()
    ]
    most = max([connections, *(c.connections for changes in lost.values() for c in changes)])
    return {
        "config": {
            "agents": agents,
            "processes": processes,
            "silence_s": SILENCE_S,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "load": os.getloadavg()[0],
            "note": f"All {agents:,} agents run on this one machine. 1-minute load average at the "
            f"end: {os.getloadavg()[0]:.1f}, which has the agents in it and whatever else ran.",
        },
        "figures": [
            *times.values(),
            *counts,
            make_figure("connections at the busiest agent", [float(most)], unit="connections"),
            make_figure(f"{agents:,} agents join", [joined_s], unit="s"),
            make_figure("each has read the first membership, all nodes", [told_s], unit="s"),
        ],
        "seconds": times,
    }


# --- the parent ---


class SimulatedWorld:
    """Processes that are agents, and pipes to them."""

    def __init__(self, agents: int, shares: list[list[int]], context: Any) -> None:
        self._agents = set(range(agents))
        self._pipes: dict[int, Connection] = {}
        """The first node of a process → the pipe to it."""
        self._processes: dict[int, Any] = {}
        self._leader = 0
        for nodes in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=be_agents, args=(theirs, nodes, agents), daemon=True)
            process.start()
            self._pipes[nodes[0]], self._processes[nodes[0]] = ours, process

    def join(self) -> tuple[float, float]:
        """Have all agents join; returns the seconds until all have, and from then until each has
        read who they are."""
        address = self._ask(0, "address")
        began = time.monotonic()
        for node, pipe in self._pipes.items():
            if node:
                pipe.send(("join", address))
        for node, pipe in self._pipes.items():
            if node:
                receive(pipe)
        joined = self._ask(0, "joined")
        self._ask(0, "survive")
        return joined - began, self._wait_for_all()[0] - joined

    def kill(self, node: int) -> Change:
        """Kill the only agent of a process, and wait until all others know."""
        time.sleep(2.0)  # the agents that lost a parent have another one
        self._ask_all("reset")
        began = time.monotonic()
        os.kill(self._processes.pop(node).pid, signal.SIGKILL)
        del self._pipes[node]
        self._agents.discard(node)
        self._leader = min(self._agents)
        ended, messages, cpu_s = self._wait_for_all()
        return Change(ended - began, messages, self.count_connections(), cpu_s)

    def count_connections(self) -> int:
        time.sleep(2.0)
        return max(self._ask_all("connections"))

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _wait_for_all(self) -> tuple[float, int, float]:
        answers = self._ask_all("wait", len(self._agents), self._leader)
        ends, messages, cpu_s = zip(*answers, strict=True)
        return max(ends), max(messages), sum(cpu_s)

    def _ask(self, node: int, *words: Any) -> Any:
        self._pipes[node].send(words)
        return receive(self._pipes[node])

    def _ask_all(self, *words: Any) -> list[Any]:
        for pipe in self._pipes.values():
            pipe.send(words)
        return [receive(pipe) for pipe in self._pipes.values()]


@contextlib.contextmanager
def start_processes(agents: int, shares: list[list[int]]) -> Iterator[SimulatedWorld]:
    world = SimulatedWorld(agents, shares, multiprocessing.get_context("fork"))
    try:
        yield world
    finally:
        world.close()


def receive(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"the agents have not answered within {LIMIT_S:g} s")
    return pipe.recv()


# --- the agents of one process ---


def be_agents(pipe: Connection, nodes: list[int], count: int) -> None:
    """Be these agents, until killed."""
    share_memberships()
    count_messages()
    agents = [make_agent(node) for node in nodes]
    leader = agents[0]
    if nodes[0] == 0:
        leader.open_as_leader("127.0.0.1", "127.0.0.1", KEY, count)
    if len(nodes) == 1:
        threading.Thread(target=decide_rounds, args=(leader, count), daemon=True).start()
    began_cpu_s = 0.0
    while True:
        command, *words = pipe.recv()
        if command == "address":
            pipe.send(leader.own.lifeline)
        elif command == "join":
            for agent in agents:
                agent.open_as_follower(words[0], KEY, count, print)
            pipe.send(True)
        elif command == "joined":
            wait_until(lambda: len(leader.membership.members) == count)
            pipe.send(time.monotonic())
        elif command == "survive":
            leader.set_can_lose_nodes(True)
            pipe.send(True)
        elif command == "reset":
            received.clear()
            began_cpu_s = time.process_time()
            pipe.send(True)
        elif command == "connections":
            pipe.send(max(a._server.peer_count + (a._leader is not None) for a in agents))  # type: ignore[union-attr]
        elif command == "wait":
            ended, messages = wait_for_group(agents, *words)
            pipe.send((ended, messages, time.process_time() - began_cpu_s))


def make_agent(node: int) -> Lifeline:
    return Lifeline(Member(node, f"node-{node}", place=node, slots=(node,)), SILENCE_S)


def decide_rounds(agent: Lifeline, count: int) -> None:
    """Do what a leading agent does after a loss: announce a round of the others."""
    number = 0
    while True:
        if agent.is_leader and agent.take_lost_nodes():
            known = agent.find_round(0)
            number = known.number + 1 if known else 1
            agent.announce_round(0, Round(number, tuple(agent.membership.members), False, "lost"))
        time.sleep(TICK_S)


def wait_for_group(agents: list[Lifeline], count: int, leader: int) -> tuple[float, int]:
    """Wait until all agents know the group of so many nodes and its round; returns when, and how
    many messages the busiest of them has got."""
    waiting = list(agents)

    def knows(agent: Lifeline) -> bool:
        known, round_ = agent.committed, agent.find_round(0)
        is_round = round_ is None if known.lost_hosts == () else round_ is not None
        is_newest = round_ is None or len(round_.slots) == count
        return known.leader == leader and len(known.members) == count and is_round and is_newest

    def all_know() -> bool:
        while waiting and knows(waiting[-1]):
            waiting.pop()
        return not waiting

    wait_until(all_know)
    return time.monotonic(), max(received.values(), default=0)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the agents have not agreed in time")
        time.sleep(TICK_S)


received: dict[int, int] = {}
"""Server of an agent → the messages that it has got, without heartbeats and answers to them."""


def count_messages() -> None:
    """Count the messages of every agent of this process."""
    from_children, from_parent = NodeServer._handle_message, LeaderConnection._handle_message

    def count(server: NodeServer) -> None:
        received[server.port] = received.get(server.port, 0) + 1

    def handle_from_child(self: NodeServer, peer: Any, message: Message) -> None:
        items = message["items"] if message.get("tree") == "relayed" else [(0, message)]
        if not all(is_heartbeat(item) for _, item in items):
            count(self)
        from_children(self, peer, message)

    def handle_from_parent(self: LeaderConnection, server: NodeServer, message: Message) -> None:
        if "alive" not in message:
            count(server)
        from_parent(self, server, message)

    NodeServer._handle_message = handle_from_child  # type: ignore[method-assign]
    LeaderConnection._handle_message = handle_from_parent  # type: ignore[method-assign]


def share_memberships() -> None:
    """Keep one value of equal memberships: 4,096 agents have 16 million members in theirs."""
    make = Membership.from_fields
    made: dict[tuple[int, int], Membership] = {}

    def from_fields(fields: Any) -> Membership:
        if not fields["members"]:
            return make(fields)
        which = (fields["epoch"], fields["leader"])
        if which not in made:
            made[which] = make(fields)
        return made[which]

    Membership.from_fields = from_fields  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    result = measure(given.rounds, given.agents, given.processes)
    for row in result["figures"]:
        print(f"{row['what']:<76}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
