"""The index of files: found again, made anew where a file changed, and bytes by number."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

from echelon.data.formats import index_file
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.index_file import FileIndex, SampleSpans, load_index
from echelon.data.formats.reader import CHUNK_BYTES, BadSampleError, SamplePlace
from echelon.errors import EchelonError, Fault


def index_lines(file: DataPath) -> SampleSpans:
    """Every line is a sample; a line `bad` is a fault. Counts its calls in a file beside it."""
    assert isinstance(file, Path)
    with file.with_suffix(".calls").open("a") as calls:
        calls.write("x")
    lines = file.read_bytes().splitlines(keepends=True)
    if b"bad\n" in lines:
        raise EchelonError(Fault(f"{file} is bad", "make it good"))
    spans = np.array([len(line) for line in lines], np.uint64)
    offsets = np.cumsum(spans, dtype=np.uint64) - spans
    return SampleSpans(offsets, spans, {"first": lines[0].decode() if lines else None})


def write_lines(file: Path, lines: list[str]) -> Path:
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def count_calls(file: Path) -> int:
    return len(file.with_suffix(".calls").read_text())


def load(*files: Path) -> FileIndex:
    return load_index(files, "lines-1", index_lines)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    contents = [[f"a{i}" for i in range(7)], [], ["bb" * i for i in range(1, 5)]]
    return [write_lines(tmp_path / f"{i}.txt", lines) for i, lines in enumerate(contents)]


def test_samples_are_read_by_number_in_the_order_asked_for(files: list[Path]) -> None:
    index = load(*files)
    whole = b"".join(file.read_bytes() for file in files).splitlines(keepends=True)
    assert len(index) == len(whole) == 11
    rows = [10, 3, 0, 1, 2, 3, 8, 7]
    assert index.read_spans(rows) == [whole[row] for row in rows]
    assert index.read_spans(range(11)) == whole
    assert index.read_spans([]) == []
    assert index.locate(6) == SamplePlace(files[0], 6)
    assert index.locate(7) == SamplePlace(files[2], 0)
    assert [note["first"] for note in index.notes] == ["a0\n", None, "bb\n"]


@pytest.mark.parametrize("row", [-1, 11])
def test_a_number_that_no_sample_has_is_an_index_error(files: list[Path], row: int) -> None:
    with pytest.raises(IndexError, match=f"there is no sample {row}: there are 11"):
        load(*files).read_spans([0, row])


def test_an_index_is_made_once(files: list[Path]) -> None:
    assert load(*files).read_spans([8]) == load(*reversed(files)).read_spans([1])
    assert [count_calls(file) for file in files] == [1, 1, 1]
    assert not list(files[0].parent.glob("*.index")), "it is in a hidden folder"


def test_another_kind_has_another_index(files: list[Path]) -> None:
    load(*files)
    load_index(files, "lines-2", index_lines)
    assert count_calls(files[0]) == 2


def test_a_file_that_changed_is_indexed_anew(files: list[Path]) -> None:
    load(*files)
    status = files[0].stat()
    write_lines(files[0], [f"c{i}" for i in range(7)])
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size and time
    assert load(*files).read_spans([0]) == [b"c0\n"]
    assert [count_calls(file) for file in files] == [2, 1, 1]


def test_a_file_that_changes_while_it_is_used_is_refused(files: list[Path]) -> None:
    index = load(*files)
    write_lines(files[0], ["other"] * 7)
    with pytest.raises(EchelonError, match=f"{files[0]} changed since it was indexed"):
        index.read_spans([0])
    load(*files)
    with pytest.raises(EchelonError, match="changed since it was indexed"):
        index.read_spans([0])
    assert index.read_spans([8]) == [b"bbbb\n"]


def test_a_file_that_is_cut_while_it_is_open_names_the_first_sample_that_is_lost(
    files: list[Path],
) -> None:
    index = load(*files)
    index.read_spans([0])
    os.truncate(files[0], 7)
    assert index.read_spans([0, 1]) == [b"a0\n", b"a1\n"]
    with pytest.raises(BadSampleError, match=r"0\.txt, sample 2: the file ends in it"):
        index.read_spans(range(7))


def test_damaged_and_foreign_index_files_are_made_anew(files: list[Path]) -> None:
    load(*files)
    (path,) = files[2].parent.glob(".echelon/2.txt.index")
    content = path.read_bytes()
    damaged = [content[:size] for size in (0, 5, 30, len(content) - 1)] + [b"{}", content + b"x"]
    for position in range(0, content.index(b"bb"), 7):
        flipped = bytearray(content)
        flipped[position] ^= 4
        damaged.append(bytes(flipped))
    for number, wrong in enumerate(damaged):
        path.unlink()  # the file that is mapped stays as it is
        path.write_bytes(wrong)
        assert load(*files).read_spans([10]) == [b"bbbbbbbb\n"]
        assert count_calls(files[2]) == 2 + number
        assert path.read_bytes() == content


def test_faults_of_all_files_are_told_at_once(files: list[Path], tmp_path: Path) -> None:
    bad = [write_lines(tmp_path / f"bad{i}.txt", ["x", "bad"]) for i in range(2)]
    with pytest.raises(EchelonError) as caught:
        load(*files, *bad)
    assert [fault.what for fault in caught.value.faults] == [f"{file} is bad" for file in bad]
    missing = [tmp_path / "none1", tmp_path / "none2"]
    with pytest.raises(EchelonError) as caught:
        load(*missing, *files)
    assert [fault.what for fault in caught.value.faults] == [
        f"{file} cannot be read: no such file or directory" for file in missing
    ]


def test_an_index_can_be_pickled_and_is_small_then(files: list[Path]) -> None:
    index = load(*files)
    assert pickle.loads(pickle.dumps(index)).read_spans([8]) == index.read_spans([8])


def test_chunks_are_pieces_of_four_megabytes(tmp_path: Path) -> None:
    sizes = [1 << 20] * 9 + [3 * CHUNK_BYTES] + [1 << 20] * 2
    first = tmp_path / "first.txt"
    with first.open("wb") as file:
        for size in sizes:
            file.write(b"x" * (size - 1) + b"\n")
    index = load(first, write_lines(tmp_path / "empty.txt", []), write_lines(tmp_path / "b", ["y"]))
    assert index.chunks.starts.tolist() == [0, 4, 8, 10, 12, 13]
    megabytes = (index.chunks.sizes_bytes >> 20).tolist()
    assert megabytes == [4, 4, 13, 2, 0]
    assert index.chunks.sizes_bytes.sum() == sum(sizes) + 2


def test_no_samples_at_all(tmp_path: Path) -> None:
    index = load(write_lines(tmp_path / "empty.txt", []))
    assert len(index) == 0
    assert index.chunks.starts.tolist() == [0]
    assert index.chunks.sizes_bytes.tolist() == []


def test_open_files_are_bounded(tmp_path: Path) -> None:
    many = [write_lines(tmp_path / f"{i}.txt", [str(i)]) for i in range(100)]
    index = load(*many)
    before = len(os.listdir("/proc/self/fd"))
    assert index.read_spans(range(100)) == [f"{i}\n".encode() for i in range(100)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * index_file._OPEN_FILES


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    (tmp_path / ".echelon").write_text("in the way, also for root")
    assert load(*files).read_spans([8]) == [b"bbbb\n"]
    assert len(list((tmp_path / "cache" / "indexes").glob("*.index"))) == 3
    # By content: it is found for the same files in another place.
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in files:
        file.rename(moved / file.name)
    (moved / ".echelon").write_text("in the way")
    assert load(*(moved / file.name for file in files)).read_spans([8]) == [b"bbbb\n"]
    assert [count_calls(file) for file in files] == [1, 1, 1]
    assert not list(moved.glob("*.calls"))


def test_an_index_that_can_be_written_nowhere_is_a_fault(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    for name in (".echelon", "cache"):
        (tmp_path / name).write_text("in the way, also for root")
    with pytest.raises(EchelonError) as caught:
        load(*files)
    assert len(caught.value.faults) == 3
    assert f"the index of {files[0]} cannot be written: {tmp_path}/.echelon: " in str(caught.value)
    assert "set ECHELON_CACHE to a folder that is" in str(caught.value)


_LOAD = """
import sys
from pathlib import Path
from test_index_file import load
print("ready", flush=True)
sys.stdin.readline()
index = load(*map(Path, sys.argv[1:]))
print(index.read_spans(range(len(index))))
"""


@pytest.mark.slow
def test_processes_that_open_at_once_index_once(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{i}.txt", [f"{i} {j}" for j in range(500)]) for i in range(9)]
    command = [sys.executable, "-c", _LOAD, *map(str, files)]
    started = [
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=Path(__file__).parent)
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = {process.communicate(timeout=120)[0] for process in started}
    expected = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
    assert outputs == {f"{expected}\n"}
    assert [count_calls(file) for file in files] == [1] * 9
