"""The file of a run's curves: append-only, in numbered series, with checksums.

    RUN/.curves/curves     frames, one after the other

A frame has what was read of metrics.jsonl since the frame before:

    head      magic, sizes of what follows, checksum of the facts and the entries
    facts     JSON: how far metrics.jsonl was read, names of new series, counts
    entries   a `_ENTRY` for each segment, by series and level
    data      columns of float64, or of float32 where that is the same numbers

A segment is a part of one level of one series. A frame counts when all of it is in the file, so one
that a kill or a full disk cut is cut off by the next writer. A segment is checked when it is read
first. Series that were logged together share the column of their steps.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RAW_COLUMNS = 2
"""Of points: step and value."""
BUCKET_COLUMNS = 7
"""Of buckets: lowest and highest step, lowest value, its step, highest value, its step, mean."""
STEP_COLUMNS = {RAW_COLUMNS: 1, BUCKET_COLUMNS: 2}
"""How many of the columns are steps alone, which series share."""

_MAGIC = b"ECHCRV02"
_HEAD = struct.Struct("<8sQQQI4x")
"""Magic, bytes of facts, number of entries, bytes of data, checksum."""
_ENTRY = np.dtype(
    [
        *(("series", "<u4"), ("level", "u1"), ("steps_type", "u1"), ("values_type", "u1")),
        *(("unused", "u1"), ("length", "<u4"), ("steps_crc", "<u4"), ("values_crc", "<u4")),
        *(("steps_at", "<u8"), ("values_at", "<u8")),
    ],
    align=False,
)
_TYPES = (np.dtype("<f8"), np.dtype("<f4"))
_MAX_FACTS = 1 << 28
SEGMENT_RECORDS = 8192
"""In a segment at most. Reading one number takes reading its segment once."""
_CACHED_BYTES = 96 << 20
"""Of upper levels, of all runs. The operating system keeps what was read of the others."""


class DamagedCurvesError(Exception):
    """The file is not what was written."""


class NewSegment(NamedTuple):
    """Records to be appended to a level of a series."""

    series: int
    level: int
    records: Floats
    """Of shape (columns, records)."""


@dataclass(frozen=True)
class _Frame:
    entries: NDArray[np.void]
    facts: dict[str, Any]


class _Segment(NamedTuple):
    """An entry of a frame, as plain numbers."""

    series: int
    level: int
    steps_type: int
    values_type: int
    unused: int
    length: int
    """Records."""
    steps_crc: int
    values_crc: int
    steps_at: int
    values_at: int


class CurveFile:
    """An open file of curves. Several threads may read it; one process at a time appends."""

    def __init__(self, handle: int) -> None:
        """Take over a handle. Nothing is read yet: see `read_frames`."""
        self._handle = handle
        self._frames: list[_Frame] = []
        self._levels: dict[tuple[int, int], Level] = {}
        self._checked: set[int] = set()
        self.end = 0
        """Where the frames that were read end."""

    @classmethod
    def open(cls, path: Path, *, makes_file: bool = False) -> CurveFile:
        """Open a file, or make one. A file that may only be read is opened for that. Raises
        OSError."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        if makes_file:
            return cls(os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
        try:
            return cls(os.open(path, flags | os.O_RDWR))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
        return cls(os.open(path, flags | os.O_RDONLY))

    @classmethod
    def make_in_memory(cls) -> CurveFile:
        """Return a file that has no name and no place on a disk."""
        return cls(os.memfd_create("curves", os.MFD_CLOEXEC))

    def __del__(self) -> None:
        # Threads that still draw from it hold a reference, so it is closed after the last one.
        os.close(self._handle)

    def is_at(self, path: Path) -> bool:
        """Return whether the file is still the one at a path."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except OSError:
            return False

    def get_size(self) -> int:
        return os.fstat(self._handle).st_size

    def get_owner(self) -> int:
        return os.fstat(self._handle).st_uid

    # --- frames ---

    def read_frames(self) -> list[dict[str, Any]]:
        """Read the frames that were added since the last call, and return their facts. What
        follows the last whole frame is left alone."""
        found = []
        size = self.get_size()
        while (frame := self._read_frame(size)) is not None:
            self._frames.append(frame)
            found.append(frame.facts)
        if found:
            self._levels = {}
        return found

    def _read_frame(self, size: int) -> _Frame | None:
        head = os.pread(self._handle, _HEAD.size, self.end)
        if len(head) < _HEAD.size:
            return None
        magic, facts_bytes, entries, data_bytes, checksum = _HEAD.unpack(head)
        index_bytes = facts_bytes + entries * _ENTRY.itemsize
        end = self.end + _HEAD.size + index_bytes + data_bytes
        if magic != _MAGIC or index_bytes > _MAX_FACTS or end > size:
            return None
        index = os.pread(self._handle, index_bytes, self.end + _HEAD.size)
        if len(index) < index_bytes or zlib.crc32(index) != checksum:
            return None
        self.end = end
        facts = json.loads(index[:facts_bytes])
        return _Frame(np.frombuffer(index, _ENTRY, entries, facts_bytes), facts)

    def append_frame(self, facts: dict[str, Any], segments: Iterable[NewSegment]) -> None:
        """Add a frame after those that were read, in place of what a killed writer left there.
        Raises OSError, after which the file is as before for its readers."""
        text = json.dumps(facts).encode()
        text += b" " * (-len(text) % 8)
        ordered = sorted(segments, key=lambda segment: segment.series)
        pieces = [piece for segment in ordered for piece in _split_segment(segment)]
        entries = np.zeros(len(pieces), _ENTRY)
        index_bytes = len(text) + entries.nbytes
        data = _FrameData(self.end + _HEAD.size + index_bytes)
        for number, (series, level, records) in enumerate(pieces):
            split = STEP_COLUMNS[len(records)]
            steps, values = data.add(records[:split], True), data.add(records[split:], False)
            entries[number] = (
                *(series, level, steps.type_code, values.type_code, 0, records.shape[1]),
                *(steps.checksum, values.checksum, steps.position, values.position),
            )
        index = text + entries.tobytes()
        head = _HEAD.pack(_MAGIC, len(text), len(pieces), data.size, zlib.crc32(index))
        try:
            os.ftruncate(self._handle, self.end)
            position = self.end
            for part in (head, index, *data.parts):
                _write_all(self._handle, part, position)
                position += len(part)
        except OSError:
            os.ftruncate(self._handle, self.end)
            raise
        self._checked.update(data.positions)
        self.end = position
        self._frames.append(_Frame(entries, facts))
        self._levels = {}

    # --- levels ---

    def get_level(self, series: int, level: int) -> Level:
        """Return one level of a series; empty if nothing of it is in the file."""
        found = self._levels.get((series, level))
        if found is None:
            parts = []
            for frame in self._frames:
                first, last = np.searchsorted(frame.entries["series"], [series, series + 1])
                own = frame.entries[first:last]
                parts.append(own[own["level"] == level].tobytes())
            entries = np.frombuffer(b"".join(parts), _ENTRY)
            found = self._levels[series, level] = Level(self, level, entries)
        return found

    def read_segment(self, segment: _Segment, first: int, stop: int) -> Floats:
        """Return records of a segment; raises DamagedCurvesError if they are not those that were
        written."""
        columns = BUCKET_COLUMNS if segment.level else RAW_COLUMNS
        split = STEP_COLUMNS[columns]
        records = np.empty((columns, stop - first))
        steps = _Placed(segment.steps_at, segment.steps_type, segment.steps_crc)
        values = _Placed(segment.values_at, segment.values_type, segment.values_crc)
        self._read_columns(steps, segment.length, records[:split], first)
        self._read_columns(values, segment.length, records[split:], first)
        return records

    def _read_columns(self, placed: _Placed, count: int, records: Floats, first: int) -> None:
        """Fill in records from a number on."""
        position, type_code, checksum = placed
        if type_code >= len(_TYPES):
            raise DamagedCurvesError
        number_type = _TYPES[type_code]
        item_bytes = number_type.itemsize
        columns, wanted = records.shape
        is_checked = position in self._checked
        if not is_checked or wanted == count:  # one read is quicker than one for each column
            data = os.pread(self._handle, columns * count * item_bytes, position)
            if len(data) < columns * count * item_bytes:
                raise DamagedCurvesError
            if not is_checked and zlib.crc32(data) != checksum:
                raise DamagedCurvesError
            self._checked.add(position)
            whole = np.frombuffer(data, number_type).reshape(columns, count)
            records[:] = whole[:, first : first + wanted]
            return
        size = wanted * item_bytes
        for column in range(columns):
            data = os.pread(self._handle, size, position + (column * count + first) * item_bytes)
            if len(data) < size:
                raise DamagedCurvesError
            records[column] = np.frombuffer(data, number_type)


class Level:
    """The records of one level of a series, in segments."""

    def __init__(self, file: CurveFile, level: int, entries: NDArray[np.void]) -> None:
        self._file, self._level, self._entries = file, level, entries
        self._starts = np.concatenate([[0], np.cumsum(entries["length"].astype(np.int64))])
        self.count = int(self._starts[-1])

    def take(self, numbers: NDArray[np.int64]) -> Floats:
        """Return the records of these numbers, which ascend, as an array of columns."""
        if not len(numbers):
            return np.empty((RAW_COLUMNS if self._level == 0 else BUCKET_COLUMNS, 0))
        if self.count <= SEGMENT_RECORDS and self._level:
            return _pick_columns(self._load_all(), numbers)
        bounds = np.searchsorted(numbers, self._starts)
        parts = []
        for i in (bounds[1:] > bounds[:-1]).nonzero()[0].tolist():
            own = numbers[bounds[i] : bounds[i + 1]] - self._starts[i]
            first, stop = int(own[0]), int(own[-1]) + 1
            records = self._file.read_segment(self._get_segment(i), first, stop)
            parts.append(_pick_columns(records, own - first))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def take_range(self, first: int, stop: int) -> Floats:
        """Return the records from a number to before another."""
        return self.take(np.arange(first, max(first, stop)))

    def _get_segment(self, number: int) -> _Segment:
        return _Segment(*self._entries[number].item())

    def _load_all(self) -> Floats:
        """Return all records. They are kept, for the upper levels are needed by every picture."""

        def read_all() -> Floats:
            segments = map(self._get_segment, range(len(self._entries)))
            parts = [self._file.read_segment(each, 0, each.length) for each in segments]
            return np.concatenate(parts, axis=1)

        # The last segment is in this level alone, and another frame would bring another one.
        return _upper_levels.get(self._file, int(self._entries[-1]["values_at"]), read_all)


def _pick_columns(records: Floats, numbers: NDArray[np.int64]) -> Floats:
    first, last = int(numbers[0]), int(numbers[-1])
    is_range = last - first + 1 == len(numbers)
    return records[:, first : last + 1] if is_range else records[:, numbers]


class _LevelCache:
    """The levels that were read last, of all files, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._records: OrderedDict[tuple[int, int], tuple[CurveFile, Floats]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: CurveFile, position: int, read: Callable[[], Floats]) -> Floats:
        """Return the records that are known by a position in a file, or read them."""
        key = (id(file), position)
        with self._lock:
            if (found := self._records.get(key)) is not None:
                self._records.move_to_end(key)
                return found[1]
        records = read()
        with self._lock:
            if key not in self._records:
                self._records[key] = (file, records)  # holding the file keeps its id taken
                self._bytes += records.nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._records.popitem(last=False)[1][1].nbytes
        return records

    def forget(self, file: CurveFile) -> None:
        """Drop what was read of a file that nobody draws from any more."""
        with self._lock:
            for key in [key for key in self._records if key[0] == id(file)]:
                self._bytes -= self._records.pop(key)[1].nbytes


_upper_levels = _LevelCache(_CACHED_BYTES)


def forget_segments(file: CurveFile) -> None:
    """Drop what is in memory of a file, so that it can be closed."""
    _upper_levels.forget(file)


# --- writing ---


class _Placed(NamedTuple):
    position: int
    type_code: int
    checksum: int


class _FrameData:
    """The columns of a frame, each with its position. Columns of steps that are there already are
    not written again."""

    def __init__(self, position: int) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.positions: list[int] = []
        self._begin = position
        self._known: dict[bytes, _Placed] = {}

    def add(self, columns: Floats, is_shared: bool) -> _Placed:
        type_code = int(_fits_float32(columns))
        data = columns.astype(_TYPES[type_code]).tobytes()
        if is_shared and (known := self._known.get(data)) is not None:
            return known
        placed = _Placed(self._begin + self.size, type_code, zlib.crc32(data))
        padded = data + bytes(-len(data) % 8)
        self.parts.append(padded)
        self.positions.append(placed.position)
        self.size += len(padded)
        if is_shared:
            self._known[data] = placed
        return placed


def _fits_float32(columns: Floats) -> bool:
    """Return whether numbers stay the same in half the size, as most that a GPU computed do."""
    with np.errstate(over="ignore"):
        first = columns[:, :1]  # most often it shows already that they do not
        if (first.astype(np.float32) != first).any():
            return False
        return bool((columns.astype(np.float32) == columns).all())


def _split_segment(segment: NewSegment) -> Sequence[NewSegment]:
    count = segment.records.shape[1]
    return [
        segment._replace(records=segment.records[:, first : first + SEGMENT_RECORDS])
        for first in range(0, count, SEGMENT_RECORDS)
    ]


def _write_all(handle: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, position)
        view, position = view[written:], position + written
