"""Connections between agents that only those who have the job's key can use.

Both ends prove that they have the key before anything is read as a message: each sends a nonce, and
the HMAC of both nonces with the key. A recording of a connection is worthless, since the nonces of
the next are others. After that every line is a message of JSON behind its HMAC, which covers its
number in the order of sending, so no message can be forged, repeated or left out. Nothing is
encrypted.

    listener:  <nonce>
    connector: <nonce> <proof>
    listener:  <proof>            or `refused`
    both:      <mac><json>
"""

from __future__ import annotations

import contextlib
import hmac
import json
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.os_errors import format_os_error_reason
from echelon.world.network_key import KEY_VARIABLE

MAX_MESSAGE_BYTES = 16 << 20
"""Of somebody who has the key."""
_MAX_HANDSHAKE_BYTES = 256
_HANDSHAKE_LIMIT_S = 10.0
_MAX_STRANGERS = 64
"""Connections without a proof that are held at a time, beside two for every node. A new one then
takes the place of the oldest: a real agent needs one round trip, whoever only waits does not."""
_MAX_REPORTED_STRANGERS = 10
_OTHER_FILES = 512
"""So many files an agent may have open beside its connections."""
_RETRY_INTERVAL_S = 0.1
_WAIT_LIMIT_S = 1.0
"""How long sending may take before the connection is given up, and how long `receive` waits."""
_MAX_UNSENT_BYTES = 64 << 20
"""A connection that takes nothing is given up with so much to be sent, or when it is silent."""
_FLUSH_INTERVAL_S = 0.005
_CLOSED = "closed its connection"
_NOT_OURS = "sent something that is not a message of ours"

Message = dict[str, Any]


class ChannelClosed(Exception):
    """A connection has ended. The text says how: `closed its connection`."""


