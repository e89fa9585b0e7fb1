"""Garbage, truncated, repeated, reordered, huge and slow messages at every port of a job."""

from __future__ import annotations

import functools
import os
import random
import resource
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from channel_agent import KEY, LIMIT_S, Agent, Recorder, ask, connect, read_to_the_end
from command_runner import ECHELON, HERE, curve, ended, free_port, run, until
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import start_forked, started_forked

from echelon.errors import ExitCode
from echelon.launch.node.message_channel import connect_channel

MAX_REFUSALS = 10
COMPARED = 30
"""So many lines of metrics, of ten steps each."""
STORE_HELLO = b"\x00" + struct.pack("=I", 0x3C85F7CE)


# --- one listener, and whatever hypothesis finds ---


@functools.cache
def start_agent() -> Agent:
    """One for all examples, as an agent has strangers one after the other."""
    return Agent()


@functools.cache
def record_connection() -> bytes:
    """Return what an agent has sent that has the key: its proof and three messages."""
    recorder = Recorder(start_agent().port)
    channel = connect_channel("127.0.0.1", recorder.port, KEY, LIMIT_S)
    for number in range(3):
        ask(channel, {"recorded": number})
    channel.close()
    return recorder.sent


def reorder(sent: bytes, order: random.Random) -> bytes:
    lines = sent.splitlines(keepends=True)
    order.shuffle(lines)
    return b"".join(lines)


recordings = st.builds(record_connection)
thrown = st.one_of(
    st.binary(max_size=2000),
    st.binary(max_size=300).map(lambda data: data + b"\n"),
    st.builds(lambda sent, end: sent[:end], recordings, st.integers(0, 800)),
    st.builds(lambda sent, times: sent * times, recordings, st.integers(1, 3)),
    st.builds(reorder, recordings, st.randoms(use_true_random=False)),
    st.integers(300, 1 << 22).map(lambda size: b"x" * size),
)


@given(st.lists(st.tuples(thrown, st.integers(1, 3)), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40)
def test_nothing_that_a_stranger_sends_harms_an_agent(sent: list[tuple[bytes, int]]) -> None:
    agent = start_agent()
    record_connection()
    agent.came.clear()
    friend = connect_channel("127.0.0.1", agent.port, KEY, LIMIT_S)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, pieces in sent:
        with connect(agent) as stranger, suppress(OSError):
            size = len(data) // pieces + 1
            for begin in range(0, len(data), size):
                stranger.sendall(data[begin : begin + size])
            stranger.shutdown(socket.SHUT_WR)
            assert read_to_the_end(stranger)[65:] in (b"", b"refused\n"), "after its nonce"
    assert ask(friend, {"a": 1}) == [{"a": 1}]
    friend.close()
    assert agent.came == [{"a": 1}]
    assert not [end for end in agent.ended if end != "closed its connection"]
    assert len(agent.listener._strangers) <= agent.listener.max_strangers
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


# --- every port of a real job ---


def make_throws(chance: random.Random) -> list[bytes]:
    """Return what is sent to each port, by somebody who knows all protocols."""
    length = struct.pack("=Q", 1 << 40)
    return [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        *(chance.randbytes(size) for size in (1, 7, 8, 9, 64, 5000)),
        chance.randbytes(4 << 20),
        b"0" * 64 + b" " + b"0" * 64 + b"\n" + b'{"failure": 1}\n',
        STORE_HELLO,
        STORE_HELLO + chance.randbytes(200),
        *(STORE_HELLO + bytes([command]) + length + b"x" * 100 for command in range(20)),
        *(STORE_HELLO + bytes([command]) + struct.pack("=Q", 1) for command in range(20)),
    ]


def throw(address: tuple[str, int], data: bytes) -> None:
    with suppress(OSError), socket.create_connection(address, timeout=0.2) as connection:
        connection.settimeout(0.05)
        connection.sendall(data)
        connection.recv(4096)


def list_listeners(pids: list[int]) -> dict[tuple[str, int], psutil.Process]:
    """Return the addresses at which these processes listen."""
    found = {}
    for process in map(psutil.Process, pids):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip, connection.laddr.port] = process
    return found


def hold(addresses: Iterable[tuple[str, int]], count: int) -> None:
    """Open so many connections to each, and say nothing more; then close all."""
    with ExitStack() as held:
        for address in addresses:
            for _ in range(count):
                with suppress(OSError):
                    connection = socket.create_connection(address, timeout=0.05)
                    held.enter_context(connection).sendall(b"x")


def wait_for_steps(folder: Path) -> None:
    """Wait for as much of a run as is compared."""
    until(lambda: len(curve(folder)) >= COMPARED, LIMIT_S, f"{COMPARED} lines of metrics")


@pytest.mark.slow
def test_a_job_bears_what_is_sent_to_any_of_its_ports(tmp_path: Path) -> None:
    """Two agents on this machine: store, lifeline, those that stand by, and gloo's of each rank."""
    words = (
        *ECHELON,
        "train",
        f"experiment={HERE / 'faulty_experiment.py'}:experiment",
        *("trainer.batch_size=8", "trainer.steps=1000000", "trainer.log_steps=10"),
        *("trainer.save.epochs=null", "trainer.evaluate.epochs=null", "launch.threads=1"),
    )
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    attacked = (*words, "launch=env", "launch.procs=1", "run.name=a", "pause_s=0.02")
    commands = [start_forked(attacked, tmp_path, NODE_RANK=str(n), **same) for n in range(2)]
    with ended(commands[0]), ended(commands[1]):
        metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size, LIMIT_S, "the first steps")
        pids = [pid for command in commands for pid in command.find_all()]
        listeners = list_listeners(pids)
        agents = {command.process.pid for command in commands}
        ports = sorted((process.pid in agents) for process in listeners.values())
        assert ports == [False] * 2 + [True] * 4, listeners
        before = {process: process.memory_info().rss for process in listeners.values()}
        chance = random.Random(os.environ.get("PYTEST_XDIST_WORKER", ""))
        for address in listeners:
            for data in make_throws(chance):
                throw(address, data)
        hold(listeners, 100)
        grown = {p.pid: p.memory_info().rss - rss for p, rss in before.items()}
        assert max(grown.values()) < 48 << 20, grown
        wait_for_steps(tmp_path / "runs" / "a")
        assert run((*ECHELON, "cancel", "a"), tmp_path).code == 0
        done = [command.wait(LIMIT_S) for command in commands]
    assert [each.code for each in done] == [ExitCode.PREEMPTED] * 2, done[0].err + done[1].err
    for each in done:
        lines = each.err.splitlines()
        refused = [line for line in lines if line.startswith("refused a connection from 127.")]
        assert 0 < len(refused) <= MAX_REFUSALS
        assert not [line for line in lines if "Error processing client message" in line]
        assert "Traceback" not in each.err
        assert "replaced" not in each.err
    alone = (*words, "launch=local", "launch.procs=2", "run.name=b")
    with started_forked(alone, tmp_path):
        wait_for_steps(tmp_path / "runs" / "b")
    disturbed, undisturbed = (curve(tmp_path / "runs" / name) for name in "ab")
    assert disturbed[:COMPARED] == undisturbed[:COMPARED]
