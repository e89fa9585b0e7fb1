"""Shards of a state go to the memory of another rank, in the background of the training.

Every rank has one connection to the rank that keeps its shards, and one from the rank whose shards
it keeps, its partner. Two threads use them. The connections are those of one round,
and end with its process group. Both ends prove that they have the key of the job; the bytes of the
tensors have no checksum of their own, as those of gradients have none.

    sender:    {"name": …, "info": …, "layout": …, "size": …}
    receiver:  {"ready": true}        it has memory for so many bytes
    sender:    the bytes of all tensors
    receiver:  {"kept": true}
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from echelon.errors import EchelonError
from echelon.launch.node.message_channel import (
    ChannelClosed,
    ChannelListener,
    MessageChannel,
    connect_channel,
)
from echelon.parallel.process_group import RankGroup
from echelon.snapshot.memory_snapshot import FlatSnapshot
from echelon.snapshot.staging_buffer import StagingBuffer, allocate_memory
from echelon.world.network_key import derive_key, read_key

_MEET_TIMEOUT_S = 300.0
_CONNECT_LIMIT_S = 120.0
_ATTEMPT_LIMIT_S = 10.0
_POLL_S = 0.1
_CHUNK_BYTES = 8 << 20
_ROUND_OVER = "the round is over"


class ShardName(NamedTuple):
    """Which shard of which state: that of rank `rank` of `ranks`, or all of it as 0 of 1."""

    step: int
    samples: int
    ranks: int
    rank: int


@dataclass
class ShardSlot:
    """The shards of one step on one rank, and the memory they are in, which is used again."""

    shards: dict[ShardName, FlatSnapshot] = field(default_factory=dict)
    staging_buffer: StagingBuffer = field(default_factory=StagingBuffer)
    _received: mmap.mmap | None = None

    @property
    def newest_step(self) -> int:
        """The step of its shards; -1: it has none."""
        return max((name.step for name in self.shards), default=-1)

    def allocate_received(self, size: int) -> memoryview:
        """Return memory for the shard of the partner."""
        if self._received is None or len(self._received) < size:
            self._received = None
            self._received = allocate_memory(max(size, 1))
        return memoryview(self._received)[:size]


class _Transfer(NamedTuple):
    """A shard of this rank to be sent, and where that of its partner is to be kept."""

    name: ShardName
    slot: ShardSlot


class ShardExchange:
    """The exchange of shards among the ranks of one round, as one of them sees it.

    One exchange is under way at a time. When one has failed there are no more in this round:
    `problem` says why.
    """

    def __init__(self, group: RankGroup) -> None:
        """All ranks take part, in the store. The connections are made in the background."""
        world = group.world
        self.problem = ""
        self.last_processor_s = 0.0
        """The time of processors that the last exchange took on this rank."""
        self.processor_s = 0.0
        """That of all of them."""
        self._rank = world.rank
        # Without a key, nothing else of this job has one either.
        self._key = derive_key(read_key(os.environ) or "", "copies of the state")
        host = (world.master or "").rpartition(":")[0].strip("[]")
        from echelon.launch.network_interface import find_address_towards  # psutil, seldom needed

        address = find_address_towards(host) or "127.0.0.1"
        self._listener = ChannelListener(address, self._key, world.nodes)
        own = json.dumps([str(world.node_rank), address, self._listener.port])
        try:
            found = group.exchange("ready for copies", own, _MEET_TIMEOUT_S)
        except BaseException:
            self._listener.close()
            raise
        places = [json.loads(text) for text in found]
        nodes = [node for node, *_ in places]
        shift = choose_partner_shift(nodes)
        self.is_node_spared = len(set(nodes)) == 1 or not _count_own_node(nodes, shift)
        """Whether the others have all shards when the ranks of one node leave."""
        self.partner = (world.rank - shift) % world.size
        self._keeper = (world.rank + shift) % world.size
        _, *self._keeper_address = places[self._keeper]
        self._changed = threading.Condition()
        self._is_closed = False
        self._unfinished = 0
        """Directions of the current exchange that are not over."""
        self._working = 0
        """Threads that read or write the memory of a slot."""
        self._channels: list[MessageChannel] = []
        self._outgoing: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._incoming: SimpleQueue[_Transfer | None] = SimpleQueue()
        for direction in (self._send_shards, self._receive_shards):
            thread = threading.Thread(target=self._run, args=(direction,), name="copies")
            thread.daemon = True
            thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._unfinished > 0 and not self.problem

    def begin(self, name: ShardName, slot: ShardSlot) -> None:
        """Begin to send this rank's shard in a slot, and to receive that of its partner into it."""
        self._unfinished, self.last_processor_s = 2, 0.0
        self._outgoing.put(_Transfer(name, slot))
        self._incoming.put(_Transfer(name._replace(rank=self.partner), slot))

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until no exchange is under way, and call `beat` meanwhile."""
        with self._changed:
            while self.is_busy:
                beat()
                self._changed.wait(_POLL_S)

    def give_up(self, problem: str) -> None:
        """End the exchanges of this round, here and with the ranks that this one is connected to.
        From then on no memory of a slot is read or written."""
        with self._changed:
            self._is_closed = True
            self.problem = self.problem or problem
            for channel in self._channels:  # their threads close them
                with contextlib.suppress(OSError):
                    channel.connection.shutdown(socket.SHUT_RDWR)
            self._outgoing.put(None)
            self._incoming.put(None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._working)

    # --- the threads ---

    def _run(self, direction: Callable[[], None]) -> None:
        try:
            direction()
        except Exception as error:  # whatever it is, nobody must wait for this thread
            with self._changed:
                self.problem = self.problem or str(error) or type(error).__name__
                self._changed.notify_all()

    def _send_shards(self) -> None:
        with contextlib.closing(self._connect_to_keeper()) as channel:
            self._add_channel(channel)
            channel.send({"rank": self._rank})
            _expect(channel, "ready")
            while (todo := self._outgoing.get()) is not None:
                with self._count_work():
                    self._send(channel, todo)

    def _receive_shards(self) -> None:
        with contextlib.closing(self._accept_partner()) as channel:
            self._add_channel(channel)
            channel.send({"ready": True})
            while (todo := self._incoming.get()) is not None:
                with self._count_work():
                    self._receive(channel, todo)

    def _add_channel(self, channel: MessageChannel) -> None:
        """Let a connection end with the round."""
        channel.connection.settimeout(None)
        with self._changed:
            if self._is_closed:
                raise ChannelClosed(_ROUND_OVER)
            self._channels.append(channel)
            RankGroup.add_connection(channel.connection.fileno())

    @contextlib.contextmanager
    def _count_work(self) -> Iterator[None]:
        """Let others know that the memory of a slot is in use, and then what that has taken."""
        with self._changed:
            if self._is_closed:
                raise ChannelClosed(_ROUND_OVER)
            self._working += 1
        begun_s = time.thread_time()
        try:
            yield
            with self._changed:
                self._unfinished -= 1
        finally:
            with self._changed:
                self._working -= 1
                self.last_processor_s += time.thread_time() - begun_s
                self.processor_s += time.thread_time() - begun_s
                self._changed.notify_all()

    def _connect_to_keeper(self) -> MessageChannel:
        host, port = self._keeper_address
        deadline = time.monotonic() + _CONNECT_LIMIT_S
        while True:
            try:
                return connect_channel(host, port, self._key, _ATTEMPT_LIMIT_S)
            except EchelonError:
                if self._is_closed or time.monotonic() > deadline:
                    text = f"rank {self._keeper} did not answer at {host}:{port}"
                    raise ChannelClosed(text) from None

    def _accept_partner(self) -> MessageChannel:
        deadline = time.monotonic() + _CONNECT_LIMIT_S
        with contextlib.closing(self._listener) as listener:
            while not self._is_closed and time.monotonic() < deadline:
                for channel, messages, _ in listener.poll(_POLL_S):
                    if any(message.get("rank") == self.partner for message in messages):
                        listener.release_channel(channel)
                        return channel
        raise ChannelClosed(f"rank {self.partner} did not connect")

    def _send(self, channel: MessageChannel, todo: _Transfer) -> None:
        shard = todo.slot.shards[todo.name]
        size = len(shard.memory)
        head = {"name": todo.name, "info": shard.info, "layout": shard.layout, "size": size}
        channel.send(head)
        _expect(channel, "ready")
        sent = 0
        while sent < size:
            sent += channel.connection.send(shard.memory[sent : sent + _CHUNK_BYTES])
        _expect(channel, "kept")

    def _receive(self, channel: MessageChannel, todo: _Transfer) -> None:
        head = _receive_message(channel)
        if ShardName(*head["name"]) != todo.name:
            raise ChannelClosed(f"rank {self.partner} sent {head['name']} and not {todo.name}")
        memory = todo.slot.allocate_received(head["size"])
        channel.send({"ready": True})
        received = 0
        while received < len(memory):
            rest = memory[received : received + _CHUNK_BYTES]
            count = channel.connection.recv_into(rest, 0, socket.MSG_WAITALL)
            if not count:
                raise ChannelClosed(f"rank {self.partner} has gone")
            received += count
        todo.slot.shards[todo.name] = FlatSnapshot(head["info"], head["layout"], memory)
        channel.send({"kept": True})


def choose_partner_shift(nodes: list[str]) -> int:
    """Return how many ranks further a rank's shards are kept, given the node of every rank: so that
    as few as possible are kept on their own node."""
    return min(range(1, len(nodes)), key=lambda shift: _count_own_node(nodes, shift), default=0)


def _count_own_node(nodes: list[str], shift: int) -> int:
    """Return how many ranks' shards are kept on their own node."""
    return sum(node == nodes[(rank + shift) % len(nodes)] for rank, node in enumerate(nodes))


def _receive_message(channel: MessageChannel) -> dict[str, Any]:
    """Return the next message. The other end sends nothing more before it has an answer."""
    while not (messages := channel.receive()):
        pass
    return messages[0]


def _expect(channel: MessageChannel, answer: str) -> None:
    if not _receive_message(channel).get(answer):
        raise ChannelClosed(f"the other rank did not answer that it is {answer}")
