"""torch's key-value store, with values that only those who have the job's key can make.

Whoever reaches the port of torch's store may read, write and delete there. So every value of ours
stands behind an HMAC of itself and its key's name. A value that does not verify counts as absent,
and is named in one line of the log; a value copied from another name does not verify either.
What a stranger can still do is in `docs/security.md`.
"""

from __future__ import annotations

import hmac
import random
import secrets
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from echelon.world.bounded_store import MAX_VALUE_BYTES, BoundedStore, TorchStore
from echelon.world.network_key import derive_key, read_key

_POLL_S = 0.01
_MAX_REPORTED = 3
_MAC_LENGTH = 64
_MAX_PAUSE_S = 0.05
_reported: set[str] = set()
_PAUSES = random.SystemRandom()
"""Not the generator of `random` itself, whose numbers are the user's."""


class StoreTimeoutError(RuntimeError):
    """A key was not set in time."""


class SealedStore:
    """A store whose values are sealed with a key. Without one they are as plain as torch's.

    Its methods are named and work as torch's, so torch's elastic agent may use it too.
    `torch_store` and `prefix` are for what torch itself keeps there, which is not sealed.
    """

    def __init__(
        self,
        torch_store: Any,
        key: bytes | None,
        prefix: str = "",
        bounded: BoundedStore | None = None,
    ) -> None:
        self.torch_store: Any = torch_store
        self.prefix = prefix
        self._store: TorchStore = torch_store
        self._bounded = bounded or BoundedStore(torch_store)
        self._key = key

    @classmethod
    def open(cls, torch_store: Any, env: Mapping[str, str]) -> SealedStore:
        """Return the store with the key that the environment has."""
        return cls(torch_store, derive_store_key(read_key(env)))

    def open_prefix(self, prefix: str) -> SealedStore:
        """Return the same store, with this prefix before every key, as torch's PrefixStore."""
        return SealedStore(self.torch_store, self._key, f"{self.prefix}{prefix}/", self._bounded)

    def with_key(self, key: bytes | None) -> SealedStore:
        """Return the same store for values of another key, or for plain ones."""
        return SealedStore(self.torch_store, key, self.prefix, self._bounded)

    @property
    def root(self) -> SealedStore:
        """The same store without a prefix."""
        return SealedStore(self.torch_store, self._key, bounded=self._bounded)

    @property
    def host(self) -> str:
        return str(self.torch_store.host)

    @property
    def port(self) -> int:
        return int(self.torch_store.port)

    # --- values ---

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._store.set(self._name(key), self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, once it is there. Raises a RuntimeError if it is not in time."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values, once all are there."""
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while True:
            self._store.wait([self._name(key) for key in keys], self._store.timeout)
            found = [value for value in self._read(keys) if value is not None]
            if len(found) == len(keys):
                return found
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{', '.join(keys[:8])} was not set in time")
            time.sleep(_POLL_S)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all these keys are set."""
        names = [self._name(key) for key in keys]
        if not self._store.check(names):
            return False
        if self._key is None:
            return True
        return None not in self._read(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a value if there is none, and return the one that is there then. `expected` is the
        empty string, by which torch's store means that."""
        assert not expected
        name, sealed, seen = self._name(key), self._seal(key, value), b""
        while True:
            found = self._bounded.compare_set(name, seen, sealed)
            if (opened := self._open(key, found)) is not None:
                return opened
            seen = b"" if found == seen else found  # a forged value gives way

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum. It cannot be torch's own, to which anybody may
        add."""
        name = self._name(key)
        if self._key is None:
            return self._store.add(name, amount)
        seen, pause = b"", 0.001
        while True:
            total = _read_number(self._open(key, seen)) + amount
            # Of two who write the same sum, only one must take it for his own.
            sealed = self._seal(key, f"{total} {secrets.token_hex(8)}")
            found = self._bounded.compare_set(name, seen, sealed)
            if found == sealed.encode():
                return total
            if not amount and (opened := self._open(key, found)) is not None:
                return _read_number(opened)
            if seen:  # somebody else was faster
                time.sleep(_PAUSES.uniform(0, pause))
                pause = min(2 * pause, _MAX_PAUSE_S)
            seen = b"" if found == seen else found

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return self._store.delete_key(self._name(key))

    # --- what torch's elastic agent uses besides ---

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{', '.join(keys[:8])} was not set in time")
            time.sleep(_POLL_S)

    # --- seals ---

    def _name(self, key: str) -> str:
        return self.prefix + key

    def _read(self, keys: list[str]) -> list[bytes | None]:
        """Return the values that are there now; None for those that are not ours."""
        start = len(self.prefix)
        names = [self._name(key) for key in keys]
        return self._bounded.read(names, lambda name, raw: self._open(name[start:], raw))

    def _seal(self, key: str, value: str | bytes) -> str:
        data = value.encode() if isinstance(value, str) else value
        if len(data) + _MAC_LENGTH > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: a value of {len(data)} bytes is too large for the store")
        return data.decode() if self._key is None else self._make_mac(key, data) + data.decode()

    def _open(self, key: str, sealed: bytes | None) -> bytes | None:
        """Return the value behind its HMAC; None if it was made without the key, or was too large
        to be read (`sealed` is None)."""
        if sealed is None:
            _report_forged(self._name(key))
            return None
        if self._key is None:
            return sealed
        if not sealed:
            return None
        mac, value = sealed[:_MAC_LENGTH], sealed[_MAC_LENGTH:]
        if hmac.compare_digest(mac, self._make_mac(key, value).encode()):
            return value
        _report_forged(self._name(key))
        return None

    def _make_mac(self, key: str, value: bytes) -> str:
        assert self._key is not None
        name = self._name(key).encode()
        return hmac.digest(self._key, b"%d " % len(name) + name + value, "sha256").hex()


def derive_store_key(key: str | None) -> bytes | None:
    """Return the key of the store's values from that of the job."""
    return None if key is None else derive_key(key, "store")


def _read_number(value: bytes | None) -> int:
    return int(value.split()[0]) if value else 0


def _report_forged(name: str) -> None:
    """Print once that a value is ignored, and not for any number of keys."""
    if name in _reported or len(_reported) >= _MAX_REPORTED:
        return
    _reported.add(name)
    print(
        f"warning: ignored {name[:80]!r} in the job's store: whoever wrote it does not have the "
        "key of this job",
        file=sys.stderr,
        flush=True,
    )
