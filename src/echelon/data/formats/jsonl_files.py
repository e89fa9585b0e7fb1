"""Lines of JSON, one object a sample: `.jsonl`, and `.jsonl.gz` as bgzip writes it.

An ordinary gzip file can only be read from its beginning. bgzip cuts a file into blocks of at most
64 KB, each compressed by itself: a line is then named by where its block begins in the file, and
where the line begins in the block (16 bits, a "virtual offset").
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.column_choice import check_same_types, choose_columns
from echelon.data.formats.index_file import SampleSpans, load_index
from echelon.data.formats.reader import BadSampleError, DataFile, SamplePlace
from echelon.errors import EchelonError, Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.text import join_names

_KIND = "jsonl-1"
_READ_BYTES = 16 << 20
_GZIP = b"\x1f\x8b"
_BLOCK_HEADER = struct.Struct("<4s6xH2sHH")
"""gzip's header with one field more, the size of the block."""
_BLOCK_MAGIC = b"\x1f\x8b\x08\x04"
_MAX_BLOCK_BYTES = 1 << 16
_CACHED_BLOCKS = 320 << 20 >> 16
"""Lines of one window of the order are in blocks of 256 MB together."""
_EXACT_FLOATS = 2**53
"""Whole numbers up to here are the same in floating point."""


