"""Documents of tokens packed into samples of a fixed length: which parts of which documents a
sample has, as a function of its number.

Documents are packed in the order of the data, the same in every epoch; the packed samples are what
is shuffled. So neither packing depends on a seed, and a position stays one number.

The packing is part of what a snapshot promises; `tests/data/test_document_packing.py` pins some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.best_fit import pack_rows, plan_rows
from echelon.data.documents import DatasetDocuments, Documents, FileDocuments, is_path_list
from echelon.data.file_dataset import FileDataset
from echelon.data.formats.mapped_tokens import TOKEN_TYPES
from echelon.data.formats.reader import (
    ChunkTable,
    SamplePlace,
    cut_files_evenly,
    group_by_piece,
    split_columns,
    sum_to_starts,
)
from echelon.data.open_files import find_files
from echelon.errors import EchelonError, Fault, suggest_nearest

IGNORED_TARGET = -100
"""What torch's losses leave out: `ignore_index`."""
_SECTION_TOKENS = 16 << 20
_SECTION_SAMPLES = 64
_SECTION_DOCUMENTS = 1 << 17
"""Documents are packed together with best_fit within so many tokens, or as many as so many samples
have, and so many documents: enough to leave next to nothing free, and read together."""
_KEPT_SECTIONS = 64
"""Of which it is kept which documents a sample has: 2 MB each at most, mostly much less."""

Strategy = Literal["concatenate", "best_fit"]


class Parts(NamedTuple):
    """Parts of documents in some samples, one after the other, sample by sample."""

    rows: NDArray[np.int64]
    """By part: which of the samples it is in."""
    places: NDArray[np.int64]
    """Its first place in the row of all documents."""
    counts: NDArray[np.int64]
    """Its tokens."""
    continues: NDArray[np.bool_]
    """Whether its document goes on after it."""


class PackedSamples(Protocol):
    """Which parts of documents each sample has."""

    chunks: ChunkTable

    def find_parts(self, rows: NDArray[np.int64]) -> Parts:
        """Return the parts of these samples."""
        ...


