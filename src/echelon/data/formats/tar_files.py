"""Tar shards as WebDataset writes them, read at random.

    0001.jpg 0001.cls 0002.jpg 0002.cls …

Neighbouring members whose names agree up to the first dot of the base name are a sample; what
follows the dot is the column. A sample is read with one pread of all its members, headers included,
and taken apart in memory.

Directories and members without an extension are no samples. Links and sparse members are refused:
their content is elsewhere, and a sample without it would be a silent loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.index_file import load_index
from echelon.data.formats.reader import BadSampleError, SamplePlace
from echelon.data.formats.tar_headers import (
    MemberWalk,
    MemoryWindow,
    TarFormatError,
    decode_name,
    split_name,
)
from echelon.data.formats.tar_index import index_tar
from echelon.errors import EchelonError, Fault, suggest_nearest

KEY_COLUMN = "__key__"
"""The name that the members of a sample share, given as a column if it is asked for."""
_KIND = "tar-1"


class TarReader:
    """The samples of tar shards. Implements SampleReader; values are bytes."""

    def __init__(self, files: Sequence[DataPath], columns: Sequence[str] | None = None) -> None:
        """Find the samples; a shard that was never opened is read once for that.

        ``columns`` are the extensions to give, all if None. A sample that lacks one of them is bad.
        """
        self._index = load_index(files, _KIND, index_tar)
        counts: Counter[str] = Counter()
        for notes in self._index.notes:
            counts.update(notes["columns"])
        self.column_counts = dict(counts)
        """In how many samples each column is."""
        self.column_names = [*counts] if columns is None else [*columns]
        self.chunks = self._index.chunks
        self._columns = None if columns is None else dict.fromkeys(columns)
        unknown = [name for name in columns or () if name not in counts and name != KEY_COLUMN]
        if unknown:
            first = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
            raise EchelonError(
                *(
                    Fault(f"no sample of {first} has a column {name!r}", _suggest(name, counts))
                    for name in unknown
                )
            )

    def __len__(self) -> int:
        return len(self._index)

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples by number, the bytes of each member by its extension in lower case."""
        samples: list[dict[str, Any]] = [{}] * len(rows)
        # Each is taken apart as soon as it is read, while it is in the processor's cache.
        for position, data in self._index.iter_spans(rows):
            samples[position] = self._parse(rows[position], data)
        return samples

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have chunks read into the system's cache."""
        self._index.read_chunks_ahead(chunks)

    def locate(self, row: int) -> SamplePlace:
        """Return where a sample is, with its key if its first header can be read."""
        place = self._index.locate(row)
        try:
            data = self._index.read_spans([row])[0]
            parts = (split_name(member.name) for member in MemberWalk(MemoryWindow(data)))
            key = next((found[0] for found in parts if found), b"")
        except (BadSampleError, EchelonError, TarFormatError):
            return place
        return place._replace(key=decode_name(key))

    def _parse(self, row: int, data: bytes) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        sample_key = b""
        try:
            for member in MemberWalk(MemoryWindow(data)):
                parts = split_name(member.name)
                if parts is None:
                    continue
                key, extension = parts
                if key != (sample_key or key):
                    raise TarFormatError(member.start, "has members of another sample")
                sample_key, column = key, decode_name(extension)
                if column in sample:
                    raise TarFormatError(member.start, f"has two members {column!r}")
                if self._columns is None or column in self._columns:
                    sample[column] = data[member.data : member.data + member.size]
        except TarFormatError as error:
            place = self._index.locate(row)._replace(key=decode_name(sample_key))
            raise BadSampleError(place, f"it {error.why}") from error
        if self._columns is None:
            return sample
        if KEY_COLUMN in self._columns:
            sample[KEY_COLUMN] = decode_name(sample_key)
        if len(sample) < len(self._columns):
            missing = ", ".join(name for name in self._columns if name not in sample)
            place = self._index.locate(row)._replace(key=decode_name(sample_key))
            raise BadSampleError(place, f"it has no member {missing}")
        return {name: sample[name] for name in self._columns}


def _suggest(name: str, counts: Counter[str]) -> str:
    return suggest_nearest(name, counts) if counts else "the files have no samples"
