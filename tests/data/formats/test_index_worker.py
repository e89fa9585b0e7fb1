"""Files are indexed in several processes, and what goes wrong there is told here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.data.formats import index_worker
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.index_file import SampleSpans, load_index
from echelon.errors import EchelonError

_BUILDER = """
import os
import numpy as np
from echelon.data.formats.index_file import SampleSpans
from echelon.errors import EchelonError, Fault

def index_file(file):
    print("no answer")
    content = file.read_bytes()
    if content == b"bad":
        raise EchelonError(Fault(f"{file} is bad", "make it good"))
    if content == b"die":
        os._exit(3)
    offsets = np.zeros(1, np.uint64)
    return SampleSpans(offsets, offsets + len(content), {"pid": os.getpid()})
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes even for small files, which import a module of their own."""
    monkeypatch.setattr(index_worker, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "file_builder.py").write_text(_BUILDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))


def index_file(file: DataPath) -> SampleSpans:
    """Stand in for the function of the same name in the module that the processes import."""
    assert isinstance(file, Path)
    raise AssertionError("not in this process")


index_file.__module__ = "file_builder"


def write_files(folder: Path, contents: list[bytes]) -> list[Path]:
    files = [folder / f"{number}.bin" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_files_are_indexed_in_processes(tmp_path: Path) -> None:
    contents = [b"%d" % i * (i + 1) for i in range(7)]
    index = load_index(write_files(tmp_path, contents), "whole-1", index_file)
    assert index.read_spans(range(7)) == contents
    assert len({note["pid"] for note in index.notes}) <= 2
    np.testing.assert_array_equal(index.starts, range(8))


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_faults_and_deaths_are_told(tmp_path: Path) -> None:
    files = write_files(tmp_path, [b"bad", b"good", b"bad", b"die"])
    with pytest.raises(EchelonError) as caught:
        load_index(files, "whole-1", index_file)
    what = [fault.what for fault in caught.value.faults]
    died = f"the process that indexed {files[3]} ended before it was done"
    assert what == [f"{files[0]} is bad", f"{files[2]} is bad", died]
