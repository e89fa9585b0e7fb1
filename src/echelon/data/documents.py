"""Documents of tokens, as packing reads them: all in one row, in the order of the data.

A place in that row is the number of tokens before it. Where each document begins there is the index
of a token file, which is mapped, or an array of 8 bytes a document of a Dataset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.data.file_dataset import FileDataset
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.column_choice import raise_faults
from echelon.data.formats.document_index import find_documents
from echelon.data.formats.index_file import load_index
from echelon.data.formats.mapped_tokens import Tokens, map_tokens
from echelon.data.formats.reader import ChunkTable, SamplePlace, sum_to_starts
from echelon.data.formats.remote_rows import RemoteRows
from echelon.data.sample_seeds import derive_seeds, keep_generators, seed_generators
from echelon.errors import EchelonError, Fault
from echelon.utils.text import join_names

_COUNT_BLOCK = 1024
"""Documents that are read together to be counted."""
_TOKEN_BYTES = 8
"""Of a token in a Dataset that does not say how large its chunks are."""


class Documents(Protocol):
    """A row of documents."""

    count: int
    tokens: int
    token_bytes: float
    """What a token takes while it is read."""

    def get_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places at which documents begin, which is where those before them end; the
        number after the last one stands for the end of all."""
        ...

    def find_documents(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the documents that have these places."""
        ...

    def read_spans(
        self, places: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Return tokens from each place on. No span reaches into another document."""
        ...

    def locate(self, document: int) -> tuple[DataPath, str]:
        """Return where a document is, and its name there."""
        ...


class FileDocuments:
    """The documents of token files. `token` is the last one of each, or the first one."""

    def __init__(self, paths: Sequence[DataPath], dtype: str, token: int, is_last: bool) -> None:
        self._paths, self._dtype = list(paths), dtype
        mapped = self._map_files()
        kind = f"documents-1/{dtype}-{'eos' if is_last else 'bos'}{token}"
        build = partial(find_documents, dtype=dtype, token=token, is_last=is_last)
        self._index = load_index(self._paths, kind, build)
        self._require_border(token, is_last)
        self._item_bytes = [tokens.itemsize for tokens in mapped]
        self._starts = sum_to_starts([len(tokens) for tokens in mapped])
        """The place of the first token of each file, and the end."""
        self._mapped: list[Tokens] | None = mapped
        self.count, self.tokens = len(self._index), int(self._starts[-1])
        self.token_bytes = float(max(self._item_bytes))

    def __getstate__(self) -> dict[str, Any]:
        """A pickled array would be copied: every process maps the files itself."""
        return {**self.__dict__, "_mapped": None}

    def get_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where documents begin, from the indexes of their files."""
        starts = np.full(len(numbers), self.tokens)
        files = self._index.starts.searchsorted(numbers, "right") - 1
        for file in np.unique(files).tolist():
            if file < len(self._paths):
                mine = files == file
                offsets = self._index.map_offsets(file)[numbers[mine] - self._index.starts[file]]
                within = offsets.astype(np.int64) // self._item_bytes[file]
                starts[mine] = within + self._starts[file]
        return starts

    def find_documents(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the documents that have these places, from the indexes of their files."""
        found = np.empty(len(places), np.int64)
        files = self._starts.searchsorted(places, "right") - 1
        for file in np.unique(files).tolist():
            mine = files == file
            offsets = (places[mine] - self._starts[file]) * self._item_bytes[file]
            within = self._index.map_offsets(file).searchsorted(offsets.astype(np.uint64), "right")
            found[mine] = within.astype(np.int64) - 1 + self._index.starts[file]
        return found

    def read_spans(
        self, places: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Return views of the mapped files; of objects, copies."""
        mapped = self._mapped = self._mapped or self._map_files()
        files = self._starts.searchsorted(places, "right") - 1
        firsts = places - self._starts[files]
        for file in np.unique(files).tolist():
            if isinstance(tokens := mapped[file], RemoteRows):
                tokens.fetch_spans(firsts[files == file], counts[files == file])
        rows = zip(files.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        return [mapped[file][first : first + count] for file, first, count in rows]

    def locate(self, document: int) -> tuple[DataPath, str]:
        """Return the file of a document, and its number and first token there."""
        place = self._index.locate(document)
        file = int(self._index.starts.searchsorted(document, "right")) - 1
        token = int(self.get_starts(np.array([document]))[0] - self._starts[file])
        return place.file, f"document {place.number:,}, at token {token:,}"

    def _map_files(self) -> list[Tokens]:
        mapped = [map_tokens(path, self._dtype) for path in self._paths]
        raise_faults([each for each in mapped if isinstance(each, Fault)])
        return [each for each in mapped if not isinstance(each, Fault)]

    def _require_border(self, token: int, is_last: bool) -> None:
        """Raise where the token is at the other end of the documents. A single shard may look so
        by chance, where a corpus was cut between two documents."""
        near, far = ("ends", "begins") if is_last else ("begins", "ends")
        if all(notes[far] and not notes[near] for notes in self._index.notes):
            names = join_names([str(path) for path in self._paths], 2)
            here, there = ("eos", "bos") if is_last else ("bos", "eos")
            what = f"{names} {far[:-1]} with the token {token}, and {near[:-1]} with another one"
            if len(self._paths) == 1:
                what = f"{names} {far} with the token {token}, and {near} with another one"
            raise EchelonError(
                Fault(
                    f"{here}_token_id={token}, but {what}",
                    f"its documents seem to {far[:-1]} with the token: {there}_token_id={token}",
                )
            )


class DatasetDocuments:
    """The documents of a Dataset: rows of tokens, or dicts with one column of them. A document is
    the same whenever it is read, also where the Dataset draws random numbers."""

    def __init__(self, dataset: Any, lengths: Any = None) -> None:
        self._dataset = dataset
        is_files = isinstance(dataset, FileDataset)
        self._may_draw = dataset.may_draw if is_files else not isinstance(dataset, (list, tuple))
        counted = self._count_tokens() if lengths is None else _read_lengths(lengths, len(dataset))
        self._starts = sum_to_starts(counted)
        self.count, self.tokens = len(counted), int(self._starts[-1])
        self.token_bytes = float(_TOKEN_BYTES)
        chunks = getattr(dataset, "chunks", None)
        if isinstance(chunks, ChunkTable) and self.tokens:
            self.token_bytes = int(chunks.sizes_bytes.sum()) / self.tokens

    def get_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where documents begin."""
        return self._starts[numbers]

    def find_documents(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the documents that have these places."""
        return self._starts.searchsorted(places, "right").astype(np.int64) - 1

    def read_spans(
        self, places: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Return parts of documents, each of which is read once."""
        numbers = self.find_documents(places)
        wanted = np.unique(numbers).tolist()
        documents = dict(zip(wanted, self._read_documents(wanted), strict=True))
        for number, document in documents.items():
            expected = int(self._starts[number + 1] - self._starts[number])
            if len(document) != expected:
                raise EchelonError(
                    Fault(
                        f"document {number} has {len(document):,} tokens, and had {expected:,} "
                        "when they were counted",
                        "give the lengths of these documents, or let them be counted again; a "
                        "document may not change",
                    )
                )
        firsts = places - self._starts[numbers]
        rows = zip(numbers.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        return [documents[number][first : first + count] for number, first, count in rows]

    def locate(self, document: int) -> tuple[DataPath, str]:
        """Return where a document is, as far as the Dataset knows."""
        own = getattr(self._dataset, "locate", None)
        place = None if own is None else own(document)
        if isinstance(place, SamplePlace):
            return place.file, f"document {place.number:,}"
        return Path(type(self._dataset).__name__), f"document {document:,}"

    def _count_tokens(self) -> list[int]:
        size = len(self._dataset)
        blocks = (range(i, min(i + _COUNT_BLOCK, size)) for i in range(0, size, _COUNT_BLOCK))
        return [len(each) for block in blocks for each in self._read_documents(block)]

    def _read_documents(self, numbers: Sequence[int]) -> list[NDArray[Any]]:
        if isinstance(self._dataset, FileDataset) and not self._may_draw:
            samples = self._dataset.__getitems__(list(numbers))
        elif not self._may_draw:
            samples = [self._dataset[number] for number in numbers]
        else:
            samples = []
            with keep_generators():
                for number, seed in zip(numbers, derive_seeds(0, 0, numbers), strict=True):
                    seed_generators(seed)
                    samples.append(self._dataset[number])
        pairs = zip(numbers, samples, strict=True)
        return [_read_tokens(number, sample) for number, sample in pairs]


def _read_tokens(number: int, sample: Any) -> NDArray[Any]:
    """Return the tokens of a document. Raises where it has others than whole numbers in a row."""
    if isinstance(sample, Mapping):
        if len(sample) != 1:
            raise EchelonError(
                Fault(
                    f"document {number} has {len(sample)} columns: {join_names(list(sample))}",
                    "choose the one with the tokens: echelon.data.open(…, columns=[…])",
                )
            )
        [sample] = sample.values()
    tokens = sample.numpy() if isinstance(sample, torch.Tensor) else np.asarray(sample)
    if not tokens.size:
        return np.zeros(0, np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise EchelonError(
            Fault(
                f"document {number} has {tokens.dtype} of shape {tokens.shape}",
                "give each document as one row of whole numbers",
            )
        )
    return tokens


def _read_lengths(lengths: Any, documents: int) -> NDArray[np.int64]:
    """Return the numbers of tokens that the user has counted."""
    counted = np.asarray(lengths)
    what = ""
    if counted.shape != (documents,):
        what = f"lengths has the shape {counted.shape}, but there are {documents:,} documents"
    elif counted.dtype.kind not in "iu":
        what = f"lengths has numbers of type {counted.dtype}"
    elif documents and counted.min() < 0:
        what = f"the length of document {counted.argmin()} is {counted.min()}"
    if what:
        remedy = "give the number of tokens of each document, in the order of the Dataset"
        raise EchelonError(Fault(what, remedy))
    return counted.astype(np.int64)


def is_path_list(given: Any) -> bool:
    """Return whether what was given is files rather than documents."""
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(each, (str, os.PathLike)) for each in given)
    return isinstance(given, (str, os.PathLike))
