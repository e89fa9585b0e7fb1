"""Every sample that cannot be read is named, and all others are still read."""

from __future__ import annotations

import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from sample_files import overwrite, write_lines, write_photos, write_shard

import echelon
from echelon.data.check_files import FileCheck, cut_batches
from echelon.data.formats.reader import ChunkTable
from echelon.errors import EchelonError


def check(*paths: Path, processes: int = 1) -> tuple[int, list[str]]:
    """The samples that were looked at, and what is bad."""
    found = list(FileCheck([str(path) for path in paths], None).run(processes))
    return sum(each.samples for each in found), [str(bad) for each in found for bad in each.bad]


def test_all_formats_are_read_whole(tmp_path: Path) -> None:
    write_shard(tmp_path / "tars" / "a.tar", 3)
    write_shard(tmp_path / "tars" / "b.tar", 4)
    np.save(tmp_path / "rows.npy", np.zeros((5, 2)))
    assert check(tmp_path / "tars") == (7, [])
    assert check(write_photos(tmp_path / "photos", "cat", "dog")) == (6, [])
    assert check(write_lines(tmp_path / "lines.jsonl", 8)) == (8, [])
    assert check(tmp_path / "rows.npy") == (5, [])


def test_a_damaged_member_of_a_tar(tmp_path: Path) -> None:
    tar = write_shard(tmp_path / "a.tar", 5)
    overwrite(tar, b"n0003.jpg", b"no picture", skip=512)
    overwrite(tar, b"n0001.cls", b"x", skip=512)
    samples, [first, second] = check(tar)
    assert samples == 5
    assert first.startswith(f"{tar}, sample 1 (n0001): cls cannot be decoded: invalid literal")
    assert second == (
        f"{tar}, sample 3 (n0003): jpg cannot be decoded: it is not a picture of a known format"
    )


def test_files_that_cannot_be_opened_do_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "a.tar", 3)
    (tmp_path / "b.tar").write_bytes(whole.read_bytes()[:1200])
    (tmp_path / "c.tar").touch()
    (tmp_path / "d.tar").write_bytes(bytes(1024))
    samples, bad = check(tmp_path)
    assert samples == 3
    assert bad == [
        f"{tmp_path}/b.tar: it is cut off in its last member, at byte 0",
        f"{tmp_path}/c.tar: it is empty (0 bytes)",
        f"{tmp_path}/d.tar: it has no samples",
    ]


def test_parquet_cut_off_or_damaged_inside(tmp_path: Path) -> None:
    file, cut = tmp_path / "a.parquet", tmp_path / "b.parquet"
    table = pa.table({"number": np.arange(3000)})
    parquet.write_table(table, file, row_group_size=1500, use_dictionary=False)
    cut.write_bytes(file.read_bytes()[:-40])
    group = parquet.read_metadata(file).row_group(1).column(0)
    content = bytearray(file.read_bytes())
    content[group.data_page_offset : group.data_page_offset + 40] = b"\xff" * 40
    file.write_bytes(content)
    samples, [first, second] = check(file, cut)
    assert samples == 3000
    assert first.startswith(f"{cut}: it is not a complete Parquet file")
    assert second.startswith(f"{file}, samples 1500 to 2999: its row group 1 cannot be read")


def test_columns_of_other_types(tmp_path: Path) -> None:
    for name, values in (("a", [1, 2]), ("b", ["x"])):
        parquet.write_table(pa.table({"value": values}), tmp_path / f"{name}.parquet")
    samples, [bad] = check(tmp_path)
    assert samples == 3
    assert f"column 'value' is string in {tmp_path}/b.parquet and int64" in bad


def test_names_cannot_command_the_terminal(tmp_path: Path) -> None:
    tar = tmp_path / "a\x1b[31m.tar"
    with tarfile.open(tar, "w") as opened:
        opened.addfile(tarfile.TarInfo("red\x1b[0m\nline.cls"))
    _, [bad] = check(tar)
    assert bad.startswith(f"{tmp_path}/a\\u001b[31m.tar, sample 0 (red\\u001b[0m\\u000aline): ")
    tar.write_bytes(b"")
    with pytest.raises(EchelonError, match=r"a\\u001b\[31m\.tar is empty \(0 bytes\)\n  hint: "):
        echelon.data.open(tar)


def test_one_row_of_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    days = pa.array([0, 10**7, 1], pa.int32()).cast(pa.date32())
    parquet.write_table(pa.table({"day": days}), tmp_path / "a.parquet")
    samples, [bad] = check(tmp_path)
    assert samples == 3
    assert bad.startswith(f"{tmp_path}/a.parquet, sample 1: day cannot be read: ")


def test_a_line_that_is_not_json_and_a_lost_picture(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", 6)
    overwrite(lines, b'"text 3"', b"?")
    samples, [bad] = check(lines)
    assert samples == 6
    assert bad.startswith(f"{lines}, sample 3: it is not JSON")
    photos = write_photos(tmp_path / "photos", "cat")
    (photos / "cat" / "01.jpg").write_bytes(b"")
    assert check(photos)[1] == [
        f"{photos}/cat/01.jpg, sample 0: image cannot be decoded: "
        "it is not a picture of a known format"
    ]


def test_a_file_that_changes_while_it_is_checked(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", 3)
    started = FileCheck(str(lines), None)
    write_lines(lines, 5)
    [bad] = [bad for each in started.run(1) for bad in each.bad]
    assert str(bad) == f"{lines}: it changed while it was checked"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(EchelonError, match="does not exist"):
        check(tmp_path / "a.tar")


@pytest.mark.parametrize("across", [False, True])
def test_batches_are_all_rows_once(across: bool) -> None:
    chunks = ChunkTable(np.array([0, 3, 10, 11, 40]), np.array([30, 70, 5000, 29]))
    batches = list(cut_batches(chunks, 2, 39, 40, 8, across=across))
    assert [begin for begin, _ in batches] == [2, *(end for _, end in batches[:-1])]
    assert batches[-1][1] == 39
    assert max(end - begin for begin, end in batches) <= 8
    if not across:
        borders = chunks.starts.tolist()
        assert all(any(a <= i < j <= b for a, b in pairwise(borders)) for i, j in batches)
