"""Files in object stores: the same samples as those of the same files on a disk."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from object_store_server import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from sample_files import write_lines, write_photos, write_shard
from worlds import wait_until

import echelon
from echelon.data.batches import DatasetSource, EvalOrder
from echelon.data.epoch_plan import make_epoch_plan
from echelon.data.find_objects import _is_match
from echelon.errors import EchelonError

pytestmark = pytest.mark.xdist_group("object_store")
slow = pytest.mark.slow


def write_all(folder: Path) -> None:
    """Files of every format."""
    for number in range(2):
        write_shard(folder / "tar" / f"{number}.tar", 7)
        (folder / "jsonl").mkdir(exist_ok=True)
        write_lines(folder / "jsonl" / f"{number}.jsonl", 9)
        table = pa.table(
            {"x": range(10 * number, 10 * number + 10), "t": [f"t{i}" for i in range(10)]}
        )
        for part in ("year=1", "year=2"):
            (folder / "parquet" / part).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, folder / "parquet" / part / f"{number}.parquet", row_group_size=4)
        (folder / "arrow").mkdir(exist_ok=True)
        pyarrow.feather.write_feather(table, folder / "arrow" / f"{number}.arrow", "uncompressed")
        (folder / "npy").mkdir(exist_ok=True)
        np.save(
            folder / "npy" / f"{number}.npy", np.random.default_rng(number).normal(size=(11, 3))
        )
        (folder / "tokens").mkdir(exist_ok=True)
        np.arange(100, dtype=np.uint16).tofile(folder / "tokens" / f"{number}.bin")
        (folder / "documents").mkdir(exist_ok=True)
        (np.arange(90, dtype=np.uint16) % 13).tofile(folder / "documents" / f"{number}.bin")
        np.save(folder / "documents" / f"{number}.npy", np.arange(70) % 11)
    write_photos(folder / "images", "cat", "dog")


def put_all(store: ObjectStoreServer, folder: Path) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and ".echelon" not in file.parts:
            store.put(str(file.relative_to(folder)), file.read_bytes())


def open_any(place: str) -> Any:
    if "tokens" in place:
        return echelon.data.open_tokens(place, length=8, stride=3)
    if "documents" in place:
        return echelon.data.pack_documents(place, length=16, strategy="best_fit", bos_token_id=0)
    return echelon.data.open(place, decode=None)


def list_samples(dataset: Any) -> list[Any]:
    rows = [*range(len(dataset)), -1, 3, 0]
    samples = dataset.__getitems__(rows)
    return [{name: np.asarray(value).tolist() for name, value in each.items()} for each in samples]


@slow
def test_every_format_gives_the_same_samples_as_from_a_disk(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    write_all(tmp_path / "data")
    put_all(object_store, tmp_path / "data")
    for name in ("tar", "jsonl", "parquet", "arrow", "npy", "tokens", "documents", "images"):
        local = open_any(str(tmp_path / "data" / name))
        for scheme in ("s3", "gs"):
            remote = open_any(f"{scheme}://{object_store.bucket}/{name}")
            assert list_samples(remote) == list_samples(local), name
            assert list_samples(pickle.loads(pickle.dumps(remote))) == list_samples(local)
            assert remote.chunks.starts.tolist() == local.chunks.starts.tolist()
            assert remote.chunks.sizes_bytes.tolist() == local.chunks.sizes_bytes.tolist()
            place = str(remote.locate(5)).removeprefix(f"{scheme}://{object_store.bucket}")
            assert place == str(local.locate(5)).removeprefix(str(tmp_path / "data"))


@slow
def test_what_was_fetched_is_not_fetched_again(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    write_all(tmp_path / "data")
    put_all(object_store, tmp_path / "data")
    place = f"s3://{object_store.bucket}/tar/*.tar"
    first = list_samples(open_any(place))
    size = sum(file.stat().st_size for file in (tmp_path / "data/tar").glob("*.tar"))
    assert size <= object_store.bytes_sent <= size + 2000  # and the listing
    object_store.reset_counts()
    assert list_samples(open_any(place)) == first
    assert [method for method, _, _ in object_store.requests] == ["GET"]
    assert object_store.bytes_sent < 2000


@slow
def test_a_folder_is_listed_while_an_object_of_that_name_is_looked_for(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    shard = write_shard(tmp_path / "a.tar", 7).read_bytes()
    object_store.put("tar/a.tar", shard)
    bucket = f"s3://{object_store.bucket}"
    is_listed = threading.Event()

    def wait_for_listing(method: str, path: str) -> None:
        if "list-type" in path:
            is_listed.set()
        elif method == "HEAD":
            assert is_listed.wait(60)

    object_store.decide = wait_for_listing
    folder = open_any(f"{bucket}/tar")
    object_store.reset_counts()
    assert list_samples(open_any(f"{bucket}/tar/a.tar")) == list_samples(folder)
    assert [method for method, _, _ in object_store.requests] == ["HEAD"]
    object_store.put("tar", shard + bytes(512))  # an object comes before a folder
    found = echelon.data.open(f"{bucket}/tar", format="tar", decode=None)
    assert str(found.locate(0)).startswith(f"{bucket}/tar, ")


@slow
def test_the_objects_that_are_indexed_next_are_fetched_meanwhile(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    for number in range(3):
        shard = write_shard(tmp_path / "tar" / f"{number}.tar", 7)
        object_store.put(f"tar/{number}.tar", shard.read_bytes())
    is_last_asked = threading.Event()

    def wait_for_last(method: str, path: str) -> None:
        if path.endswith("2.tar"):
            is_last_asked.set()
        elif path.endswith("0.tar"):
            assert is_last_asked.wait(60)

    object_store.decide = wait_for_last
    remote = open_any(f"s3://{object_store.bucket}/tar/*.tar")
    assert is_last_asked.is_set()
    assert list_samples(remote) == list_samples(open_any(str(tmp_path / "tar")))
    assert sorted(object_store.list_paths("GET"))[1:] == [f"tar/{n}.tar" for n in range(3)]


@slow
def test_a_web_server_is_read_file_by_file(object_store: ObjectStoreServer, tmp_path: Path) -> None:
    write_all(tmp_path / "data")
    put_all(object_store, tmp_path / "data")
    base = f"{object_store.endpoint}/{object_store.bucket}/tar"
    remote = echelon.data.open([f"{base}/0.tar", f"{base}/1.tar"], decode=None)
    assert list_samples(remote) == list_samples(open_any(str(tmp_path / "data/tar")))
    with pytest.raises(EchelonError) as raised:
        echelon.data.open(f"{base}/*.tar")
    assert "has a pattern, and a web server cannot list its files" in str(raised.value)
    assert "give a list of addresses" in str(raised.value)


@slow
def test_lines_in_blocks_are_read(object_store: ObjectStoreServer, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", 40).read_bytes()
    packed = b"".join(_compress(lines[at : at + 300]) for at in range(0, len(lines), 300))
    assert gzip.decompress(packed) == lines
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    remote = echelon.data.open(object_store.put("a.jsonl.gz", packed))
    assert list_samples(remote) == list_samples(echelon.data.open(tmp_path / "a.jsonl.gz"))


def _compress(text: bytes) -> bytes:
    """A block of bgzip."""
    packer = zlib.compressobj(wbits=-15)
    body = packer.compress(text) + packer.flush()
    head = struct.pack("<4s6xH2sHH", b"\x1f\x8b\x08\x04", 6, b"BC", 2, len(body) + 25)
    return head + body + struct.pack("<II", zlib.crc32(text), len(text))


@slow
def test_objects_of_many_blocks_are_read_at_any_place(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    array = np.random.default_rng(0).integers(0, 1 << 15, (5000, 1009), np.int16)
    np.save(tmp_path / "a.npy", array)
    url = object_store.put("a.npy", (tmp_path / "a.npy").read_bytes())
    remote = echelon.data.open(url)
    rows = np.random.default_rng(1).integers(0, 5000, 400).tolist()
    found = np.stack([each["data"] for each in remote.__getitems__(rows)])
    assert (found == array[rows]).all()
    ranges = [sent for _, path, sent in object_store.requests if path.endswith("a.npy") and sent]
    assert len(ranges) == len(set(ranges)) == 3


@slow
def test_chunks_that_come_next_are_fetched_ahead(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((12, 1 << 20), np.uint8))
    url = object_store.put("a.npy", (tmp_path / "a.npy").read_bytes())
    dataset = echelon.data.open(url)
    assert len(dataset.chunks.sizes_bytes) == 3
    dataset.prefetch_chunks([2, 1])
    wait_until(lambda: len(object_store.requests) >= 4, "the last blocks are asked for")
    wait_until(lambda: object_store.bytes_sent > 12 << 20, "all of it has come")
    object_store.answer = 403
    assert not dataset[11]["data"].any()  # it waits for what is on its way
    assert not dataset[0]["data"].any()
    assert len(object_store.requests) == 4  # blocks that follow one another are asked for at once


@slow
def test_the_sources_of_a_mixture_are_fetched_ahead(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    sources = {}
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.full((12, 1 << 20), ord(name), np.uint8))
        url = object_store.put(f"{name}.npy", (tmp_path / f"{name}.npy").read_bytes())
        sources[name] = echelon.data.open(url)
    mixture = echelon.data.mix(sources)
    device = torch.device("cpu")
    order = make_epoch_plan(len(mixture), 2, 0, data=mixture).make_order(0, 0, 1, device)
    batches = DatasetSource(mixture, 0, device).iter_batches(order, 0, device)
    drawn = [next(batches) for _ in range(8)]
    wait_until(lambda: object_store.bytes_sent > 24 << 20, "all of it has come")
    object_store.answer = 403
    drawn += batches
    firsts = sorted(int(row[0]) for batch in drawn for row in batch.data["data"])
    assert firsts == [ord("a")] * 12 + [ord("b")] * 12


def _require_fault(open_it: Callable[[], Any], *words: str) -> str:
    with pytest.raises(EchelonError) as raised:
        open_it()
    text = str(raised.value)
    for word in words:
        assert word in text
    assert "hint: " in text
    assert ACCESS_KEY not in text
    assert SECRET_KEY not in text
    return text


@slow
def test_what_cannot_be_read_is_said(
    object_store: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_STORE_TIMEOUT_S", "0.5")
    bucket = f"s3://{object_store.bucket}"
    _require_fault(lambda: echelon.data.open(f"{bucket}/a.tar"), "does not exist", "is empty")
    write_all(tmp_path / "data")
    put_all(object_store, tmp_path / "data")
    what = _require_fault(lambda: echelon.data.open(f"{bucket}/tr/*.tar"), "nothing matches")
    assert "did you mean 'tar'" in what
    both = [f"{bucket}/tar/7.tar", "s3://no-such-bucket-here/a.tar"]
    _require_fault(lambda: echelon.data.open(both), "7.tar does not exist", "no such bucket")
    object_store.put("x/state.json", b"{}")
    _require_fault(lambda: echelon.data.open(f"{bucket}/x"), "save_to_disk")
    object_store.put("y/0.parquet", b"PAR1")
    _require_fault(lambda: echelon.data.open(f"{bucket}/y"), "not a complete Parquet file")
    object_store.answer, object_store.answer_path = 403, ".parquet"
    _require_fault(lambda: echelon.data.open(f"{bucket}/parquet"), "1.parquet", "403")
    object_store.answer_path = ".arrow"
    _require_fault(lambda: echelon.data.open(f"{bucket}/arrow"), "1.arrow", "403")
    object_store.answer = "hang"
    object_store.answer_path = ".tar"
    _require_fault(lambda: echelon.data.open(f"{bucket}/tar"), "1.tar", "no whole answer within")


@slow
@pytest.mark.parametrize("answer", [403, "hang"])
def test_a_store_that_fails_is_asked_once_for_many_batches(
    object_store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch, answer: int | str
) -> None:
    """Batches that are read together are not read again one by one then: a store that does not
    answer would be waited for twice."""
    monkeypatch.setenv("ECHELON_STORE_TIMEOUT_S", "0.5")
    monkeypatch.setenv("ECHELON_STORE_RETRIES", "0")
    file = io.BytesIO()
    np.save(file, np.zeros((100, 1 << 16), np.uint8))  # the header is in the first of two blocks
    url = object_store.put("a.npy", file.getvalue())
    dataset = echelon.data.open(url)
    device = torch.device("cpu")
    batches = DatasetSource(dataset, 0).iter_batches(EvalOrder(100, 1, 0, 1), 0, device)
    next(batches)
    object_store.reset_counts()
    object_store.answer = answer
    _require_fault(lambda: list(batches), f"{url} cannot be read")
    # What is read ahead asks as well, and is not waited for.
    assert 1 <= len(object_store.list_paths("GET")) <= 3


@slow
def test_an_object_that_changed_since_it_was_indexed_is_refused(
    object_store: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(tmp_path / "a.tar", 7)
    url = object_store.put("a.tar", shard.read_bytes())
    dataset = open_any(url)
    write_shard(tmp_path / "a.tar", 7, prefix="m")
    object_store.put("a.tar", shard.read_bytes())
    monkeypatch.setenv("ECHELON_DATA_CACHE", str(tmp_path / "other"))  # what was fetched is gone
    _require_fault(lambda: dataset[0], f"{url} changed since it was opened")
    assert list_samples(open_any(url)) == list_samples(open_any(str(shard)))


@slow
def test_the_cache_stays_below_its_limit(
    object_store: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(0).integers(0, 256, (32, 1 << 20), np.uint8)
    file = io.BytesIO()
    np.save(file, array)
    url = object_store.put("a.npy", file.getvalue())
    cache = tmp_path / "blocks"
    monkeypatch.setenv("ECHELON_DATA_CACHE", str(cache))
    monkeypatch.setenv("ECHELON_DATA_CACHE_GB", "0.013")
    dataset = echelon.data.open(url)
    for row in range(32):
        assert (dataset[row]["data"] == array[row]).all()
        used = sum(each.stat().st_size for each in cache.rglob("*") if each.is_file())
        assert used <= 13_000_000 + 100
    monkeypatch.setenv("ECHELON_DATA_CACHE", "/dev/null/x")
    _require_fault(lambda: dataset[0], "a.npy cannot be kept in /dev/null/x", "ECHELON_DATA_CACHE")


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("*.tar", ["a.tar"], ["b/a.tar", ".a.tar", "a.tar.gz"]),
        ("**/*.tar", ["a.tar", "b/a.tar", "b/c/a.tar"], [".b/a.tar", "a.tar/b"]),
        ("b/[0-9]?.tar", ["b/10.tar"], ["b/1.tar", "10.tar"]),
        ("**", ["a", "a/b"], [".a"]),
    ],
)
def test_patterns_are_those_of_a_shell(
    pattern: str, matches: list[str], others: list[str], tmp_path: Path
) -> None:
    for name in (*matches, *others):
        assert _is_match(name.split("/"), pattern.split("/")) == (name in matches)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    text = _require_fault(
        lambda: echelon.data.open("s3://me:canary@bucket/*.tar"), "has a user or a password"
    )
    assert "canary" not in text
    assert os.environ.get("AWS_SECRET_ACCESS_KEY", "") != "canary"
