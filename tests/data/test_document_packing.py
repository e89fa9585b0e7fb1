"""Documents packed into samples of a fixed length: every token once, and borders kept."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, default_collate

import echelon
from echelon.data import document_packing
from echelon.data.batches import make_source
from echelon.data.chunk_order import find_chunk_windows
from echelon.data.data_layout import find_layout_change
from echelon.data.document_packing import PackedDocuments, Strategy
from echelon.data.epoch_plan import make_epoch_plan
from echelon.errors import EchelonError

EOS = 0
CPU = torch.device("cpu")
STRATEGIES: list[Strategy] = ["concatenate", "best_fit"]


def write_documents(path: Path, lengths: list[int], dtype: str = "uint16") -> Path:
    """Documents that end with EOS; other tokens count from 1 on."""
    count = sum(lengths)
    tokens = 1 + np.arange(count) % 60_000
    tokens[np.cumsum(lengths) - 1] = EOS
    tokens.astype(dtype).tofile(path)
    return path


def make_lengths(count: int, seed: int = 3) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice([1, 2, 3, 5, 8, 13, 40]) for _ in range(count)]


def list_pairs(document: list[int]) -> list[tuple[int, int]]:
    """Return the tokens of a document with their targets."""
    return [*pairwise(document), *((last, -100) for last in document[-1:])]


def check_samples(data: PackedDocuments, documents: list[list[int]], length: int) -> None:
    """Every token of every document is an input once, with the token after it as target; within
    a sample parts of documents are numbered, and their tokens, too."""
    pairs = []
    padding = 0
    for sample in data:
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sample.items()} == {
            name: (torch.int64, (length,)) for name in data.column_names
        }
        columns = zip(*(sample[name].tolist() for name in data.column_names), strict=True)
        last, place = -1, 0
        for token, target, document, position in columns:
            is_new = document != last
            last, place = document, 0 if is_new else place + 1
            assert position == place
            if document < 0:
                assert (token, target) == (7, -100)
                padding += 1
            else:
                pairs.append((token, target))
        numbers = [number for number in sample["document_ids"].tolist() if number >= 0]
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))
    assert sorted(pairs) == sorted(pair for each in documents for pair in list_pairs(each))
    assert data.padding_share == pytest.approx(padding / (length * len(data)))
    assert (data.documents, data.tokens) == (len(documents), sum(map(len, documents)))


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(10, 99), max_size=20), min_size=1, max_size=12).filter(any),
    st.integers(1, 12),
    st.sampled_from(STRATEGIES),
)
def test_every_token_once_with_its_target(
    documents: list[list[int]], length: int, strategy: Strategy
) -> None:
    data = echelon.data.pack_documents(documents, length=length, strategy=strategy, pad_token_id=7)
    check_samples(data, documents, length)
    if strategy == "concatenate":
        inputs = [int(token) for sample in data for token in sample["inputs"]]
        assert inputs[: data.tokens] == [token for each in documents for token in each]
    whole = echelon.data.pack_documents(
        documents, length=length, strategy=strategy, lengths=np.array(list(map(len, documents)))
    )
    assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(data, whole, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [4, 16, 100])
def test_files_are_packed_as_their_documents_are(
    tmp_path: Path, strategy: Strategy, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several files, of which one ends within a document, and sections that do not divide."""
    monkeypatch.setattr(document_packing, "_SECTION_TOKENS", 90)
    monkeypatch.setattr(document_packing, "_SECTION_SAMPLES", 1)
    monkeypatch.setattr(document_packing, "_KEPT_SECTIONS", 2)
    write_documents(tmp_path / "a.bin", make_lengths(30))
    tokens = np.fromfile(tmp_path / "a.bin", np.uint16)[:-3]
    tokens.tofile(tmp_path / "a.bin")
    write_documents(tmp_path / "b.bin", make_lengths(21, seed=4))
    np.save(tmp_path / "c.npy", np.array([5, EOS, EOS, 6, EOS], np.int64))
    documents: list[list[int]] = []
    for name in ("a.bin", "b.bin", "c.npy"):
        path = tmp_path / name
        row = np.load(path) if path.suffix == ".npy" else np.fromfile(path, np.uint16)
        pieces = np.split(row, np.flatnonzero(row == EOS) + 1)
        documents += [piece.tolist() for piece in pieces if len(piece)]
    data = echelon.data.pack_documents(
        tmp_path, length=length, strategy=strategy, eos_token_id=EOS, pad_token_id=7
    )
    check_samples(data, documents, length)
    listed = echelon.data.pack_documents(
        documents, length=length, strategy=strategy, pad_token_id=7
    )
    rows = np.random.default_rng(1).integers(0, len(data), 50)
    [batch] = data.read_batches(rows, [len(rows)]) or []
    expected = default_collate(listed.__getitems__(rows.tolist()))
    again = default_collate(pickle.loads(pickle.dumps(data)).__getitems__(rows.tolist()))
    for name, column in batch.items():
        assert torch.equal(column, expected[name])
        assert torch.equal(column, again[name])
    assert data.chunks.starts[-1] == len(data)
    if strategy == "best_fit":
        assert len(data.chunks.starts) > 3


