"""Windows of token files: where they begin and end, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import echelon
from echelon.errors import EchelonError


def write_tokens(path: Path, count: int, dtype: str = "uint16", first: int = 0) -> Path:
    np.arange(first, first + count).astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
def test_windows_and_their_targets(tmp_path: Path, dtype: str) -> None:
    path = write_tokens(tmp_path / "train.bin", 14, dtype)
    dataset = echelon.data.open_tokens(path, length=4, dtype=dtype)
    assert [each["inputs"].tolist() for each in dataset] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert dataset[1]["targets"].tolist() == [5, 6, 7, 8]
    assert dataset[1]["targets"].dtype == torch.int64
    assert str(dataset.locate(2)) == f"{path}, sample 2 (token 8)"
    whole = echelon.data.open_tokens(write_tokens(path, 13, dtype), length=4, dtype=dtype)
    assert whole[-1]["targets"].tolist() == [9, 10, 11, 12], "the last token is a target"
    assert len(echelon.data.open_tokens(write_tokens(path, 12, dtype), length=4, dtype=dtype)) == 2


def test_a_window_may_begin_at_any_token(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "train.bin", 10)
    dataset = echelon.data.open_tokens(path, length=4, stride=1)
    assert [each["inputs"][0].item() for each in dataset] == [0, 1, 2, 3, 4, 5]
    apart = echelon.data.open_tokens(path, length=2, stride=3)
    assert [each["inputs"].tolist() for each in apart] == [[0, 1], [3, 4], [6, 7]]


def test_several_files_and_batches(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", 9)
    write_tokens(tmp_path / "b.bin", 13, first=100)
    np.save(tmp_path / "c.npy", np.arange(1000, 1006, dtype=np.uint16))
    dataset = echelon.data.open_tokens(tmp_path, length=4)
    assert [int(each["inputs"][0]) for each in dataset] == [0, 4, 100, 104, 108, 1000]
    rows = [5, 0, 3, 3]
    [batch] = dataset.read_batches(np.array(rows), [len(rows)]) or []
    collated = default_collate(dataset.__getitems__(rows))
    for name in ("inputs", "targets"):
        assert torch.equal(batch[name], collated[name])
        assert batch[name].is_contiguous()
    assert dataset.chunks.starts.tolist() == [0, 2, 5, 6]
    assert pickle.loads(pickle.dumps(dataset))[4]["inputs"].tolist() == [108, 109, 110, 111]


def test_what_is_refused_is_refused_at_once(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", 4)
    (tmp_path / "b.bin").write_bytes(bytes(11))
    (tmp_path / "c.bin").write_bytes(b"")
    (tmp_path / "d.bin").write_bytes(np.int32(20240520).tobytes() + bytes(2000))
    np.save(tmp_path / "e.npy", np.zeros((2, 9), np.uint16))
    with pytest.raises(EchelonError) as caught:
        echelon.data.open_tokens(tmp_path, length=4)
    assert [fault.what.replace(f"{tmp_path}/", "") for fault in caught.value.faults] == [
        "a.bin has 4 tokens, and a sample of length=4 takes 5, with the last target",
        "b.bin has 11 bytes, which are no whole number of uint16 tokens",
        "c.bin has 0 bytes, which are no whole number of uint16 tokens",
        "d.bin begins with a header of llm.c, which would be read as tokens",
        "e.npy has uint16 of shape (2, 9)",
    ]
    with pytest.raises(EchelonError) as caught:
        echelon.data.open_tokens(tmp_path, length=0, stride=-1, dtype="float32")
    assert [fault.what for fault in caught.value.faults] == [
        "length=0",
        "stride=-1",
        "dtype='float32' is no type of tokens",
    ]
