"""Batches of any type are moved to a device, and cut into microbatches or refused.

The device is torch's `meta`, which every machine has.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from echelon.data.batch_structure import cut_batch, move_batch
from echelon.errors import EchelonError, ExitCode

META = torch.device("meta")


@dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor
    title: str = "pair"
    length: int = field(init=False, default=7)


class Columns(NamedTuple):
    x: Tensor
    more: dict[str, Any]


class BatchEncoding(UserDict[str, Any]):
    """As Hugging Face's: a dict that moves itself, with things of its own beside."""

    def __init__(self, data: dict[str, Any], encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device) -> BatchEncoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """As PyG's Data: tensors whose first dimension is nodes or edges."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Opaque:
    def __init__(self) -> None:
        self.rows = torch.ones(4)


def rows(count: int = 4) -> Tensor:
    return torch.arange(count * 2.0).view(count, 2)


# --- moving ---


def test_every_type_is_moved_and_kept() -> None:
    batch = {
        "pair": Pair(rows(), rows()),
        "columns": Columns(rows(), {"deep": [rows(), "text", None]}),
        "encoding": BatchEncoding({"ids": rows()}, "kept"),
        "graph": Graph(rows(9)),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "proxy": MappingProxyType({"x": rows()}),
        "tuple": (rows(), 3),
        "list": [rows()],
    }
    moved = move_batch(batch, META)
    tensors = [
        *(moved["pair"].x, moved["pair"].y, moved["columns"].x, moved["columns"].more["deep"][0]),
        *(moved["encoding"]["ids"], moved["graph"].nodes, moved["packed"].data),
        *(moved["proxy"]["x"], moved["tuple"][0], moved["list"][0]),
    ]
    assert {t.device.type for t in tensors} == {"meta"}
    kept = {"proxy": dict}
    assert {key: type(value) for key, value in moved.items()} == {
        key: kept.get(key, type(value)) for key, value in batch.items()
    }
    assert moved["columns"].more["deep"][1:] == ["text", None]
    assert moved["pair"].length == 7
    assert moved["encoding"].encodings == "kept"
    assert batch["pair"].x.device.type == "cpu"  # type: ignore[attr-defined]


def test_on_the_cpu_nothing_is_touched() -> None:
    batch = Opaque()
    assert move_batch(batch, torch.device("cpu")) is batch


def test_a_batch_that_cannot_be_moved() -> None:
    with pytest.raises(EchelonError) as caught:
        move_batch({"x": rows(), "more": Opaque()}, META)
    [fault] = caught.value.faults
    assert fault.what == (
        "a batch: more is a Opaque with a tensor in 'rows', which cannot be moved to meta"
    )
    assert "to(device)" in fault.do
    assert caught.value.exit == ExitCode.FAILED


# --- cutting ---


def cut(batch: Any, is_default_collated: bool = False) -> list[Any]:
    """The two halves of a batch of four."""
    return [cut_batch(batch, 4, start, start + 2, is_default_collated) for start in (0, 2)]


def test_containers_are_cut_along_the_first_dimension() -> None:
    texts = list("abcd")
    first, second = cut(
        (
            Pair(rows(), rows()),
            Columns(rows(), {"texts": texts, "scale": 0.5}),
            BatchEncoding({"ids": rows()}, "kept"),
            np.arange(4),
        )
    )
    for half, whole in ((first, slice(0, 2)), (second, slice(2, 4))):
        pair, columns, encoding, numbers = half
        assert isinstance(pair, Pair)
        assert isinstance(columns, Columns)
        assert isinstance(encoding, BatchEncoding)
        for tensor in (pair.x, pair.y, columns.x, encoding["ids"]):
            assert torch.equal(tensor, rows()[whole])
        assert columns.more == {"texts": texts[whole], "scale": 0.5}
        assert numbers.tolist() == list(range(4))[whole]
        assert (pair.title, pair.length, encoding.encodings) == ("pair", 7, "kept")


def test_lists_of_one_item_per_sample_are_cut_as_such() -> None:
    """As collate functions for detection make them."""
    images = tuple(torch.full((3, 2 + i, 2), float(i)) for i in range(4))
    targets = tuple({"boxes": torch.ones(i, 4), "name": str(i)} for i in range(4))
    first, second = cut((images, targets))
    assert [image[0, 0, 0].item() for image in first[0] + second[0]] == [0, 1, 2, 3]
    assert [target["name"] for target in second[1]] == ["2", "3"]
    samples = [(torch.ones(5), i) for i in range(4)]  # collate_fn=list
    assert [i for half in cut(samples) for _, i in half] == [0, 1, 2, 3]


def test_lists_of_default_collate_are_columns_in_any_number() -> None:
    samples = [([torch.tensor(i)] * 4, torch.tensor(i)) for i in range(4)]
    for half, numbers in zip(cut(default_collate(samples), True), ([0, 1], [2, 3]), strict=True):
        columns, last = half
        assert [column.tolist() for column in columns] == [numbers] * 4
        assert last.tolist() == numbers


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"x": rows(), "weights": rows(9)}, "a batch: weights is of shape (9, 2)"),
        ({"x": torch.tensor(1.0)}, "a batch: x is of shape ()"),
        (Graph(rows(4)), "a batch is a Graph"),
        (pack_sequence([torch.ones(1)] * 4), "a batch is a PackedSequence"),
        ([rows(), ["a", "b"]], "a batch: 1 is a list of 2 values"),
        ({"x": [rows()] * 4}, "a batch: x is a list of 4, which may be columns or samples"),
        ({"x": np.ones(3)}, "a batch: x is of shape (3,)"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, what: str) -> None:
    with pytest.raises(EchelonError) as caught:
        cut(batch)
    [fault] = caught.value.faults
    expected = f"{what}, which cannot be cut into pieces of its 4 samples for trainer.accumulate"
    assert fault.what == expected
    assert "trainer.accumulate=1" in fault.do
