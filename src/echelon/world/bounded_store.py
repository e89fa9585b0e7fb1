"""Values of torch's store, read up to a limit.

torch's client allocates whatever length the store announces, and anybody who reaches the store may
append to a value for as long as the memory of its host lasts. So values are read here over a
connection of our own, which speaks the protocol of torch's store: a length above the limit is not
read, and the value, which cannot be ours, is deleted. Everything else goes through torch's client.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

MAX_VALUE_BYTES = 8 << 20
"""As much as torch's server takes at once; only by appending a value becomes larger."""
_ANSWER_LIMIT_S = 60.0
_NAME_LIMIT_S = 10.0
_MAX_TRIES = 16

# --- torch/csrc/distributed/c10d/TCPStoreBackend.hpp, the same since torch 2.1 ---
_VALIDATE = b"\x00" + struct.pack("=I", 0x3C85F7CE)
_COMPARE_SET = b"\x02"
_MULTI_GET = b"\x0a"
_LENGTH = struct.Struct("=Q")
_KEY_PREFIX = b"/"
"""Before every key that torch's client sends."""

Opened = TypeVar("Opened")


class TorchStore(Protocol):
    """The part of torch's store that is used."""

    @property
    def timeout(self) -> timedelta: ...
    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: Any, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def set_timeout(self, timeout: timedelta) -> None: ...


class OversizeValueError(Exception):
    """A value of the store is larger than ours may be."""


class BoundedStore:
    """torch's store, whose values are read up to a limit. Any thread may call it."""

    def __init__(self, torch_store: Any) -> None:
        self.torch_store: TorchStore = torch_store
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_usable: bool | None = None if hasattr(torch_store, "port") else False
        """Whether the store speaks the protocol that is known here; None: not tried yet."""

    def read(
        self, names: Sequence[str], open_value: Callable[[str, bytes | None], Opened]
    ) -> list[Opened]:
        """Return what `open_value` makes of every value, which it is given one by one: so a
        thousand values that it refuses are never held together. A missing value is empty; None is
        passed for one that is too large."""
        if not self._can_read():
            raw = self.torch_store.multi_get([*names])
            return [open_value(name, value) for name, value in zip(names, raw, strict=True)]
        opened: list[Opened] = []
        while len(opened) < len(names):
            oversize = self._read_until_oversize(names, opened, open_value)
            if oversize is not None:
                self.torch_store.delete_key(oversize)
                opened.append(open_value(oversize, None))
        return opened

    def _read_until_oversize(
        self,
        names: Sequence[str],
        opened: list[Opened],
        open_value: Callable[[str, bytes | None], Opened],
    ) -> str | None:
        """Read the values that are left, and return the first name whose value is too large."""
        left = names[len(opened) :]
        request = _MULTI_GET + _LENGTH.pack(len(left)) + b"".join(map(_pack_name, left))
        with self._lock, self._exchange(request):
            for name in left:
                try:
                    value = self._receive_value()
                except OversizeValueError:
                    self._disconnect()  # the rest of the value is on its way
                    return name
                opened.append(open_value(name, value))
        return None

    def compare_set(self, name: str, expected: bytes, desired: str) -> bytes:
        """Set a value if the one that is there is `expected`; returns the one that is there then,
        as torch's store does."""
        if not self._can_read():
            return self.torch_store.compare_set(name, expected, desired)
        request = _COMPARE_SET + _pack_name(name) + _pack(expected) + _pack(desired.encode())
        for _ in range(_MAX_TRIES):
            with self._lock, self._exchange(request):
                try:
                    return self._receive_value()
                except OversizeValueError:
                    self._disconnect()
            self.torch_store.delete_key(name)
        raise _make_network_error(f"somebody keeps filling {name[:80]!r} in the job's store")

    # --- the connection ---

    def _can_read(self) -> bool:
        """Return whether values can be read here: what torch's client sets under a name that
        nobody can guess comes back over our connection."""
        if self._is_usable is None:
            name, value = f"probe/{secrets.token_hex(16)}", secrets.token_hex(16)
            self.torch_store.set(name, value)
            try:
                request = _MULTI_GET + _LENGTH.pack(1) + _pack_name(name)
                with self._lock, self._exchange(request):
                    self._is_usable = self._receive_value() == value.encode()
            except OversizeValueError:
                self._is_usable = False
            self.torch_store.delete_key(name)
            if not self._is_usable:
                print(
                    "warning: values of this torch version's store are read without a limit on "
                    "their size",
                    file=sys.stderr,
                )
        return self._is_usable

    @contextlib.contextmanager
    def _exchange(self, request: bytes) -> Any:
        """Send a request, whose answer is read inside. Where that fails the connection is closed,
        and the error is one of torch's."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.sendall(request)
            yield
        except OSError as error:
            self._disconnect()
            raise _make_network_error(f"the job's store does not answer: {error}") from None
        except BaseException:
            self._disconnect()
            raise

    def _connect(self) -> socket.socket:
        connection = self._open_connection()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_VALIDATE)
        return connection

    def _open_connection(self) -> socket.socket:
        store: Any = self.torch_store
        deadline = time.monotonic() + _NAME_LIMIT_S
        while True:
            try:
                return socket.create_connection((store.host, store.port), timeout=_ANSWER_LIMIT_S)
            except socket.gaierror:  # torch's client has found it: names have a bad moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _receive_value(self) -> bytes:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length > MAX_VALUE_BYTES:
            raise OversizeValueError
        return self._receive(length)

    def _receive(self, size: int) -> bytes:
        assert self._connection is not None
        data = bytearray()
        while len(data) < size:
            more = self._connection.recv(min(size - len(data), 1 << 16))
            if not more:
                raise ConnectionError("it has closed the connection")
            data += more
        return bytes(data)


def _pack(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _pack_name(name: str) -> bytes:
    return _pack(_KEY_PREFIX + name.encode())


def _make_network_error(what: str) -> Exception:
    """Return the error that torch's client would raise, which callers expect."""
    import torch.distributed as dist

    return dist.DistNetworkError(what)
