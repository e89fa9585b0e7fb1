from __future__ import annotations

import pytest

from echelon.errors import EchelonError
from echelon.object_store.client import send_request
from echelon.object_store.limits import StoreLimits, read_limits
from echelon.object_store.urls import ObjectUrl, parse_url


def test_addresses_are_taken_apart() -> None:
    assert parse_url("s3://bucket/a/b.tar") == ObjectUrl("s3", "bucket", "a/b.tar")
    assert parse_url("GS://bucket") == ObjectUrl("gs", "bucket", "")
    assert parse_url("https://host:8080/a%20b") == ObjectUrl("https", "host:8080", "a b")
    assert str(parse_url("s3://bucket//a/")) == "s3://bucket/a/"
    assert str(parse_url("s3://bucket/a/").join("b.tar")) == "s3://bucket/a/b.tar"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftp://host/a", "ftp://host/a is of no store that is known"),
        ("s3://key:canary@bucket/a", "s3://bucket/a has a user or a password in it"),
        ("https://host/a?X-Amz-Signature=canary", "https://host/a is followed by a query"),
        ("s3:///a", "s3:///a names no bucket"),
        ("s3://b*/a", "names no bucket"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused_without_their_secrets(
    text: str, words: str
) -> None:
    with pytest.raises(EchelonError) as raised:
        parse_url(text)
    assert words in str(raised.value)
    assert "canary" not in str(raised.value)


def test_limits_come_from_the_environment() -> None:
    assert read_limits({}) == StoreLimits()
    set_limits = {"ECHELON_STORE_TIMEOUT_S": "2.5", "ECHELON_STORE_RETRIES": "0"}
    assert read_limits(set_limits) == StoreLimits(2.5, 0)
    wrong = {"ECHELON_STORE_TIMEOUT_S": "soon", "ECHELON_STORE_RETRIES": "-1"}
    with pytest.raises(EchelonError) as raised:
        read_limits(wrong)
    assert len(raised.value.faults) == 2


def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.object_store.client.find_spec", lambda name: None)
    monkeypatch.setenv("AWS_REGION", "a-region-of-this-test")
    with pytest.raises(EchelonError, match=r"pip install 'echelon\[cloud\]'"):
        send_request("find", "s3://bucket/a")