def test_best_fit_cuts_no_document_that_fits() -> None:
    lengths = make_lengths(200)
    documents = [[1 + number] * length for number, length in enumerate(lengths)]
    data = echelon.data.pack_documents(documents, length=13, strategy="best_fit")
    samples_of: dict[int, int] = {}
    for sample in data:
        for token in set(sample["inputs"][sample["document_ids"] >= 0].tolist()):
            samples_of[token] = samples_of.get(token, 0) + 1
    for number, length in enumerate(lengths):
        assert samples_of[1 + number] == -(-length // 13)
    cut = echelon.data.pack_documents(documents, length=13)
    assert cut.padding_share <= data.padding_share < 0.05


def test_the_packing_is_pinned() -> None:
    """A resumed run goes on with these samples."""
    documents = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13], [14], [], [15, 16]]
    cut = echelon.data.pack_documents(documents, length=5)
    assert torch.stack([sample["inputs"] for sample in cut]).tolist() == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12, 13, 14, 15],
        [16, 0, 0, 0, 0],
    ]
    assert cut[1]["targets"].tolist() == [-100, 8, 9, 10, 11]
    assert cut[1]["document_ids"].tolist() == [0, 1, 1, 1, 1]
    assert cut[1]["position_ids"].tolist() == [0, 0, 1, 2, 3]
    whole = echelon.data.pack_documents(documents, length=5, strategy="best_fit")
    assert torch.stack([sample["inputs"] for sample in whole]).tolist() == [
        [7, 8, 9, 10, 11],
        [1, 2, 3, 4, 0],
        [5, 6, 12, 13, 14],
        [15, 16, 0, 0, 0],
    ]
    assert whole[0]["targets"].tolist() == [8, 9, 10, 11, 12]


def test_tokens_that_begin_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    np.array([9, 1, 2, 9, 3, 9, 4, 5, 6], np.uint16).tofile(file)
    data = echelon.data.pack_documents(file, length=4, bos_token_id=9, strategy="best_fit")
    assert [sample["inputs"].tolist() for sample in data] == [
        [9, 4, 5, 6],
        [9, 1, 2, 0],
        [9, 3, 0, 0],
    ]
    assert str(data.locate(2)) == f"{file}, sample 2 (document 1, at token 3)"
    with pytest.raises(EchelonError) as caught:
        echelon.data.pack_documents(file, length=4, eos_token_id=9)
    [fault] = caught.value.faults
    assert fault.what == (
        f"eos_token_id=9, but {file} begins with the token 9, and ends with another one"
    )
    assert fault.do == "its documents seem to begin with the token: bos_token_id=9"


