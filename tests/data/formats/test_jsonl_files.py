"""Lines of JSON by number, plain and in blocks of bgzip; what is no sample is named."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import echelon
from echelon.data.formats.reader import BadSampleError
from echelon.errors import EchelonError


def write_lines(path: Path, *samples: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    return path


def compress_in_blocks(data: bytes, block_bytes: int) -> bytes:
    """As bgzip does, with smaller blocks."""
    pieces = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    blocks = []
    for piece in [*pieces, b""]:  # the last is empty
        compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = compressor.compress(piece) + compressor.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff" + struct.pack(
            "<H2sHH", 6, b"BC", 2, len(body) + 25
        )
        blocks.append(head + body + struct.pack("<II", zlib.crc32(piece), len(piece)))
    return b"".join(blocks)


def refuse(path: Path, **options: Any) -> str:
    with pytest.raises(EchelonError) as caught:
        echelon.data.open(path, **options)
    return str(caught.value)


def test_lines_of_several_files(tmp_path: Path) -> None:
    samples = [{"n": n, "text": "ü" * n, "x": [n, n + 0.5]} for n in range(9)]
    write_lines(tmp_path / "a.jsonl", *samples[:4])
    text = "\r\n\n".join(json.dumps(each, ensure_ascii=False) for each in samples[4:])
    (tmp_path / "b.ndjson").write_bytes(text.encode())
    dataset = echelon.data.open(tmp_path)
    assert dataset.column_names == ["n", "text", "x"]
    assert [each["text"] for each in dataset] == ["ü" * n for n in range(9)]
    assert [each["n"] for each in dataset.__getitems__([8, 0, 4])] == [8, 0, 4]
    assert np.array_equal(dataset[3]["x"], np.array([3, 3.5]))
    assert str(dataset.locate(5)) == f"{tmp_path / 'b.ndjson'}, sample 1"
    assert pickle.loads(pickle.dumps(dataset))[7]["n"] == 7
    assert list(echelon.data.open(tmp_path, columns=["x", "n"])[0]) == ["x", "n"]
    assert dataset.chunks.starts.tolist() == [0, 4, 9]


@pytest.mark.parametrize("block_bytes", [1, 3, 20, 64, 5000])
def test_lines_in_blocks(tmp_path: Path, block_bytes: int) -> None:
    samples = [{"n": n, "text": "x" * (n * 3)} for n in range(9)]
    plain = write_lines(tmp_path / "a.jsonl", *samples).read_bytes()
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.jsonl.gz").write_bytes(compress_in_blocks(plain, block_bytes))
    (tmp_path / "c.jsonl.gz").write_bytes(compress_in_blocks(plain[:-1], block_bytes))
    write_lines(tmp_path / "d.jsonl", *samples)
    dataset = echelon.data.open(tmp_path)
    assert list(dataset) == [*samples, *samples, *samples]
    assert dataset.__getitems__([26, 3, 12]) == [samples[8], samples[3], samples[3]]


def test_lists_that_are_no_arrays_stay_lists(tmp_path: Path) -> None:
    lists = [[[1, 2], [3]], ["a"], [1, "a"], [], [2**63, -1], [2**60 + 1, 0.5], [None, 1.0]]
    path = write_lines(tmp_path / "a.jsonl", *({"x": each} for each in lists))
    assert [each["x"] for each in echelon.data.open(path)] == lists
    write_lines(path, {"x": [[1, 2], [3, 4]]}, {"x": [True, False]})
    arrays = [each["x"] for each in echelon.data.open(path)]
    assert [(array.dtype.name, array.shape) for array in arrays] == [
        ("int64", (2, 2)),
        ("bool", (2,)),
    ]


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n[1, 2]\n{"b": 2}\n')
    dataset = echelon.data.open(path, columns=["a"])
    for row, why in ((1, "it is not JSON"), (2, "it is of type list"), (3, "it has no a, only b")):
        with pytest.raises(BadSampleError, match=f"a.jsonl, sample {row}: {why}"):
            dataset[row]


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"a": 1, "b": 2})
    assert "columns has 'c', which" in refuse(path, columns=["a", "c"])
    other = write_lines(tmp_path / "b.jsonl", {"a": "x", "b": None})
    assert f"column 'a' is text in {other} and number in {path}" in refuse(tmp_path)
    other.write_text('{"a": 1}\n{"a": 12')
    assert "line 2 (its last) of" in refuse(tmp_path)
    other.write_text('{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert "line 2 (its last) of" in refuse(tmp_path)
    other.write_bytes(b"")
    assert f"{other} is empty (0 bytes)" in refuse(tmp_path)
    other.write_text("[1]\n")
    assert f"line 1 of {other} is of type list" in refuse(tmp_path)
    other.unlink()
    whole = tmp_path / "c.jsonl.gz"
    whole.write_bytes(gzip.compress(path.read_bytes()))
    assert "is compressed as a whole" in refuse(whole)
    cut = compress_in_blocks(b'{"a": 1}\n' * 99, 50)
    whole.write_bytes(cut[:-40])
    assert f"{whole} is damaged at byte " in refuse(whole)


def test_a_damaged_block_names_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = b'{"a": 1}\n' * 25
    path.write_bytes(good := compress_in_blocks(lines, 45))
    dataset = echelon.data.open(path)
    status = path.stat()
    two_blocks = len(compress_in_blocks(lines[:90], 45)) - len(compress_in_blocks(b"", 45))
    path.write_bytes(good[: two_blocks - 8] + b"\0\0\0\0" + good[two_blocks - 4 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert dataset[4] == {"a": 1}
    with pytest.raises(BadSampleError, match=r"a\.jsonl\.gz, sample 5: .*incorrect data check"):
        dataset[5]
