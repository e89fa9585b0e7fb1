"""Rows of .npy files: any of them, of several files, as they were saved."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import echelon
from echelon.errors import EchelonError


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def test_rows_of_several_files(tmp_path: Path) -> None:
    whole = np.arange(60, dtype=np.float32).reshape(20, 3)
    for number, part in enumerate((whole[:7], whole[7:7], whole[7:])):
        save(tmp_path / f"part-{number}.npy", part)
    dataset = echelon.data.open(tmp_path / "*.npy")
    assert (len(dataset), dataset.column_names) == (20, ["data"])
    assert [each["data"].tolist() for each in dataset] == whole.tolist()
    rows = [19, 0, 7, 6, 7]
    assert np.array_equal([each["data"] for each in dataset.__getitems__(rows)], whole[rows])
    [batch] = dataset.read_batches(np.array(rows), [len(rows)]) or []
    assert batch is not None
    assert torch.equal(batch["data"], default_collate(dataset.__getitems__(rows))["data"])
    assert str(dataset.locate(7)) == f"{tmp_path / 'part-2.npy'}, sample 0"
    again = pickle.loads(pickle.dumps(dataset))
    assert again[-1]["data"].tolist() == [57, 58, 59]
    assert len(pickle.dumps(dataset)) < 2000, "not the array"


def test_chunks_cover_all_rows_and_no_chunk_spans_two_files(tmp_path: Path) -> None:
    for number, rows in enumerate((5, 3)):
        save(tmp_path / f"{number}.npy", np.zeros((rows, 1 << 20), np.uint8))
    chunks = echelon.data.open(tmp_path).chunks
    assert chunks.starts.tolist() == [0, 4, 5, 8]
    assert chunks.sizes_bytes.tolist() == [4 << 20, 1 << 20, 3 << 20]


def test_fields_of_a_structured_array_are_columns(tmp_path: Path) -> None:
    dtype = [("x", ">f4", (2,)), ("name", "U3"), ("label", "<i8")]
    array = np.array([((1, 2), "a", 3), ((4, 5), "bc", 6)], dtype)
    save(tmp_path / "a.npy", array)
    dataset = echelon.data.open(tmp_path / "a.npy")
    assert dataset.column_names == ["x", "name", "label"]
    batch = default_collate(dataset.__getitems__([1, 0]))
    assert batch["x"].tolist() == [[4, 5], [1, 2]]
    assert (batch["name"], batch["label"].tolist()) == (["bc", "a"], [6, 3])
    [direct] = dataset.read_batches(np.array([1, 0]), [2]) or []
    assert direct is not None
    assert (direct["x"].dtype, direct["name"]) == (torch.float32, ["bc", "a"])
    assert list(echelon.data.open(tmp_path / "a.npy", columns=["label"])[0]) == ["label"]
    with pytest.raises(EchelonError, match=r"columns has 'lable', which .*a\.npy does not have"):
        echelon.data.open(tmp_path / "a.npy", columns=["lable"])


def test_all_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.zeros((4, 3)))
    save(tmp_path / "b.npy", np.zeros((4, 2)))
    save(tmp_path / "c.npy", np.zeros((4, 3), np.float32))
    save(tmp_path / "d.npy", np.array([{}], object))
    save(tmp_path / "e.npy", np.float64(1))
    (tmp_path / "f.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-8])
    (tmp_path / "g.npy").touch()
    with pytest.raises(EchelonError) as caught:
        echelon.data.open(tmp_path)
    told = [fault.what.replace(f"{tmp_path}/", "") for fault in caught.value.faults]
    assert [each for each in told if each.startswith("a row of")] == [
        "a row of b.npy is float64 of shape (2,), and one of a.npy float64 of shape (3,)",
        "a row of c.npy is float32 of shape (3,), and one of a.npy float64 of shape (3,)",
    ]
    assert "d.npy has Python objects, and reading them could run code" in told
    assert "e.npy has one number, not rows" in told
    assert any(each.startswith("f.npy is not a complete .npy file: ") for each in told)
    assert "g.npy is empty (0 bytes)" in told
    assert len(told) == 6