class Drawn(Dataset[Any]):
    """Documents of random tokens."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Tensor:
        return torch.randint(1, 100, (random.randrange(1, 9),), dtype=torch.int32)

    def locate(self, number: int) -> str:
        return f"number {number}"


def test_documents_of_a_dataset_are_the_same_whenever_they_are_read() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    data = echelon.data.pack_documents(Drawn(), length=8, transform=lambda sample: sample["inputs"])
    assert all(torch.equal(data[row], data[row]) for row in range(len(data)))
    assert torch.equal(torch.get_rng_state(), state)
    assert str(data.locate(0)) == "Drawn, sample 0 (document 0)"


def test_documents_in_columns_of_files(tmp_path: Path) -> None:
    lines = [
        '{"tokens": [1, 2, 3], "id": 1}',
        '{"tokens": [], "id": 2}',
        '{"tokens": [4], "id": 3}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    opened = echelon.data.open(tmp_path / "a.jsonl", columns=["tokens"])
    data = echelon.data.pack_documents(opened, length=4)
    assert data[0]["inputs"].tolist() == [1, 2, 3, 4]
    assert str(data.locate(0)) == f"{tmp_path}/a.jsonl, sample 0 (document 0)"
    with pytest.raises(EchelonError, match="document 0 has 2 columns: tokens, id"):
        echelon.data.pack_documents(echelon.data.open(tmp_path / "a.jsonl"), length=4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_samples_are_shuffled_in_windows_and_mixed(
    tmp_path: Path, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_packing, "_SECTION_TOKENS", 90)
    monkeypatch.setattr(document_packing, "_SECTION_SAMPLES", 1)
    monkeypatch.setattr("echelon.data.formats.reader.CHUNK_BYTES", 200)
    file = write_documents(tmp_path / "a.bin", make_lengths(120))
    data = echelon.data.pack_documents(file, length=16, strategy=strategy, eos_token_id=EOS)
    vars(data)["window_bytes"] = 500
    assert find_chunk_windows(data) is not None
    plan = make_epoch_plan(len(data), 4, 3, data=data)
    inputs: list[list[int]] = []
    for rank in range(3):
        source = make_source(data, "train_data", 0, CPU)
        for batch in source.iter_batches(plan.make_order(0, rank, 3, CPU), 0, CPU):
            columns: Any = batch.data
            inputs += [] if columns is None else columns["inputs"].tolist()
    assert sorted(inputs) == sorted(sample["inputs"].tolist() for sample in data)
    other = echelon.data.pack_documents(file, length=15, strategy=strategy, eos_token_id=EOS)
    said = find_layout_change(plan.layout, make_epoch_plan(len(other), 4, 3, data=other).layout)
    assert str(said).startswith("it has samples of 15 tokens from")
    mixed = echelon.data.mix({"a": data, "b": other}, {"a": 0.5, "b": 0.5})
    assert mixed[len(data)]["inputs"].tolist() == other[0]["inputs"].tolist()
    assert f"b 0.5 of {other.grouping}; " in mixed.describe()


def find_faults(*given: Any, **options: Any) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        echelon.data.pack_documents(*given, **{"length": 4, **options})
    assert all(fault.do for fault in caught.value.faults)
    return [fault.what for fault in caught.value.faults]


def test_what_is_refused(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a.bin", [2, 3])
    assert find_faults(file, length=0, strategy="bestfit", pad_token_id=-1, dtype="float16") == [
        "length=0",
        "strategy='bestfit' is not known",
        "pad_token_id=-1",
        "dtype='float16' is no type of tokens",
        "documents are in files, and neither eos_token_id nor bos_token_id is given",
    ]
    assert find_faults(file, eos_token_id=70_000, bos_token_id=1, lengths=[1]) == [
        "documents are in files, and both are given",
        "eos_token_id=70000 is no uint16, whose largest number is 65,535",
        "lengths is given, and documents are in files, which are searched for their borders",
    ]
    assert find_faults(iter([[1]]), eos_token_id=0, dtype="uint16") == [
        "documents is a list_iterator, without a length or samples by number",
        "eos_token_id is given, which is for files: documents is a list_iterator",
        "dtype is given, which is for files: documents is a list_iterator",
    ]
    assert find_faults(file, eos_token_id=EOS, dtype="uint32") == [
        f"{file} has 10 bytes, which are no whole number of uint32 tokens"
    ]
    assert find_faults([]) == find_faults([[], []]) == ["the documents have no tokens"]
    assert find_faults([[1], [0.5]]) == ["document 1 has float64 of shape (1,)"]
    assert find_faults([[1], [[1, 2]]]) == ["document 1 has int64 of shape (1, 2)"]
    assert find_faults([[1]], lengths=[1, 2]) == [
        "lengths has the shape (2,), but there are 1 documents"
    ]
    assert find_faults([[1]], lengths=[1.5]) == ["lengths has numbers of type float64"]
    assert find_faults([[1]], lengths=[-1]) == ["the length of document 0 is -1"]
    data = echelon.data.pack_documents([[1], [2, 3]], length=4, lengths=[1, 3])
    with pytest.raises(EchelonError, match="document 1 has 2 tokens, and had 3 when they were"):
        data[0]
