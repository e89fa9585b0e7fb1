"""Files that are replaced as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from echelon.utils.files import (
    flush_to_disk,
    read_json_object,
    replace_file,
    write_json_atomically,
    write_text_atomically,
)


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    for value in (1, 2):
        write_json_atomically(path, {"value": value}, durable=durable)
        assert read_json_object(path) == {"value": value}
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_old_content_is_seen_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    write_text_atomically(path, "old")
    with replace_file(path, prefix=".writing-") as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".writing-picture.")
        assert temporary.suffix == ".svg"
    assert path.read_text() == "new"


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_text_atomically(path, "old")

    def fail() -> None:
        with replace_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_is_on_the_disk_before_its_name_and_then_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def note_replace(source: Path, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_text_atomically(tmp_path / "a", "text", durable=True)
    assert order == ["file", "rename", "folder"]


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"", b"null"])
def test_what_is_not_a_json_object_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    assert read_json_object(path) is None
    path.write_bytes(content)
    assert read_json_object(path) is None


def test_an_error_of_the_disk_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(tmp_path)):
        flush_to_disk(tmp_path)