class ConcatenatedSamples:
    """All documents in a row, cut every `length` tokens. The last sample may have fewer."""

    def __init__(self, documents: Documents, length: int) -> None:
        self._documents, self._length = documents, length
        count = -(-documents.tokens // length)
        self.chunks = cut_files_evenly([count], max(1, round(length * documents.token_bytes)))

    def find_parts(self, rows: NDArray[np.int64]) -> Parts:
        """Return what lies between two cuts, from the places where documents begin."""
        begins = rows * self._length
        ends = np.minimum(begins + self._length, self._documents.tokens)
        firsts = self._documents.find_documents(begins)
        counts = self._documents.find_documents(ends - 1) - firsts + 1
        of_row = np.repeat(np.arange(len(rows)), counts)
        numbers = _count_within(counts) + firsts[of_row]
        begins, ends = begins[of_row], ends[of_row]
        document_ends = self._documents.get_starts(numbers + 1)
        places = np.maximum(self._documents.get_starts(numbers), begins)
        sizes = np.minimum(document_ends, ends) - places
        parts = Parts(of_row, places, sizes, document_ends > ends)
        has_tokens = sizes > 0  # an empty document has no part
        return parts if has_tokens.all() else _take_parts(parts, has_tokens)


class BestFitSamples:
    """Documents in samples that take them whole; a longer one is cut, and its rest packed."""

    def __init__(self, documents: Documents, length: int) -> None:
        self._documents, self._length = documents, length
        borders, counts, tokens = [0], [], []
        while borders[-1] < documents.count:
            starts = self._find_section(borders[-1])
            borders.append(borders[-1] + len(starts) - 1)
            lengths = np.diff(starts)
            rests = np.bincount(lengths % length, minlength=length + 1)
            rests[0] = 0
            counts.append(int((lengths // length).sum()) + plan_rows(rests, length).rows)
            tokens.append(int(starts[-1] - starts[0]))
        self._borders = np.array(borders)
        """The first document of each section, and the end."""
        sizes_bytes = np.array(tokens, np.float64) * documents.token_bytes
        self.chunks = ChunkTable(sum_to_starts(counts), np.ceil(sizes_bytes).astype(np.int64))
        self._kept: dict[int, tuple[Parts, NDArray[np.int64]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def find_parts(self, rows: NDArray[np.int64]) -> Parts:
        """Return the parts of samples, from the packing of their sections."""
        found = []
        for section, at, within in group_by_piece(self.chunks.starts, rows):
            parts, starts = self._pack_section(section)
            counts = starts[within + 1] - starts[within]
            own = _take_parts(parts, _count_within(counts) + np.repeat(starts[within], counts))
            found.append(own._replace(rows=np.repeat(np.arange(len(rows))[at], counts)))
        if len(found) == 1:  # then they are in order
            return found[0]
        joined = Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))
        return _take_parts(joined, joined.rows.argsort(kind="stable"))

    def _find_section(self, first: int) -> NDArray[np.int64]:
        """Return where the documents of the section from a document on begin, and its end."""
        tokens = max(_SECTION_TOKENS, _SECTION_SAMPLES * self._length)
        last = min(first + _SECTION_DOCUMENTS, self._documents.count)
        starts = self._documents.get_starts(np.arange(first, last + 1))
        count = int(starts.searchsorted(starts[0] + tokens, "right")) - 1
        return starts[: max(1, count) + 1]

    def _pack_section(self, section: int) -> tuple[Parts, NDArray[np.int64]]:
        """Return the parts of a section in the order of its samples, and where each sample begins
        among them."""
        if section in self._kept:
            return self._kept[section]
        first, last = self._borders[section : section + 2].tolist()
        starts = self._documents.get_starts(np.arange(first, last + 1))
        lengths = np.diff(starts)
        parts = -(-lengths // self._length)
        places = np.repeat(starts[:-1], parts) + _count_within(parts) * self._length
        left = np.repeat(starts[1:], parts) - places
        counts = np.minimum(left, self._length)
        order, sample_starts = pack_rows(counts, self._length)
        nowhere = np.broadcast_to(np.int64(0), len(order))  # which takes no memory
        packed = Parts(nowhere, places[order], counts[order], (left > counts)[order])
        if len(self._kept) >= _KEPT_SECTIONS:
            del self._kept[next(iter(self._kept))]
        self._kept[section] = (packed, sample_starts)
        return self._kept[section]


def _take_parts(parts: Parts, which: NDArray[Any]) -> Parts:
    return Parts(*(column[which] for column in parts))


def _count_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, … for each of these counts, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


class PackedReader:
    """The samples of packed documents, as tensors of `length` tokens each."""

    column_names = ["inputs", "targets", "document_ids", "position_ids"]  # noqa: RUF012

    def __init__(
        self, documents: Documents, samples: PackedSamples, length: int, pad_token_id: int
    ) -> None:
        self._documents, self._samples = documents, samples
        self._length, self._pad_token_id = length, pad_token_id
        self.chunks = samples.chunks

    def __len__(self) -> int:
        return int(self.chunks.starts[-1])

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the columns of these samples, in tensors of int64."""
        parts = self._samples.find_parts(rows)
        spans = self._documents.read_spans(parts.places, parts.counts + parts.continues)
        shape = (len(rows), self._length)
        layout = _lay_out(parts, *shape)
        padding = np.full(self._length, self._pad_token_id)
        counts, sources = layout.counts.tolist(), layout.sources.tolist()
        pieces = [
            (padding if source < 0 else spans[source])[:count]
            for source, count in zip(sources, counts, strict=True)
        ]
        inputs = np.empty(len(rows) * self._length, np.int64)
        np.concatenate(pieces, out=inputs, casting="unsafe")
        starts = np.cumsum(layout.counts) - layout.counts
        columns = {
            "inputs": inputs,
            "targets": _shift_tokens(inputs, layout, starts, parts, spans),
            "document_ids": _accumulate(0, starts, layout.document_ids, len(inputs)),
            "position_ids": _accumulate(1, starts, np.zeros_like(starts), len(inputs)),
        }
        return {name: torch.from_numpy(column.reshape(shape)) for name, column in columns.items()}

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples by number."""
        return split_columns(self.read_columns(np.asarray(rows, np.int64)), len(rows))

    def locate(self, row: int) -> SamplePlace:
        """Return where the first document of a sample is."""
        place = self._samples.find_parts(np.array([row])).places[:1]
        file, name = self._documents.locate(int(self._documents.find_documents(place)[0]))
        return SamplePlace(file, row, name)


class RowLayout(NamedTuple):
    """What some samples have, one after the other: parts of documents, and padding."""

    sources: NDArray[np.int64]
    """The number of a part; -1 for padding."""
    counts: NDArray[np.int64]
    document_ids: NDArray[np.int64]


def _lay_out(parts: Parts, rows: int, length: int) -> RowLayout:
    """Return what these samples have, with padding at the end of each that is not full."""
    sources = np.arange(len(parts.rows))
    free = length - np.bincount(parts.rows, parts.counts, rows).astype(np.int64)
    padded = np.flatnonzero(free)
    of_rows = np.concatenate([parts.rows, padded])
    order = of_rows.argsort(kind="stable")
    sources = np.concatenate([sources, np.full(len(padded), -1)])[order]
    counts = np.concatenate([parts.counts, free[padded]])[order]
    document_ids = _count_within(np.bincount(of_rows, minlength=rows))
    return RowLayout(sources, counts, np.where(sources < 0, -1, document_ids))


def _accumulate(
    step: int, starts: NDArray[np.int64], values: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return an array that has these values at these places, of which the first is 0, and goes on
    from each by `step`. numpy's repeat takes several times as long."""
    array = np.full(size, step)
    array[starts] = values
    array[starts[1:]] -= values[:-1] + step * (np.diff(starts) - 1)
    return np.cumsum(array, out=array)


def _shift_tokens(
    inputs: NDArray[np.int64],
    layout: RowLayout,
    starts: NDArray[np.int64],
    parts: Parts,
    spans: Sequence[NDArray[Any]],
) -> NDArray[np.int64]:
    """Return the token after each input where it is of the same document; the span of a part that
    continues has one more token for that."""
    targets = np.empty_like(inputs)
    targets[:-1] = inputs[1:]
    targets[starts + layout.counts - 1] = IGNORED_TARGET
    is_padding = layout.sources < 0
    for start, count in zip(
        starts[is_padding].tolist(), layout.counts[is_padding].tolist(), strict=True
    ):
        targets[start : start + count] = IGNORED_TARGET
    continued = np.flatnonzero(~is_padding & parts.continues[layout.sources])
    for at in continued.tolist():
        targets[starts[at] + layout.counts[at] - 1] = spans[layout.sources[at]][-1]
    return targets


class PackedDocuments(FileDataset):
    """Documents packed into samples, as `echelon.data.pack_documents` returns them.

    dataset[3]             one sample
    len(dataset)           the number of samples
    dataset.padding_share  the share of all tokens that are padding
    dataset.locate(3)      where its first document is
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        strategy: Strategy,
        pad_token_id: int = 0,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        samples: PackedSamples = (
            BestFitSamples(documents, length)
            if strategy == "best_fit"
            else ConcatenatedSamples(documents, length)
        )
        super().__init__(PackedReader(documents, samples, length, pad_token_id), None, transform)
        self.documents, self.tokens = documents.count, documents.tokens
        self.padding_share = 1 - self.tokens / (len(self) * length)
        self.grouping = (
            f"samples of {length:,} tokens from {self.tokens:,} in {self.documents:,} documents "
            f"({strategy})"
        )
        """What a resumed run compares."""


def pack_documents(
    documents: Any,
    *,
    length: int,
    strategy: Strategy = "concatenate",
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    dtype: str | None = None,
    lengths: Any = None,
    pad_token_id: int = 0,
    transform: Callable[[Any], Any] | None = None,
) -> PackedDocuments:
    """Return documents of tokens packed into samples of a fixed length, as a Dataset.

        data = echelon.data.pack_documents("train.bin", length=2048, eos_token_id=50256)
        data[0]  # {"inputs": …, "targets": …, "document_ids": …, "position_ids": …}

    documents     A `.bin` file of tokens without a header, or a `.npy` file; a folder, a pattern or
                  a list of them. Or a Dataset with a length, or a list: each sample is the tokens
                  of a document, or a dict with one column of them.
    length        The tokens of a sample.
    strategy      "concatenate": documents in a row are cut every `length` tokens. "best_fit": a
                  document that is not longer than a sample is not cut; what stays free is padded.
    eos_token_id  Of files: the token that ends a document. It belongs to the document.
    bos_token_id  Of files, instead: the token that begins a document.
    dtype         Of `.bin` files: the type of a token, uint16 without it; or uint32, uint8, int32,
                  int64.
    lengths       Of a Dataset: the tokens of each document. Without it all documents are read once.
    pad_token_id  The inputs where a sample is padded.
    transform     Called with every sample, as for `echelon.data.open`.

    All columns are tensors of `length` int64. `targets` is the next token of the same document, and
    -100, which torch's losses ignore, after its last one and in the padding. `document_ids` numbers
    the documents of a sample from 0 on, -1 is padding. `position_ids` counts from 0 in each.

    Every token of every document is an input once an epoch. Documents are packed in the order of
    the data, so a sample has neighbours; the samples are shuffled.
    """
    is_files = is_path_list(documents)
    faults = _find_option_faults(length, strategy, pad_token_id, eos_token_id, bos_token_id, dtype)
    if is_files:
        faults += _find_file_faults(eos_token_id, bos_token_id, dtype or "uint16", lengths)
    else:
        faults += _find_dataset_faults(documents, eos_token_id, bos_token_id, dtype)
    if faults:
        raise EchelonError(*faults)
    found: Documents
    if is_files:
        is_last = eos_token_id is not None
        token = eos_token_id if eos_token_id is not None else bos_token_id
        assert token is not None
        paths = [file.path for file in find_files(documents, (".bin", ".npy"))]
        found = FileDocuments(paths, dtype or "uint16", int(token), is_last)
    else:
        found = DatasetDocuments(documents, lengths)
    if not found.tokens:
        raise EchelonError(Fault("the documents have no tokens", "give documents with tokens"))
    return PackedDocuments(found, int(length), strategy, pad_token_id, transform)


def _find_option_faults(
    length: Any, strategy: Any, pad: Any, eos: Any, bos: Any, dtype: Any
) -> list[Fault]:
    faults = []
    if not _is_count(length, 1):
        faults.append(Fault(f"length={length!r}", "give a whole number of tokens, at least 1"))
    if strategy not in (strategies := ["concatenate", "best_fit"]):
        remedy = suggest_nearest(str(strategy), strategies)
        faults.append(Fault(f"strategy={strategy!r} is not known", remedy))
    for name, value in (("pad_token_id", pad), ("eos_token_id", eos), ("bos_token_id", bos)):
        if not _is_count(value, 0) and not (value is None and name != "pad_token_id"):
            faults.append(Fault(f"{name}={value!r}", "give the number of a token"))
    if dtype is not None and str(dtype) not in TOKEN_TYPES:
        known = f"give one of {', '.join(TOKEN_TYPES)}"
        faults.append(Fault(f"dtype={dtype!r} is no type of tokens", known))
    return faults


def _find_file_faults(eos: Any, bos: Any, dtype: str, lengths: Any) -> list[Fault]:
    faults = []
    if (eos is None) == (bos is None):
        what = "neither eos_token_id nor bos_token_id is" if eos is None else "both are"
        remedy = "give the token that ends a document, eos_token_id, or the one that begins it"
        faults.append(Fault(f"documents are in files, and {what} given", remedy))
    for name, value in (("eos_token_id", eos), ("bos_token_id", bos)):
        largest = np.iinfo(dtype).max if dtype in TOKEN_TYPES else 0
        if _is_count(value, 0) and dtype in TOKEN_TYPES and value > largest:
            what = f"{name}={value} is no {dtype}, whose largest number is {largest:,}"
            faults.append(Fault(what, "give the dtype that the files were written with"))
    if lengths is not None:
        what = "lengths is given, and documents are in files, which are searched for their borders"
        faults.append(Fault(what, "leave it out"))
    return faults


def _find_dataset_faults(documents: Any, eos: Any, bos: Any, dtype: Any) -> list[Fault]:
    faults = []
    if not hasattr(documents, "__len__") or not hasattr(documents, "__getitem__"):
        what = f"documents is a {type(documents).__name__}, without a length or samples by number"
        faults.append(Fault(what, "give files of tokens, or a Dataset with a length"))
    for name, value in (("eos_token_id", eos), ("bos_token_id", bos), ("dtype", dtype)):
        if value is not None:
            what = f"{name} is given, which is for files: documents is a {type(documents).__name__}"
            faults.append(Fault(what, "leave it out: each sample is a document"))
    return faults


def _is_count(value: Any, least: int) -> bool:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_number and bool(value >= least)
