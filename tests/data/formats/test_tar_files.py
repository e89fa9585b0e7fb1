"""Tar shards: the samples that tarfile shows, read at random; damage is named."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from echelon.data.formats import tar_headers, tar_scan
from echelon.data.formats.reader import BadSampleError, SamplePlace
from echelon.data.formats.tar_files import KEY_COLUMN, TarReader
from echelon.data.formats.tar_index import index_tar
from echelon.errors import EchelonError

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


def test_columns_are_chosen(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", SMALL)
    reader = TarReader([file], ["cls", KEY_COLUMN])
    assert reader.column_names == ["cls", KEY_COLUMN]
    assert reader.read_samples([1, 0]) == [
        {"cls": b"2", KEY_COLUMN: "a/2"},
        {"cls": b"1", KEY_COLUMN: "a/1"},
    ]
    with pytest.raises(BadSampleError, match=r"a\.tar, sample 2 \(b\): it has no member cls"):
        reader.read_samples([2])
    with pytest.raises(EchelonError, match=r"no sample of .*a\.tar has a column 'jgp'\n.*'jpg'"):
        TarReader([file], ["jgp"])


def test_members_without_a_key_are_counted(tmp_path: Path) -> None:
    members = {"README": b"", "1.jpg": b"a", "between": b"", "1.cls": b"1", "__x__": b""}
    file = write_tar(tmp_path / "a.tar", members)
    notes = index_tar(file).notes
    assert notes == {"columns": {"jpg": 1, "cls": 1}, "skipped": 3, "first_skipped": "README"}
    assert read_all(TarReader([file])) == [{"jpg": b"a", "cls": b"1"}]


def test_a_key_that_comes_again_is_another_sample(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", [("1.a", b"x"), ("2.a", b"y"), ("1.b", b"z")])
    assert read_all(TarReader([file])) == [{"a": b"x"}, {"a": b"y"}, {"b": b"z"}]


def test_a_sample_with_two_members_of_one_extension_is_bad(tmp_path: Path) -> None:
    reader = TarReader(
        [write_tar(tmp_path / "a.tar", [("1.a", b"x"), ("2.a", b"y"), ("2.A", b"")])]
    )
    assert reader.read_samples([0]) == [{"a": b"x"}]
    with pytest.raises(BadSampleError, match=r"sample 1 \(2\): it has two members 'a'"):
        reader.read_samples([1])


def test_many_extensions_are_counted(tmp_path: Path) -> None:
    names = [f"{i}.{'X' if i % 3 else i}" for i in range(200)]
    columns = index_tar(write_tar(tmp_path / "a.tar", dict.fromkeys(names, b""))).notes["columns"]
    assert columns["x"] == 133
    assert [*columns] == ["0", "x", *map(str, range(3, 200, 3))]


def test_directories_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "d.x").mkdir()
    (tmp_path / "d.x" / "1.txt").write_bytes(b"one")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "d.x", "d.x")
    assert_equal_to_tarfile(tmp_path / "a.tar")
    assert len(TarReader([tmp_path / "a.tar"])) == 1


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (tarfile.LNKTYPE, r"has a hard link, 'l\.txt', at byte 1,024\n.*--hard-dereference"),
        (tarfile.SYMTYPE, r"has a symbolic link, 'l\.txt', at byte 1,024\n.*--dereference"),
        (tarfile.GNUTYPE_SPARSE, r"has a sparse file, 'l\.txt', at byte 1,024\n.*--sparse"),
        (tarfile.FIFOTYPE, r"has a member of type b'6', 'l\.txt', at byte 1,024"),
    ],
    ids=["hard-link", "symbolic-link", "sparse", "fifo"],
)
def test_members_without_content_are_refused(tmp_path: Path, kind: bytes, sentence: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        first, link = tarfile.TarInfo("1.txt"), tarfile.TarInfo("l.txt")
        first.size, link.type, link.linkname = 5, kind, "1.txt"
        tar.addfile(first, io.BytesIO(b"hello"))
        tar.addfile(link)
    with pytest.raises(EchelonError, match=sentence):
        TarReader([tmp_path / "a.tar"])


def test_sparse_members_of_pax_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.txt")
        info.pax_headers = {"GNU.sparse.major": "1"}
        tar.addfile(info)
    with pytest.raises(EchelonError, match="has a sparse file"):
        TarReader([tmp_path / "a.tar"])


def test_sizes_of_other_notations(tmp_path: Path) -> None:
    """Blanks, no zero at the end, binary, and pax."""
    content = write_tar(tmp_path / "a.tar", {"1.txt": b"hello", "2.txt": b"x"}).read_bytes()
    for field in (
        b"         05 ",
        b"000000000005",
        b"5\0 garbage  ",
        b"\x80" + bytes(10) + b"\x05",
    ):
        header = bytearray(content[:512])
        header[124:136] = field
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "b.tar").write_bytes(bytes(header) + content[512:])
        assert read_all(TarReader([tmp_path / "b.tar"])) == [{"txt": b"hello"}, {"txt": b"x"}]
    with tarfile.open(tmp_path / "c.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.txt")
        info.size, info.pax_headers = 5, {"size": "5", "comment": "x" * 5000, "path": "p.txt"}
        tar.addfile(info, io.BytesIO(b"hello"))
    assert_equal_to_tarfile(tmp_path / "c.tar")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_tar_that_is_cut_off_anywhere_is_refused(tmp_path: Path, format: int) -> None:
    members = {"1.jpg": b"x" * 700, f"{'n' * 120}/2.jpg": b"y", "3.jpg": b""}
    content = write_tar(tmp_path / "a.tar", members, format, 1.5).read_bytes()
    last = content.rstrip(b"\0")
    end = len(last) + -len(last) % 512
    file = tmp_path / "b.tar"
    for size in [*range(0, end, 100), end - 512, end - 1, end]:
        file.write_bytes(content[:size])
        with pytest.raises(EchelonError, match=r"b\.tar (is cut off|has no end mark|is empty)"):
            index_tar(file)
    file.write_bytes(content[: end + 512])
    assert len(index_tar(file).offsets) == 3


def test_more_after_the_end_mark_is_refused(tmp_path: Path) -> None:
    content = write_tar(tmp_path / "a.tar", SMALL).read_bytes()
    (tmp_path / "b.tar").write_bytes(content * 2)
    sentence = f"goes on after its end mark, .*, at byte {len(content):,}"
    with pytest.raises(EchelonError, match=sentence):
        TarReader([tmp_path / "b.tar"])


@pytest.mark.parametrize("position", [0, 99, 126, 150, 156, 345, 511])
def test_a_damaged_header_is_refused(tmp_path: Path, position: int) -> None:
    content = bytearray(write_tar(tmp_path / "a.tar", SMALL).read_bytes())
    content[1024 + position] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(EchelonError, match=r"a\.tar has a damaged header, at byte 1,024"):
        TarReader([tmp_path / "a.tar"])


def test_a_header_that_was_damaged_later_makes_a_bad_sample(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "a.tar", SMALL)
    reader = TarReader([file])
    reader.read_samples([0])  # the file is open now, and its time is not asked for again
    with file.open("r+b") as opened:
        opened.seek(1024)
        opened.write(b"?")
    with pytest.raises(BadSampleError, match=r"sample 0 \(a/1\): it has a damaged header"):
        reader.read_samples([0])
    assert reader.locate(0) == SamplePlace(file, 0, "a/1")
    assert reader.read_samples([1]) == [{"jpg": b"", "cls": b"2"}]


def test_compressed_tars_are_refused(tmp_path: Path) -> None:
    content = write_tar(tmp_path / "a.tar", SMALL).read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(content))
    sentence = r"a\.tar\.gz is compressed with gzip: .*\n  hint: unpack it once with `gunzip "
    with pytest.raises(EchelonError, match=sentence):
        TarReader([tmp_path / "a.tar.gz"])


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(EchelonError, match=r"a\.tar has a damaged header, at byte 0"):
        TarReader([tmp_path / "a.tar"])


def test_a_tar_within_a_tar_is_content(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", SMALL).read_bytes()
    file = write_tar(tmp_path / "a.tar", {"1.tar": inner, "1.txt": b"x", "2.tar": inner * 2})
    assert_equal_to_tarfile(file)


@pytest.mark.parametrize("read_bytes", [512, 2048, 1 << 20])
def test_members_across_the_borders_of_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(tar_headers, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(tar_headers, "_SHORT_READ_BYTES", 1024)
    monkeypatch.setattr(tar_headers, "LONG_JUMP_BYTES", 3000)
    members = {f"{'n' * (i * 7)}{i}.bin": bytes(i * 331) for i in range(40)}
    assert_equal_to_tarfile(write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT, 1.5))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_random_tars_are_those_of_tarfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Plain headers are looked at many at once, others one by one: in any mixture they agree, also
    where they are in many reads."""
    random = Random(seed)
    if seed % 2:
        monkeypatch.setattr(tar_headers, "_READ_BYTES", random.choice([1024, 5120, 10_000, 65_536]))
        monkeypatch.setattr(tar_scan, "MIN_SCAN_BYTES", 512)
        monkeypatch.setattr(tar_scan, "_MANY_HEADERS", random.choice([3, 40]))
        monkeypatch.setattr(tar_scan, "_MAX_HEADERS", 50)
    inner = write_tar(tmp_path / "inner.tar", SMALL).read_bytes()
    odd = [f"{'n' * 150}.bin", "README", ".x.y", "ends.", "ü.txt", "d/e.f/g", f"{'q' * 96}.txt"]
    members: list[tuple[str, bytes]] = []
    for number in range(random.choice([30, 400])):
        key = random.choice(["", "a/", "./b.c/"]) + str(number)
        for extension in random.sample(["jpg", "CLS", "seg.png", "a" * 40], random.randint(1, 3)):
            content = (
                inner if random.random() < 0.02 else random.randbytes(random.choice([0, 9, 999]))
            )
            members.append((f"{key}.{extension}", content))
        if random.random() < 0.03:
            members.append((random.choice(odd), b"odd"))
    file = tmp_path / "a.tar"
    write_tar(file, members, random.choice([*FORMATS.values()][1:]), random.choice([0, 1.5, 2**34]))
    assert_equal_to_tarfile(file)
    assert index_tar(file).notes["skipped"] == sum(
        name in odd[1:4] + odd[5:6] for name, _ in members
    )


@pytest.mark.parametrize("mtime", [0, 1.5])
@pytest.mark.parametrize("position", [0, 99, 126, 150, 156, 345, 511])
def test_a_damaged_header_among_many_is_refused(
    tmp_path: Path, position: int, mtime: float
) -> None:
    members = {f"{i}.txt": b"x" for i in range(300)}
    file = write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT, mtime)
    content = bytearray(file.read_bytes())
    at = 200 * 1024 * (2 if mtime else 1)
    content[at + position] ^= 1
    file.write_bytes(content)
    with pytest.raises(EchelonError, match=rf"a\.tar has a damaged header, at byte {at:,}"):
        index_tar(file)
