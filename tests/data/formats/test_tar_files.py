"""Tar shards: the samples that tarfile shows, read at random; damage is named."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.data.formats.reader import SamplePlace
from echelon.data.formats.tar_files import TarReader

FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}
SMALL = {"a/1.jpg": b"one", "a/1.cls": b"1", "a/2.jpg": b"", "a/2.cls": b"2", "b.JPG": b"x" * 700}


def write_tar(
    file: Path,
    members: Mapping[str, bytes] | list[tuple[str, bytes]],
    format: int = tarfile.USTAR_FORMAT,
    mtime: float = 0,
) -> Path:
    with tarfile.open(file, "w", format=format) as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), mtime  # pax has floats too
            tar.addfile(info, io.BytesIO(content))
    return file


def read_by_tarfile(file: Path) -> list[tuple[str, dict[str, bytes]]]:
    """The samples by Python's own reader."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(file) as tar:
        for member in tar:
            found = re.fullmatch(r"((?:.*/|)[^./][^./]*)\.([^/]+)", member.name, re.DOTALL)
            if not member.isreg() or not found:
                continue
            key, column = found[1], found[2].lower()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            content = tar.extractfile(member)
            assert content is not None
            samples[-1][1][column] = content.read()
    return samples


def read_all(reader: TarReader) -> list[dict[str, bytes]]:
    return reader.read_samples(range(len(reader)))


def assert_equal_to_tarfile(file: Path) -> None:
    reader = TarReader([file])
    expected = read_by_tarfile(file)
    assert read_all(reader) == [sample for _, sample in expected]
    assert [reader.locate(row).key for row in range(len(reader))] == [key for key, _ in expected]


@pytest.mark.parametrize("mtime", [0, 1.5])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_samples_are_those_of_tarfile(tmp_path: Path, format: int, mtime: float) -> None:
    members = SMALL | {
        "README": b"no extension",
        ".hidden.jpg": b"no key",
        "x.y/no": b"a dot in a folder",
        "ends.": b"nothing after the dot",
        f"{'long/' * 30}{'n' * 60}.jpg": b"prefix of ustar, or a long name",
        f"{'long/' * 30}{'n' * 60}.seg.png": b"two dots",
        "last.txt": b"y" * 512,
    }
    if format != tarfile.USTAR_FORMAT:
        members |= {f"{'n' * 300}.jpg": b"long", "grüße/ü.txt": "ü".encode(), "z.txt": b"z" * 3000}
    assert_equal_to_tarfile(write_tar(tmp_path / "a.tar", members, format, mtime))


def test_samples_are_asked_for_in_any_order(tmp_path: Path) -> None:
    files = [
        write_tar(tmp_path / "a.tar", SMALL),
        write_tar(tmp_path / "empty.tar", {}),
        write_tar(tmp_path / "b.tar", {"1.txt": b"eins", "2.txt": b"zwei"}),
    ]
    reader = TarReader(files)
    assert len(reader) == 5
    assert reader.column_names == ["jpg", "cls", "txt"]
    assert reader.column_counts == {"jpg": 3, "cls": 2, "txt": 2}
    assert reader.read_samples([4, 0, 2, 0]) == [
        {"txt": b"zwei"},
        {"jpg": b"one", "cls": b"1"},
        {"jpg": b"x" * 700},
        {"jpg": b"one", "cls": b"1"},
    ]
    assert reader.locate(3) == SamplePlace(files[2], 0, "1")
    assert reader.chunks.starts.tolist() == [0, 3, 5]
    assert pickle.loads(pickle.dumps(reader)).read_samples([3]) == [{"txt": b"eins"}]


def test_an_empty_shard_has_no_samples(tmp_path: Path) -> None:
    reader = TarReader([write_tar(tmp_path / "a.tar", {})])
    assert len(reader) == 0
    assert reader.column_names == []
