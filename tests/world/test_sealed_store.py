"""Values in torch's store that only those with the key can make, beside one who has it not."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from echelon.errors import EchelonError
from echelon.utils.sockets import shut_connections_to_port
from echelon.world import bounded_store, sealed_store
from echelon.world.bounded_store import MAX_VALUE_BYTES, BoundedStore
from echelon.world.network_key import derive_key, read_key
from echelon.world.sealed_store import SealedStore

KEY = derive_key("the key of this job", "store")


@pytest.fixture
def raw() -> dist.TCPStore:
    """torch's store, as its host has it."""
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=1), False)


@pytest.fixture
def stranger(raw: dist.TCPStore) -> dist.TCPStore:
    """The same store, as anybody has it who reaches its port."""
    return dist.TCPStore("127.0.0.1", raw.port, None, False, timedelta(seconds=1), False)


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "_reported", set())


@pytest.fixture(params=[KEY, None], ids=["with a key", "without"])
def store(request: pytest.FixtureRequest, raw: dist.TCPStore) -> SealedStore:
    return SealedStore(raw, request.param)


def test_it_works_as_the_store_of_torch(store: SealedStore) -> None:
    store.set("a", "1")
    store.multi_set(["b", "ü"], ["2", "ü"])
    assert store.get("a") == b"1"
    assert store.multi_get(["a", "b", "ü"]) == [b"1", b"2", "ü".encode()]
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.add("n", 0) == 0
    assert [store.add("n", 1), store.add("n", 2), store.add("n", 0)] == [1, 3, 3]
    assert store.delete_key("a")
    assert not store.check(["a"])
    store.wait(["b"])
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.05))
    with pytest.raises(RuntimeError):
        store.get("never")


def test_prefixes_are_those_of_torch(store: SealedStore, raw: dist.TCPStore) -> None:
    inner = store.open_prefix("a").open_prefix("b")
    inner.set("c", "1")
    assert dist.PrefixStore("a/b", raw).check(["c"])
    assert inner.root.get("a/b/c") == b"1"


def test_many_add_at_once(raw: dist.TCPStore) -> None:
    def count() -> None:
        client = dist.TCPStore("127.0.0.1", raw.port, None, False, timedelta(seconds=60), False)
        own = SealedStore(client, KEY)
        for _ in range(20):
            own.add("n", 1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert SealedStore(raw, KEY).add("n", 0) == 160


@pytest.mark.parametrize("forged", ["{}", "", "0" * 64 + "{}", b"\xff\0" * 40])
def test_what_a_stranger_writes_is_as_if_it_were_absent(
    forged: Any,
    raw: dist.TCPStore,
    stranger: dist.TCPStore,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = SealedStore(raw, KEY)
    for key in ("failure", "round", "count"):
        stranger.set(key, forged)
    assert not store.check(["failure"])
    assert not store.check(["failure"])
    assert store.add("count", 0) == 0
    assert store.add("count", 1) == 1
    assert store.compare_set("failure", "", "ours") == b"ours"
    store.set("round", "ours")
    assert store.multi_get(["failure", "round"]) == [b"ours"] * 2
    stranger.set("round", forged)
    with pytest.raises(RuntimeError):
        store.get("round")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (3 if forged else 0), "one for each key"
    assert all(line.startswith("warning: ignored '") for line in lines)


def test_a_value_holds_under_its_own_name_alone(
    raw: dist.TCPStore, stranger: dist.TCPStore
) -> None:
    store = SealedStore(raw, KEY)
    store.open_prefix("echelon/0").set("failure", "of attempt 0")
    stranger.set("echelon/1/failure", stranger.get("echelon/0/failure").decode())
    assert not store.open_prefix("echelon/1").check(["failure"])
    stranger.add("nodes done", 4)
    assert store.add("nodes done", 0) == 0, "a number of torch's own"


def test_any_number_of_forged_keys_costs_three_lines(
    raw: dist.TCPStore, stranger: dist.TCPStore, capfd: pytest.CaptureFixture[str]
) -> None:
    store = SealedStore(raw, KEY)
    for number in range(50):
        stranger.set(f"rank {number}", "x")
        assert not store.check([f"rank {number}"])
    assert len(capfd.readouterr().err.splitlines()) == 3


def test_a_key_that_can_be_guessed_is_refused() -> None:
    assert read_key({}) is None
    assert read_key({"ECHELON_KEY": ""}) is None
    assert read_key({"ECHELON_KEY": "0123456789abcdef"}) == "0123456789abcdef"
    with pytest.raises(EchelonError, match="ECHELON_KEY has 4 characters"):
        read_key({"ECHELON_KEY": "1234"})


def fill(stranger: Any, name: str, blocks: int) -> None:
    """Make a value of so many times seven megabytes; torch's server takes eight at once."""
    for _ in range(blocks):
        stranger.append(name, "x" * (7 << 20))
    assert stranger.check([name]), "it has all arrived"


@pytest.mark.slow
def test_a_value_that_was_filled_is_not_read(
    store: SealedStore, stranger: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader takes none of it, the value is deleted, and the true one counts."""
    sizes: list[int] = []
    receive = BoundedStore._receive

    def record_size(self: BoundedStore, size: int) -> bytes:
        sizes.append(size)
        return receive(self, size)

    monkeypatch.setattr(BoundedStore, "_receive", record_size)
    store.set("a", "1")
    fill(stranger, "b", 20)
    fill(stranger, "d", 2)
    store.set("c", "3")
    with pytest.raises(RuntimeError):
        store.multi_get(["a", "b", "c", "d"])
    assert max(sizes) < 1000
    assert not stranger.check(["b"])
    assert not stranger.check(["d"])
    store.set("b", "2")
    assert store.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]


def test_a_counter_that_was_filled_counts_on(stranger: dist.TCPStore, raw: dist.TCPStore) -> None:
    store = SealedStore(raw, KEY)
    fill(stranger, "n", 3)
    fill(stranger, "first", 3)
    assert store.add("n", 2) == 2
    assert store.add("n", 1) == 3
    assert store.compare_set("first", "", "mine") == b"mine"


def test_a_value_that_nobody_would_read_is_not_set(store: SealedStore) -> None:
    with pytest.raises(ValueError, match="too large"):
        store.set("a", "x" * MAX_VALUE_BYTES)
    large = "x" * (MAX_VALUE_BYTES - 100)
    store.set("a", large)
    assert store.get("a") == large.encode()


def test_a_store_that_speaks_otherwise_is_read_by_torch(
    raw: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A later torch may put other bytes before its keys."""
    monkeypatch.setattr(bounded_store, "_KEY_PREFIX", b"other/")
    store = SealedStore(raw, KEY)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.compare_set("a", "", "2") == b"1"
    assert capfd.readouterr().err.count("are read without a limit") == 1


def test_a_store_that_has_gone_is_an_error_of_torch(raw: dist.TCPStore) -> None:
    client = dist.TCPStore("127.0.0.1", raw.port, None, False, timedelta(seconds=1), False)
    store = SealedStore(client, KEY)
    store.set("a", "1")
    assert store.check(["a"])
    shut_connections_to_port(raw.port)
    with pytest.raises(dist.DistError):
        store.compare_set("a", "", "2")
    assert store.compare_set("a", "", "2") == b"1", "it connects again"