class MessageChannel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, key: bytes, is_listener: bool) -> None:
        with contextlib.suppress(OSError):  # it may be closed already, which reading shows
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_WAIT_LIMIT_S)
        self.connection = connection
        self.opened = time.monotonic()
        self.is_authenticated = False
        self._key, self._is_listener = key, is_listener
        self._nonce = secrets.token_hex(32).encode()
        self._nonces = b""
        self._sent, self._received = 0, 0
        self._sending_key, self._receiving_key = b"", b""
        self._unread = bytearray()
        self._searched = 0
        """So many bytes of `_unread` have no end of a line."""
        self._lock = threading.Lock()
        self._call_later: Callable[[float, Callable[[], None]], None] | None = None
        self._unsent = bytearray()
        if is_listener:
            self._send_line(self._nonce)

    def send(self, message: Message) -> None:
        """Send one message. If that fails the connection is closed, and whoever reads from it
        notices."""
        self.send_encoded(encode_message(message))

    def send_encoded(self, body: bytes) -> None:
        """Send what `encode_message` returned. One message to thousands is encoded once."""
        with self._lock:  # the order of the numbers is that of the lines
            mac = _make_mac(self._sending_key, self._sent, body)
            self._sent += 1
            self._send_line(mac + body)

    def buffer_sending(self, call_later: Callable[[float, Callable[[], None]], None]) -> None:
        """Never wait for the network from now on: what it does not take at once is sent by and by,
        with the help of `call_later(delay_s, callback)`."""
        with self._lock:
            with contextlib.suppress(OSError):  # it is closed already
                self.connection.setblocking(False)
            self._call_later = call_later

    def receive(self) -> list[Message]:
        """Return the messages that have come within a second, which may be none. Raises
        ChannelClosed if the connection has ended or something else than a message came."""
        if self._unread.find(b"\n", self._searched) < 0:
            self._fill()
        messages = []
        while (line := self._take_line()) is not None:
            if self.is_authenticated:
                messages.append(self._open_message(line))
            else:
                self._continue_handshake(line)
        return messages

    def authenticate(self, deadline: float) -> None:
        """Wait until both ends have proved that they have the key. Raises ChannelClosed."""
        while not self.is_authenticated:
            if (line := self._take_line()) is not None:
                self._continue_handshake(line)
            elif time.monotonic() > deadline:
                raise ChannelClosed("did not answer in time")
            else:
                self._fill()

    def close(self) -> None:
        """Close the connection; a thread that reads from it notices."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _send_line(self, line: bytes) -> None:
        if self._call_later is not None:
            is_waiting = bool(self._unsent)
            self._unsent += line + b"\n"
            if not is_waiting:
                self._flush()
            return
        try:
            self.connection.sendall(line + b"\n")
        except OSError:
            self._give_up()

    def _flush(self) -> None:
        """Send what the network takes, and the rest a little later. The caller has the lock."""
        assert self._call_later is not None
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent[: 1 << 18])]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                self._give_up()
            else:
                self._call_later(_FLUSH_INTERVAL_S, self._continue_flushing)
        except OSError:
            self._give_up()

    def _continue_flushing(self) -> None:
        with self._lock:
            self._flush()

    def _give_up(self) -> None:
        """End the connection. Whoever reads from it notices."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _fill(self) -> None:
        """Read once from the connection."""
        try:
            data = self.connection.recv(1 << 16 if self.is_authenticated else _MAX_HANDSHAKE_BYTES)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            data = b""
        if not data:
            raise ChannelClosed(_CLOSED)
        self._unread += data

    def _take_line(self) -> bytes | None:
        """Return the next whole line, or None. A line that is too long is never waited for."""
        limit = MAX_MESSAGE_BYTES + 64 if self.is_authenticated else _MAX_HANDSHAKE_BYTES
        end = self._unread.find(b"\n", self._searched)
        if (len(self._unread) if end < 0 else end) > limit:
            self._unread.clear()
            raise ChannelClosed("sent a message that is too large")
        if end < 0:
            self._searched = len(self._unread)
            return None
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        self._searched = 0
        return line

    def _open_message(self, line: bytes) -> Message:
        mac, body = line[:64], line[64:]
        if not hmac.compare_digest(mac, _make_mac(self._receiving_key, self._received, body)):
            raise ChannelClosed(_NOT_OURS)
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChannelClosed(_NOT_OURS)
        return message

    def _continue_handshake(self, line: bytes) -> None:
        if self._is_listener:
            nonce, _, proof = line.partition(b" ")
            self._derive_keys(nonce)
            if not hmac.compare_digest(proof, self._prove(b"connector")):
                self._send_line(b"refused")
                raise ChannelClosed(
                    "does not have the key of this job; if it is a node of this job, give it the "
                    f"same {KEY_VARIABLE}, or start all nodes anew without one"
                )
            self._send_line(self._prove(b"listener"))
            self.is_authenticated = True
        elif not self._nonces:
            self._derive_keys(line)
            self._send_line(self._nonce + b" " + self._prove(b"connector"))
        else:
            if not hmac.compare_digest(line, self._prove(b"listener")):
                raise ChannelRefused("has another key")
            self.is_authenticated = True

    def _prove(self, role: bytes) -> bytes:
        return hmac.digest(self._key, b"prove " + role + self._nonces, "sha256").hex().encode()

    def _derive_keys(self, other_nonce: bytes) -> None:
        if len(other_nonce) != len(self._nonce):
            raise ChannelClosed(_NOT_OURS)
        both = (self._nonce, other_nonce) if self._is_listener else (other_nonce, self._nonce)
        self._nonces = b" ".join((b"", *both))
        keys = [
            hmac.digest(self._key, b"send " + role + self._nonces, "sha256")
            for role in (b"listener", b"connector")
        ]
        self._sending_key, self._receiving_key = keys if self._is_listener else keys[::-1]


class ChannelRefused(ChannelClosed):
    """The two ends have different keys."""


