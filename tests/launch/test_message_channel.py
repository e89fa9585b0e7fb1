"""Connections between agents, beside strangers who do all they can without the key."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from channel_agent import (
    KEY,
    LIMIT_S,
    Agent,
    Recorder,
    ask,
    connect,
    read_to_the_end,
    until,
)

from echelon.errors import EchelonError
from echelon.launch.node import message_channel
from echelon.launch.node.message_channel import (
    ChannelClosed,
    MessageChannel,
    connect_channel,
)

NO_KEY = "does not have the key of this job"


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def friend(agent: Agent) -> Iterator[MessageChannel]:
    channel = connect_channel("127.0.0.1", agent.port, KEY, LIMIT_S)
    yield channel
    channel.close()


def wait_for_end(channel: MessageChannel) -> None:
    while True:
        channel.receive()


def test_messages_arrive_in_order_and_whole(agent: Agent, friend: MessageChannel) -> None:
    large = "x" * (4 << 20)
    assert ask(friend, {"a": 1}) == [{"a": 1}]
    assert ask(friend, {"large": large}) == [{"large": large}]
    for number in range(3):
        friend.send({"number": number})
    until(lambda: len(agent.came) == 5)
    assert agent.came[1:] == [{"large": large}, {"number": 0}, {"number": 1}, {"number": 2}]
    friend.close()
    assert until(lambda: agent.ended) == ["closed its connection"]


def test_another_key_is_known_at_once_on_both_sides(
    agent: Agent, friend: MessageChannel, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EchelonError, match=r"the agent at 127\.0\.0\.1:\d+ has another key"):
        connect_channel("127.0.0.1", agent.port, b"another", LIMIT_S)
    assert ask(friend, {"a": 1}) == [{"a": 1}]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"refused a connection from 127.0.0.1: it {NO_KEY}; if it is a node")


def test_nobody_there_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EchelonError, match=r"no agent answered at .* within 0\.2 s"):
        connect_channel("127.0.0.1", port, KEY, 0.2)


def test_an_agent_that_has_not_the_key_is_not_believed() -> None:
    """A stranger listens where the agent should, and repeats what he is sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"0" * 64 + b"\n")
                connection.sendall(connection.recv(1 << 16).split()[1] + b"\n")
                read_to_the_end(connection)

        stranger = threading.Thread(target=pretend, daemon=True)
        stranger.start()
        with pytest.raises(EchelonError, match="has another key"):
            connect_channel("127.0.0.1", listener.getsockname()[1], KEY, LIMIT_S)
        stranger.join()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent something that is not a message of ours"),
        (b'{"node": 1, "host": "here"}\n', "sent something that is not a message of ours"),
        (b"0" * 64 + b" " + b"0" * 64 + b"\n", NO_KEY),
        (b"\0\xff\n\n\n\n", "sent something that is not a message of ours"),
        (b"x" * 1000, "sent a message that is too large"),
        (b"", "closed its connection"),
    ],
)
def test_garbage_costs_one_line(
    sent: bytes,
    reason: str,
    agent: Agent,
    friend: MessageChannel,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with connect(agent) as stranger:
        stranger.sendall(sent)
        if not sent:
            stranger.shutdown(socket.SHUT_WR)
        read_to_the_end(stranger)
    assert ask(friend, {"a": 1}) == [{"a": 1}]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"refused a connection from 127.0.0.1: it {reason}")
    assert agent.came == [{"a": 1}]
    assert not agent.ended


def test_a_hundred_megabytes_without_an_end_are_not_kept(
    agent: Agent, friend: MessageChannel
) -> None:
    block = b"x" * (1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(agent) as stranger, suppress(ConnectionError):
        for _ in range(100):
            stranger.sendall(block)
    assert ask(friend, {"a": 1}) == [{"a": 1}]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 << 10  # KiB


def test_one_who_sends_slowly_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, agent: Agent, friend: MessageChannel
) -> None:
    with connect(agent) as stranger:
        stranger.sendall(b"0")
        monkeypatch.setattr(message_channel, "_HANDSHAKE_LIMIT_S", 0.2)
        with suppress(ConnectionError):
            for _ in range(60):
                stranger.sendall(b"0")
                time.sleep(0.01)
        read_to_the_end(stranger)
    assert ask(friend, {"a": 1}) == [{"a": 1}]


@pytest.mark.slow
def test_a_thousand_strangers_keep_no_agent_out(
    agent: Agent, friend: MessageChannel, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as held:
        for _ in range(1000):
            with suppress(ConnectionError):
                held.enter_context(connect(agent))
        late = connect_channel("127.0.0.1", agent.port, KEY, LIMIT_S)
        assert ask(late, {"late": True}) == [{"late": True}]
        assert ask(friend, {"a": 1}) == [{"a": 1}]
        assert len(agent.listener._strangers) <= 64 + 2 * 2
        late.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].endswith("; more are not reported")


def test_recorded_bytes_of_an_agent_are_worthless(agent: Agent) -> None:
    recorder = Recorder(agent.port)
    channel = connect_channel("127.0.0.1", recorder.port, KEY, LIMIT_S)
    ask(channel, {"failure": "mine"})
    assert KEY not in recorder.sent
    with connect(agent) as stranger:
        stranger.sendall(recorder.sent)
        answer = read_to_the_end(stranger)
    assert answer.endswith(b"\nrefused\n")
    assert agent.came == [{"failure": "mine"}]
    channel.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"stop 0", b"stop 1"),
        lambda data: data * 2 if b"stop" in data else data,
        lambda data: b"" if b"stop" in data else data,
    ],
    ids=["changed", "repeated", "left out"],
)
def test_nothing_on_the_way_can_be_changed_repeated_or_left_out(
    change: Callable[[bytes], bytes], agent: Agent
) -> None:
    recorder = Recorder(agent.port, change)
    channel = connect_channel("127.0.0.1", recorder.port, KEY, LIMIT_S)
    assert ask(channel, {"a": 1}) == [{"a": 1}]
    channel.send({"stop 0": True})
    until(lambda: b"stop 0" in recorder.sent)  # else two messages may be changed as one piece
    channel.send({"a": 2})
    assert until(lambda: agent.ended) == ["sent something that is not a message of ours"]
    assert {"stop 1": True} not in agent.came
    assert {"a": 2} not in agent.came
    assert agent.came.count({"stop 0": True}) <= 1
    with pytest.raises(ChannelClosed):
        wait_for_end(channel)


def test_a_message_that_nobody_would_take_is_not_sent(friend: MessageChannel) -> None:
    with pytest.raises(ValueError, match="too large"):
        friend.send({"large": "x" * message_channel.MAX_MESSAGE_BYTES})
    assert ask(friend, {"a": 1}) == [{"a": 1}]
