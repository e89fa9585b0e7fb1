"""How soon thousands of agents know the next round, over the real lifeline of one machine.

    python benchmarks/many_agents.py [--agents 4096] [--processes 4] [--rounds 5]

Node 0's end is the one of a run. The other agents are real connections with the real handshake and
messages: heartbeats every second, the loss of a rank, the round that follows. They share a few
processes, each of which reads all of its connections in one thread. One rank per agent.

The lifeline is a star: node 0 sends a round to every agent, so its work grows with their number.
It needs as many open files as agents (`ulimit -n`). The simulated agents share this machine's cores
with node 0, and their parsing counts in the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection

from echelon.launch.node.lifeline import LifelineServer
from echelon.launch.node.message_channel import MessageChannel, connect_channel
from echelon.runs.failure import Failure
from echelon.world.rounds import Round

KEY = b"the key of a simulated job"
JOIN_LIMIT_S = 300.0
TICK_S = 0.05
"""Node 0's agent looks at losses so often."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(given.processes)]
    others = range(1, given.agents)
    simulated = [
        context.Process(target=simulate_agents, args=(theirs, others[i :: given.processes]))
        for i, (_, theirs) in enumerate(pipes)
    ]
    for process in simulated:
        process.start()
    try:
        measure(given.agents, given.rounds, [ours for ours, _ in pipes])
    finally:
        for process in simulated:
            process.kill()


def measure(agents: int, rounds: int, pipes: list[Connection]) -> None:
    """Print the figures."""
    server = CountingServer("127.0.0.1", agents, KEY)
    began = time.monotonic()
    for pipe in pipes:
        pipe.send(server.port)
    while len(server._peers) < agents - 1:
        if time.monotonic() - began > JOIN_LIMIT_S:
            raise TimeoutError(f"only {len(server._peers)} agents have joined")
        time.sleep(TICK_S)
    print(f"{agents} agents have joined: {time.monotonic() - began:.2f} s")
    threading.Thread(target=decide_rounds, args=(server, agents), daemon=True).start()
    seconds, at_others = [], []
    for number in range(1, rounds + 1):
        time.sleep(2.0)
        began, handled, sent = time.monotonic(), server.handled, server.sent_to_all
        pipes[0].send(number)
        ends = [pipe.recv() for pipe in pipes]
        seconds.append(max(end for end, _ in ends) - began)
        at_others.append(max(messages for _, messages in ends))
        rate = (server.handled - handled) / (time.monotonic() - began)
        print(f"loss → every agent knows the round: {seconds[-1]:.3f} s", end="; ")
        print(f"node 0 took {rate:.0f} messages a second", end=" ")
        print(
            f"and sent {server.sent_to_all - sent} of the round; the busiest other agent", end=" "
        )
        print(f"got {at_others[-1]}, answers to heartbeats among them")
    print(f"median {statistics.median(seconds):.3f} s, largest {max(seconds):.3f} s")


class CountingServer(LifelineServer):
    """Node 0's end, which counts the messages that it takes, and those that it sends to all."""

    handled = 0
    sent_to_all = 0

    def _handle_message(self, peer, message) -> None:  # type: ignore[no-untyped-def]
        self.handled += 1
        super()._handle_message(peer, message)

    def _send_to_all(self, message) -> None:  # type: ignore[no-untyped-def]
        self.sent_to_all += len(self._peers)
        super()._send_to_all(message)


def decide_rounds(server: LifelineServer, agents: int) -> None:
    """Do what node 0's agent does after a loss: announce a round of the others."""
    number = 0
    while True:
        for loss in server.take_losses(0):
            number += 1
            slots = tuple(slot for slot in range(agents) if slot not in loss.slots)
            server.announce_round(0, Round(number, slots, False, "lost a rank"))
        time.sleep(TICK_S)


# --- the other agents ---


def simulate_agents(pipe: Connection, nodes: range) -> None:
    """Be these nodes, until killed."""
    port = pipe.recv()
    selector = selectors.DefaultSelector()
    channels = []
    for node in nodes:
        channel = connect_channel("127.0.0.1", port, KEY, JOIN_LIMIT_S)
        channel.send({"node": node, "host": f"node-{node}"})
        channels.append(channel)
        selector.register(channel.connection, selectors.EVENT_READ, channel)
    beats = _send_heartbeats(channels, nodes)
    informed: set[MessageChannel] = set()
    received: Counter[MessageChannel] = Counter()  # since the last round
    while True:
        next(beats)
        if pipe.poll():
            number = pipe.recv()
            failure = Failure(nodes[0], "here", number, "killed by SIGKILL", "")
            message = {"lost": [nodes[0]], "cause": asdict(failure), "attempt": 0}
            channels[0].send(message)
        for selected, _ in selector.select(0.005):
            for message in selected.data.receive():
                received[selected.data] += 1
                if "round" in message:
                    informed.add(selected.data)
        if len(informed) == len(channels):
            informed.clear()
            pipe.send((time.monotonic(), max(received.values())))
            received.clear()


def _send_heartbeats(channels: list[MessageChannel], nodes: range) -> Iterator[None]:
    """Send the heartbeats of all agents, spread over a second as those of real ones are."""
    period_s, due = 1.0, time.monotonic()
    position = 0
    while True:
        while time.monotonic() > due:
            node = nodes[position % len(nodes)]
            sign = {"rank": node, "beats": 9, "step": 9, "begun": True, "still": 0.1}
            signs = [sign | {"stopped": False}]
            channels[position % len(channels)].send({"signs": signs, "attempt": 0})
            position += 1
            due = max(due + period_s / len(channels), time.monotonic() - period_s)
        yield


if __name__ == "__main__":
    main()
