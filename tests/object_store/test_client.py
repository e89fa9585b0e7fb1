"""What programs ask of a store, over a real server of S3's protocol."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from object_store_server import ACCESS_KEY, SECRET_KEY, ObjectStoreServer

from echelon.errors import EchelonError
from echelon.object_store import client
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("object_store")]


def test_objects_are_written_listed_read_and_removed(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 << 20))  # in several parts
    written = client.upload_file(source, f"s3://{object_store.bucket}/a/large.bin")
    assert written.size == 20 << 20
    assert object_store.get("a/large.bin") == source.read_bytes()
    small = object_store.put("a/b/small.json", b"{}")
    object_store.put("ab.json", b"")
    listed = client.list_objects(f"s3://{object_store.bucket}/a")
    assert [each.url for each in listed] == [small, written.url]
    assert client.read_object(listed[0]) == b"{}"
    client.download_file(written, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    client.delete_objects([small, written.url, small])
    assert client.list_objects(f"s3://{object_store.bucket}/a") == []
    assert client.list_objects(f"s3://{object_store.bucket}/") == [
        client.find_object(_url(object_store))
    ]


def _url(object_store: ObjectStoreServer) -> str:
    return f"s3://{object_store.bucket}/ab.json"


def test_google_and_web_servers_are_read(object_store: ObjectStoreServer) -> None:
    object_store.put("a/b.json", b"[1]")
    for url in (
        f"gs://{object_store.bucket}/a/b.json",
        f"{object_store.endpoint}/{object_store.bucket}/a/b.json",
    ):
        assert client.read_object(client.find_object(url)) == b"[1]"
    [listed] = client.list_objects(f"gs://{object_store.bucket}/a")
    assert listed.url == f"gs://{object_store.bucket}/a/b.json"
    with pytest.raises(EchelonError, match="is on a web server, which cannot list files"):
        client.list_objects(f"{object_store.endpoint}/{object_store.bucket}")


def test_forked_children_use_the_process_of_their_parent(object_store: ObjectStoreServer) -> None:
    url = object_store.put("a.json", b"[1]")
    info = client.find_object(url)
    children = []
    for _ in range(3):
        if not (pid := os.fork()):
            is_read = client.read_object(info) == b"[1]"
            os._exit(0 if is_read else 1)
        children.append(pid)
    assert client.read_object(info) == b"[1]"
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "problem", "words"),
    [
        (403, StoreProblem.DENIED, "the store answered 403, access denied"),
        (500, StoreProblem.UNAVAILABLE, "the store answered 500 after 2 tries"),
        (503, StoreProblem.UNAVAILABLE, "the store answered 503 after 2 tries"),
        ("hang", StoreProblem.UNAVAILABLE, "no whole answer within 0.5 s, in 2 tries"),
        ("trickle", StoreProblem.UNAVAILABLE, "no whole answer within 0.5 s, in 2 tries"),
    ],
)
def test_an_ill_store_is_said_in_a_sentence(
    object_store: ObjectStoreServer,
    monkeypatch: pytest.MonkeyPatch,
    answer: int | str,
    problem: StoreProblem,
    words: str,
) -> None:
    monkeypatch.setenv("ECHELON_STORE_TIMEOUT_S", "0.5")
    url = object_store.put("a.json", b"x" * 1000)
    info = client.find_object(url)
    object_store.answer = answer
    for ask in (lambda: client.read_object(info), lambda: client.list_objects(url)):
        with pytest.raises(ObjectStoreError) as raised:
            ask()
        assert raised.value.problem is problem
        _require_plain(raised.value, url, words)
    object_store.answer = None
    assert client.read_object(info) == b"x" * 1000


def test_one_failure_is_retried(object_store: ObjectStoreServer) -> None:
    url = object_store.put("a.json", b"[1]")
    info = client.find_object(url)
    object_store.answer, object_store.answer_times = 500, 1
    assert client.read_object(info) == b"[1]"


def test_what_is_missing_changed_or_out_of_reach_is_named(
    object_store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = object_store.put("a.json", b"[1]")
    info = client.find_object(url)
    object_store.put("a.json", b"[2]")
    _require_error(lambda: client.read_object(info), url, "changed since it was opened")
    missing = f"s3://{object_store.bucket}/b.json"
    _require_error(lambda: client.find_object(missing), missing, "there is no such object")
    other = "s3://no-such-bucket-here/a"
    _require_error(lambda: client.list_objects(other), other, "there is no such bucket")
    target = tmp_path / "no" / "folder"
    info = client.find_object(url)
    _require_error(lambda: client.download_file(info, target), str(target), "no such file")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    _require_error(lambda: client.find_object(url), url, "the server cannot be reached")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    _require_error(lambda: client.find_object(url), "s3://bucket-", "no credentials were found")
    profiles = tmp_path / "credentials"
    profiles.write_text(
        f"[mine]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    assert client.find_object(url) == info


def _require_error(ask: object, *words: str) -> None:
    assert callable(ask)
    with pytest.raises(EchelonError) as raised:
        ask()
    _require_plain(raised.value, *words)


def _require_plain(error: EchelonError, *words: str) -> None:
    """All words are in it, on two lines, with a remedy, and no secret is."""
    text = str(error)
    for word in words:
        assert word in text
    assert len(text.splitlines()) == 2
    assert "hint: " in text
    assert ACCESS_KEY not in text
    assert SECRET_KEY not in text