def connect_channel(
    host: str, port: int, key: bytes, timeout_s: float, must_listen: bool = False
) -> MessageChannel:
    """Return a connection to an agent that has the same key.

    It tries again until the time is over: where strangers crowd an agent it may drop a connection
    of ours. Raises an EchelonError; a different key is known at once. With `must_listen` it is also
    known at once that nobody listens there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
            channel = MessageChannel(connection, key, is_listener=False)
            try:
                channel.authenticate(deadline)
            except ChannelClosed:
                channel.close()
                raise
            return channel
        except ChannelRefused:
            raise EchelonError(
                Fault(
                    f"the agent at {host}:{port} has another key than {socket.gethostname()}",
                    f"set {KEY_VARIABLE} to the same value on every node, or on none",
                ),
                exit=ExitCode.RENDEZVOUS,
            ) from None
        except (OSError, ChannelClosed) as error:
            is_gone = must_listen and isinstance(error, ConnectionRefusedError)
            if is_gone or time.monotonic() + _RETRY_INTERVAL_S > deadline:
                is_ours = isinstance(error, ChannelClosed)
                reason = str(error) if is_ours else format_os_error_reason(error)
                raise EchelonError(
                    Fault(
                        f"no agent answered at {host}:{port} within {timeout_s:g} s ({reason})",
                        "check that a firewall lets the nodes of a job reach each other's ports",
                    ),
                    exit=ExitCode.RENDEZVOUS,
                ) from None
        time.sleep(_RETRY_INTERVAL_S)


class ChannelEvent(NamedTuple):
    """What has come from a connection that has proved to have the key."""

    channel: MessageChannel
    messages: list[Message]
    end: str = ""
    """How it has ended, if it has: `closed its connection`."""


class ChannelListener:
    """The connections that others open to this agent. One thread calls `poll`."""

    def __init__(self, address: str, key: bytes, nodes: int) -> None:
        self.max_strangers = _MAX_STRANGERS + 2 * nodes
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=max(128, nodes))
        self._listener.setblocking(False)
        _allow_open_files(_OTHER_FILES + self.max_strangers + nodes)
        self.port: int = self._listener.getsockname()[1]
        self._key = key
        self._strangers: dict[MessageChannel, str] = {}
        """Connections that have not proved to have the key yet, the oldest first → from where."""
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def poll(self, timeout_s: float) -> Iterator[ChannelEvent]:
        """Wait for at most so long, and yield what has come from those who have the key."""
        for selected, _ in self._selector.select(timeout_s):
            channel: MessageChannel | None = selected.data
            if channel is None:
                self._accept()
            elif channel.connection.fileno() < 0:
                pass  # it was closed while the events before it were handled
            elif channel in self._strangers:
                yield from self._read_from_stranger(channel)
            else:
                yield from self._read(channel)
        self.refuse_slow_strangers()

    def refuse_slow_strangers(self) -> None:
        """Close the connections that have not proved in time to have the key."""
        for channel in list(self._strangers):
            if time.monotonic() - channel.opened < _HANDSHAKE_LIMIT_S:
                break
            self._refuse(channel, "did not prove in time to have the key of this job")

    def fileno(self) -> int:
        """Return what is readable when `poll` would return at once."""
        return self._selector.fileno()

    def add_channel(self, channel: MessageChannel) -> None:
        """Have `poll` return what comes from a connection that this agent has opened."""
        self._selector.register(channel.connection, selectors.EVENT_READ, channel)

    def close(self) -> None:
        """Close the port and every connection that was not released."""
        for selected in list(self._selector.get_map().values()):
            if selected.data is not None:
                self.close_channel(selected.data)
        self._selector.close()
        self._listener.close()

    def close_channel(self, channel: MessageChannel) -> None:
        """Close a connection, which gives no event."""
        self._strangers.pop(channel, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.close()

    def release_channel(self, channel: MessageChannel) -> None:
        """Leave a connection to the caller, who reads from it from now on."""
        self._selector.unregister(channel.connection)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone again, or this process has no file descriptor left
            if self._strangers:
                self._refuse(next(iter(self._strangers)), "came with too many others")
            return
        channel = MessageChannel(connection, self._key, is_listener=True)
        self._strangers[channel] = address[0]
        self._selector.register(connection, selectors.EVENT_READ, channel)
        if len(self._strangers) > self.max_strangers:
            self._refuse(next(iter(self._strangers)), "came with too many others")

    def _read_from_stranger(self, channel: MessageChannel) -> Iterator[ChannelEvent]:
        try:
            messages = channel.receive()
        except ChannelClosed as end:
            self._refuse(channel, str(end))
            return
        if channel.is_authenticated:
            del self._strangers[channel]
            if messages:
                yield ChannelEvent(channel, messages)

    def _read(self, channel: MessageChannel) -> Iterator[ChannelEvent]:
        try:
            yield ChannelEvent(channel, channel.receive())
        except ChannelClosed as end:
            self.close_channel(channel)
            yield ChannelEvent(channel, [], str(end))

    def _refuse(self, channel: MessageChannel, reason: str) -> None:
        """Close the connection of a stranger. That costs a line, but not any number of them."""
        self._refused += 1
        if self._refused <= _MAX_REPORTED_STRANGERS:
            address = self._strangers[channel]
            more = "; more are not reported" if self._refused == _MAX_REPORTED_STRANGERS else ""
            print(f"refused a connection from {address}: it {reason}{more}", file=sys.stderr)
        self.close_channel(channel)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, where it may be raised. Many systems set 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def encode_message(message: Message) -> bytes:
    """Return a message as it is sent. Raises a ValueError if nobody would take it."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too large for other agents")
    return body


def _make_mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, b"%d " % number + body, "sha256").hex().encode()
