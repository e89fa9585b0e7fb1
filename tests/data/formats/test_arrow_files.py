"""Arrow files and streams, and folders as Hugging Face's `save_to_disk` writes them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
from torch.utils.data import default_collate

import echelon
from echelon.errors import EchelonError


def make_table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "i": pa.array(numbers, pa.int64()),
            "text": [f"t{n}" for n in numbers],
            "x": pa.array([[n, 0.5] for n in numbers], pa.list_(pa.float32())),
        }
    )


def write_stream(path: Path, table: pa.Table, batch_rows: int, **options: Any) -> Path:
    settings = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(str(path), table.schema, options=settings) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def save_to_disk(folder: Path, parts: Sequence[pa.Table], indices: list[int] | None = None) -> None:
    """What Hugging Face's library writes."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_stream(folder / name, part, 3)
    state: dict[str, Any] = {"_data_files": [{"filename": name} for name in names]}
    if indices is not None:
        table = pa.table({"indices": pa.array(indices, pa.uint64())})
        write_stream(folder / "indices.arrow", table, 2)
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def read_numbers(path: Any, **options: Any) -> list[int]:
    return [int(each["i"]) for each in echelon.data.open(path, **options)]


def refuse(path: Path) -> str:
    with pytest.raises(EchelonError) as caught:
        echelon.data.open(path)
    return str(caught.value)


@pytest.mark.slow
def test_files_and_streams(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrow", make_table(7), 3)
    pa.feather.write_feather(make_table(5, 7), tmp_path / "b.feather", "uncompressed", chunksize=2)
    pa.feather.write_feather(make_table(5, 12), tmp_path / "c.feather", "zstd", chunksize=2)
    dataset = echelon.data.open(tmp_path)
    assert read_numbers(tmp_path) == list(range(17))
    assert dataset.chunks.starts.tolist() == [0, 3, 6, 7, 9, 11, 12, 14, 16, 17]
    sample = dataset[13]
    assert (sample["text"], sample["x"].tolist()) == ("t13", [13, 0.5])
    rows = [16, 0, 8, 4]
    [batch] = dataset.read_batches(np.array(rows), [len(rows)]) or []
    collated = default_collate(dataset.__getitems__(rows))
    assert torch.equal(batch["x"], collated["x"])
    assert (batch["text"], batch["x"].dtype) == (collated["text"], torch.float32)
    assert str(dataset.locate(8)) == f"{tmp_path / 'b.feather'}, sample 1"
    assert pickle.loads(pickle.dumps(dataset))[16]["text"] == "t16"
    assert list(echelon.data.open(tmp_path, columns=["text"])[2]) == ["text"]


def test_a_saved_dataset_and_its_indices(tmp_path: Path) -> None:
    parts = [make_table(4), make_table(3, 4)]
    save_to_disk(tmp_path / "plain", parts)
    save_to_disk(tmp_path / "chosen", parts, [6, 0, 3, 3])
    assert read_numbers(tmp_path / "plain") == list(range(7))
    chosen = echelon.data.open(tmp_path / "chosen")
    assert read_numbers(tmp_path / "chosen") == [6, 0, 3, 3]
    assert (len(chosen), int(chosen.chunks.starts[-1])) == (4, 4)
    assert chosen.locate(0).number == 2
    assert read_numbers([tmp_path / "chosen", tmp_path / "plain"]) == [6, 0, 3, 3, *range(7)]


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save_to_disk(folder / "train", [make_table(4)])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"{folder} has several splits: train, test" in refuse(folder)
    assert read_numbers(folder / "train") == [0, 1, 2, 3]
    state = folder / "train" / "state.json"
    state.write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    assert "lacks gone.arrow, which its state.json names" in refuse(folder / "train")
    state.write_text("{}")
    assert "names no files" in refuse(folder / "train")
    save_to_disk(tmp_path / "bad", [make_table(4)], [4])
    assert "are of more than its 4 rows" in refuse(tmp_path / "bad")


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    good = write_stream(tmp_path / "a.arrow", make_table(7), 3)
    (tmp_path / "b.arrow").write_bytes(good.read_bytes()[:-300])
    (tmp_path / "c.arrow").touch()
    (tmp_path / "d.arrow").write_text("a text")
    write_stream(tmp_path / "e.arrow", make_table(100), 100, compression="zstd")
    text = refuse(tmp_path)
    assert "b.arrow " in text
    assert "c.arrow is empty (0 bytes)" in text
    assert "d.arrow " in text
    assert "e.arrow is a compressed Arrow stream" in text
    assert "a.arrow" not in text