class JsonlReader:
    """The lines of files, each an object whose keys are columns. Lists of numbers become arrays,
    so that a batch has a row for each."""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        self._index = load_index([file.path for file in files], _KIND, find_lines)
        self._columns = columns
        self._is_blocked = [bool(notes["is_blocked"]) for notes in self._index.notes]
        self.chunks = self._index.chunks
        types = [notes["types"] for notes in self._index.notes]
        self.column_names = choose_columns(self._index.files, types, columns)
        check_same_types(self._index.files, types, self.column_names)

    def __len__(self) -> int:
        return len(self._index)

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the objects of lines. Raises BadSampleError for a line that is not one."""
        lines = self._read_lines(rows)
        return [self._parse_line(row, line) for row, line in zip(rows, lines, strict=True)]

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have chunks read into the system's cache."""
        for chunk in chunks:
            file = int(np.searchsorted(self._index.starts, self.chunks.starts[chunk], "right")) - 1
            self._index.read_chunks_ahead([chunk], 16 if self._is_blocked[file] else 0)

    def locate(self, row: int) -> SamplePlace:
        """Return the file and the number of a line in it. Empty lines are not counted."""
        return self._index.locate(row)

    def _read_lines(self, rows: Sequence[int]) -> list[bytes]:
        if not any(self._is_blocked):
            return self._index.read_spans(rows)
        lines = []
        for row, (file, offset, size) in zip(rows, self._index.find_spans(rows), strict=True):
            if not self._is_blocked[file]:
                lines += self._index.read_spans([row])
                continue
            try:
                lines.append(_read_blocked(self._index.files[file], offset, size))
            except (OSError, ValueError, zlib.error) as error:
                raise BadSampleError(self.locate(row), str(error)) from error
        return lines

    def _parse_line(self, row: int, line: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise BadSampleError(self.locate(row), f"it is not JSON: {error}") from error
        if not isinstance(sample, dict):
            what = f"it is of type {type(sample).__name__}, and a sample is an object: {{…}}"
            raise BadSampleError(self.locate(row), what)
        if self._columns is not None:
            if missing := [name for name in self._columns if name not in sample]:
                what = f"it has no {join_names(missing)}, only {join_names(list(sample))}"
                raise BadSampleError(self.locate(row), what)
            sample = {name: sample[name] for name in self._columns}
        for name, value in sample.items():
            if type(value) is list:
                sample[name] = _make_array(value)
        return sample


def _make_array(values: list[Any]) -> Any:
    """Return a list of numbers, or of lists of them that are equally long, as an array; another
    list as it is."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return values
    if array.dtype.kind not in "bif" or not array.size:
        return values
    if array.dtype.kind == "f" and np.abs(array).max() > _EXACT_FLOATS:
        return values  # whole numbers among them may have become others
    return array


# --- the index ---


def find_lines(file: DataPath) -> SampleSpans:
    """Return where the lines of a file are that are not empty. Raises EchelonError for a file
    whose lines are no samples."""
    with file.open("rb") as opened:
        head = opened.read(_BLOCK_HEADER.size)
    if not head:
        raise EchelonError(Fault(f"{file} is empty (0 bytes)", "write it again, or leave it out"))
    is_blocked = head.startswith(_GZIP)
    if is_blocked and _parse_block_size(head) is None:
        raise EchelonError(
            Fault(
                f"{file} is compressed as a whole, so that a line cannot be read without all "
                "before it",
                f"compress it in blocks: zcat {file} | bgzip > blocked.jsonl.gz, or decompress it",
            )
        )
    pieces = list(_find_blocked_lines(file) if is_blocked else _find_plain_lines(file))
    offsets, spans = (
        np.concatenate([piece[part] for piece in pieces]) if pieces else np.zeros(0, np.uint64)
        for part in (0, 1)
    )
    types = _read_types(file, offsets, spans, is_blocked) if len(offsets) else {}
    return SampleSpans(offsets, spans, {"is_blocked": is_blocked, "types": types})


class _LineSpans(NamedTuple):
    offsets: NDArray[np.uint64]
    spans: NDArray[np.uint64]


def _find_plain_lines(file: DataPath) -> Iterator[_LineSpans]:
    begin = position = 0
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + position
            position += len(data)
            if isinstance(file, RemoteFile):
                file.prefetch_after(position)
            if len(ends):
                yield _drop_empty(np.concatenate([[begin], ends[:-1] + 1]), ends)
                begin = int(ends[-1]) + 1
    if begin < position:
        yield _drop_empty(np.array([begin]), np.array([position]))


def _drop_empty(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> _LineSpans:
    spans = ends - begins
    kept = spans > 1  # one character is no object; it may be a carriage return
    return _LineSpans(begins[kept].astype(np.uint64), spans[kept].astype(np.uint64))


def _find_blocked_lines(file: DataPath) -> Iterator[_LineSpans]:
    """The same for a file in blocks. Offsets are virtual, lengths are those of the lines."""
    begin_virtual, begin, position = 0, 0, 0  # of the line that is not complete yet
    offset = 0
    size = get_size(file)
    while offset < size:
        try:
            text, following = _read_block(file, offset)
        except (ValueError, zlib.error, OSError) as error:
            what = f"{file} is damaged at byte {offset:,}: {error}"
            raise EchelonError(Fault(what, "write it again with bgzip")) from error
        if isinstance(file, RemoteFile):
            file.prefetch_after(following)
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        if len(ends):
            begins = np.concatenate([[begin], ends[:-1] + 1 + position])
            virtual = np.concatenate([[begin_virtual], (offset << 16) + ends[:-1] + 1])
            spans = ends + position - begins
            kept = spans > 1
            yield _LineSpans(virtual[kept].astype(np.uint64), spans[kept].astype(np.uint64))
            last = int(ends[-1]) + 1
            begin = position + last
            begin_virtual = (offset << 16) + last if last < len(text) else following << 16
        position += len(text)
        offset = following
    if position - begin > 1:
        yield _LineSpans(np.array([begin_virtual], np.uint64), np.array([position - begin]))


def _read_types(
    file: DataPath, offsets: NDArray[np.uint64], spans: NDArray[np.uint64], is_blocked: bool
) -> dict[str, str]:
    """Return the keys of the first line with the types of their values. Raises where it is no
    object, or where the last line is cut off."""
    for number in (len(offsets) - 1, 0):
        offset, size = int(offsets[number]), int(spans[number])
        if is_blocked:
            line = _read_blocked(file, offset, size)
        else:
            with file.open("rb") as opened:
                opened.seek(offset)
                line = opened.read(size)
        try:
            sample = json.loads(line)
        except ValueError as error:
            last = " (its last)" if number else ""
            what = f"line {number + 1:,}{last} of {file} is not JSON: {error}"
            remedy = "write the file again: it may be cut off" if number else "write one a line"
            raise EchelonError(Fault(what, remedy)) from error
    if not isinstance(sample, dict):
        what = f"line 1 of {file} is of type {type(sample).__name__}"
        raise EchelonError(Fault(what, 'write an object in each line: {"text": "…"}'))
    return {name: _name_type(value) for name, value in sample.items()}


def _name_type(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "text", int: "number", float: "number", list: "list", dict: "object"}
    return names[type(value)]


# --- blocks ---


def _read_blocked(file: DataPath, offset: int, size: int) -> bytes:
    """Return `size` bytes from a virtual offset on."""
    block, within = offset >> 16, offset & 0xFFFF
    line = b""
    while len(line) < size:
        text, block = _load_block(file, block)
        line += text[within : within + size - len(line)]
        within = 0
    return line


@functools.lru_cache(_CACHED_BLOCKS)
def _load_block(file: DataPath, offset: int) -> tuple[bytes, int]:
    """Return a block as `_read_block` does, and keep it."""
    return _read_block(file, offset)


def _read_block(file: DataPath, offset: int) -> tuple[bytes, int]:
    """Return the text of the block that begins at an offset, and where the next one begins."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        data = opened.read(_MAX_BLOCK_BYTES)
    size = _parse_block_size(data)
    if size is None or len(data) < size:
        raise ValueError("no complete block of bgzip begins there")
    return zlib.decompress(data[:size], wbits=31), offset + size  # it checks gzip's checksum


def _parse_block_size(data: bytes) -> int | None:
    """Return the size of a block from its header, or None where it is no block of bgzip."""
    if len(data) < _BLOCK_HEADER.size:
        return None
    magic, extra, name, length, size = _BLOCK_HEADER.unpack_from(data)
    is_block = (magic, extra, name, length) == (_BLOCK_MAGIC, 6, b"BC", 2)
    return size + 1 if is_block else None
