"""Tar shards as WebDataset writes them, read at random.

    0001.jpg 0001.cls 0002.jpg 0002.cls …

Neighbouring members whose names agree up to the first dot of the base name are a sample; what
follows the dot is the column. A sample is read with one pread of all its members, headers included,
and taken apart in memory. Python's tarfile is not used: it makes an object for every member, which
takes ten times as long as what is done here.

Directories and members without an extension are no samples. Links and sparse members are refused:
their content is elsewhere, and a sample without it would be a silent loss.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import adler32

import numpy as np

from echelon.data.formats.index_file import SampleSpans, load_index
from echelon.data.formats.reader import BadSampleError, SamplePlace
from echelon.errors import EchelonError, Fault, suggest_nearest

KEY_COLUMN = "__key__"
"""The name that the members of a sample share, given as a column if it is asked for."""
_KIND = "tar-1"
_BLOCK = 512
_HEADER = struct.Struct("100s24x12s12x8sc100x8s80x155s12x")
"""Name, size, checksum, type, magic and prefix."""
_ZEROS = bytes(_BLOCK)
_POSIX_MAGIC = b"ustar\x0000"
_ADLER_PRIME = 65521

_READ_BYTES = 1 << 20
_SHORT_READ_BYTES = 4 << 10
_LONG_JUMP_BYTES = 128 << 10
"""From here on it is quicker to read single headers than all that is between them."""

_REGULAR = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_PAX, _GLOBAL_PAX, _GNU_LONG_NAME, _GNU_LONG_LINK = b"x", b"g", b"L", b"K"
_REFUSED_TYPES = {
    b"1": ("a hard link", "pack again with `tar --hard-dereference`, which stores the content"),
    b"2": ("a symbolic link", "pack again with `tar --dereference`, which stores the content"),
    b"S": ("a sparse file", "pack again without `--sparse`"),
}
_COMPRESSIONS = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
_COPY_AGAIN = "copy or pack it again; `tar tf` shows how far it can be read"


class TarReader:
    """The samples of tar shards. Implements SampleReader; values are bytes."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None = None) -> None:
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
        spans = self._index.read_spans(rows)
        return [self._parse(row, data) for row, data in zip(rows, spans, strict=True)]

    def locate(self, row: int) -> SamplePlace:
        """Return where a sample is, with its key if its first header can be read."""
        place = self._index.locate(row)
        try:
            data = self._index.read_spans([row])[0]
            parts = (_split_name(member.name) for member in _MemberWalk(_MemoryWindow(data)))
            key = next((found[0] for found in parts if found), b"")
        except (BadSampleError, EchelonError, TarFormatError):
            return place
        return place._replace(key=_decode(key))

    def _parse(self, row: int, data: bytes) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        sample_key = b""
        try:
            for member in _MemberWalk(_MemoryWindow(data)):
                parts = _split_name(member.name)
                if parts is None:
                    continue
                key, extension = parts
                if key != (sample_key or key):
                    raise TarFormatError(member.start, "has members of another sample")
                sample_key, column = key, _decode(extension)
                if column in sample:
                    raise TarFormatError(member.start, f"has two members {column!r}")
                if self._columns is None or column in self._columns:
                    sample[column] = data[member.data : member.data + member.size]
        except TarFormatError as error:
            place = self._index.locate(row)._replace(key=_decode(sample_key))
            raise BadSampleError(place, f"it {error.why}") from error
        if self._columns is None:
            return sample
        if KEY_COLUMN in self._columns:
            sample[KEY_COLUMN] = _decode(sample_key)
        if len(sample) < len(self._columns):
            missing = ", ".join(name for name in self._columns if name not in sample)
            place = self._index.locate(row)._replace(key=_decode(sample_key))
            raise BadSampleError(place, f"it has no member {missing}")
        return {name: sample[name] for name in self._columns}


def _suggest(name: str, counts: Counter[str]) -> str:
    return suggest_nearest(name, counts) if counts else "the files have no samples"


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def index_tar(file: Path) -> SampleSpans:
    """Return where the samples of a tar are. Raises EchelonError if it is damaged."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        _refuse_compression(file, os.pread(handle, 8, 0))
        return _index_members(_FileWindow(handle, size))
    except TarFormatError as error:
        what = f"{file} {error.why}, at byte {error.at:,}"
        raise EchelonError(Fault(what, error.do)) from error
    finally:
        os.close(handle)


def _refuse_compression(file: Path, head: bytes) -> None:
    for magic, (name, program) in _COMPRESSIONS.items():
        if head.startswith(magic):
            raise EchelonError(
                Fault(
                    f"{file} is compressed with {name}: its samples cannot be read one by one",
                    f"unpack it once with `{program} {file}`; pictures hardly get larger by that",
                )
            )


def _index_members(window: _FileWindow) -> SampleSpans:
    offsets, ends = array("Q"), array("Q")
    columns: Counter[bytes] = Counter()
    skipped: list[bytes] = []
    skipped_count = 0
    sample_key: bytes | None = None
    walk = _MemberWalk(window)
    for member in walk:
        parts = _split_name(member.name)
        if parts is None:
            skipped_count += 1
            if not skipped:
                skipped.append(member.name)
            continue
        key, extension = parts
        columns[extension] += 1
        if key == sample_key:
            ends[-1] = member.end
        else:
            sample_key = key
            offsets.append(member.start)
            ends.append(member.end)
    _check_end(window, walk.at)
    starts = np.array(offsets, np.uint64)
    notes = {
        "columns": {_decode(name): count for name, count in columns.items()},
        "skipped": skipped_count,
        "first_skipped": _decode(skipped[0]) if skipped else None,
    }
    return SampleSpans(starts, np.array(ends, np.uint64) - starts, notes)


def _split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and the extension of a member; None for one that belongs to no sample, such as
    `README`, `.DS_Store` and `__index__`."""
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    if dot <= base or dot == len(name) - 1:
        return None
    return name[:dot], name[dot + 1 :].lower()


def _check_end(window: _FileWindow, at: int) -> None:
    """Refuse a tar that was cut off between two members, or that has more after its end."""
    if at >= window.size:
        raise TarFormatError(
            at,
            "has no end mark, so it may be cut off",
            "copy or pack it again; if nothing is missing, append the mark with "
            "`head -c 1024 /dev/zero >> FILE`",
        )
    while at < window.size:
        data, position = window.view(at, min(_BLOCK, window.size - at))
        end = min(position + window.size - at, len(data))
        if any(data[position:end]):
            raise TarFormatError(
                at,
                "goes on after its end mark, where other programs stop",
                "if tars were joined with cat, join them with `tar --concatenate`",
            )
        at += end - position


# --- headers ------------------------------------------------------------------------------------


class TarFormatError(Exception):
    """What is wrong with a tar, worded to follow its name, and at which byte."""

    def __init__(self, at: int, why: str, do: str = _COPY_AGAIN) -> None:
        super().__init__(at, why, do)
        self.at, self.why, self.do = at, why, do


class TarMember(NamedTuple):
    """A regular file in a tar, by offsets."""

    name: bytes
    start: int
    """Of its first header: a long name has one of its own before that of the member."""
    data: int
    size: int
    end: int
    """Where the next header begins."""


class _Window(Protocol):
    """Bytes of a tar of which a part is in memory."""

    size: int

    def view(self, at: int, length: int) -> tuple[bytes | bytearray, int]:
        """Return a buffer and the position in it where ``length`` bytes from ``at`` on are."""
        ...


class _MemoryWindow:
    """The bytes of one sample."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def view(self, at: int, length: int) -> tuple[bytes, int]:
        if at + length > self.size:
            raise TarFormatError(at, "is cut off")
        return self.data, at


class _FileWindow:
    """A file that is read once, from its beginning to its end, without what is between large
    members."""

    def __init__(self, handle: int, size: int) -> None:
        self._handle, self.size = handle, size
        self._buffer = bytearray()
        self._start = self._last = 0

    def view(self, at: int, length: int) -> tuple[bytearray, int]:
        position = at - self._start
        if position + length > len(self._buffer):
            if at + length > self.size:
                raise TarFormatError(at, "is cut off")
            is_far = at - self._last > _LONG_JUMP_BYTES
            self._read(at, max(length, _SHORT_READ_BYTES if is_far else _READ_BYTES))
            position = 0
        self._last = at
        return self._buffer, position

    def _read(self, at: int, size: int) -> None:
        size = min(size, self.size - at)
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        self._start, done = at, 0
        while done < size:
            count = os.preadv(self._handle, [memoryview(self._buffer)[done:]], at + done)
            if count == 0:
                raise TarFormatError(at + done, "is cut off")
            done += count


class _MemberWalk:
    """Goes from header to header and yields regular files; ends at an end mark, or at the end.

    Knows ustar, the long names of GNU tar, and pax.
    """

    def __init__(self, window: _Window) -> None:
        self._window = window
        self.at = 0
        """Where the next header is, or the end mark."""

    def __iter__(self) -> Iterator[TarMember]:
        window, at = self._window, 0
        start = -1
        long_name: bytes | None = None
        long_size: int | None = None
        while at < window.size:
            data, position = window.view(at, _BLOCK)
            name, size_field, checksum, kind, magic, prefix = _HEADER.unpack_from(data, position)
            header = data[position : position + _BLOCK]
            if not _is_checksum_right(header, checksum):
                if header == _ZEROS:
                    break
                raise TarFormatError(at, "has a damaged header")
            if start < 0:
                start = at
            size = _parse_number(size_field, at)
            content = at + _BLOCK
            if kind in _REGULAR:
                size = size if long_size is None else long_size
                end = content + size + (-size & 511)
                if end > window.size:
                    raise TarFormatError(at, "is cut off in its last member")
                if long_name is None:
                    long_name = name.partition(b"\0")[0]
                    if magic == _POSIX_MAGIC and prefix[0]:
                        long_name = prefix.partition(b"\0")[0] + b"/" + long_name
                self.at = at = end
                if not long_name.endswith(b"/"):  # in the oldest format, a directory
                    yield TarMember(long_name, start, content, size, end)
                start, long_name, long_size = -1, None, None
                continue
            at = content + size + (-size & 511)
            if kind == _DIRECTORY:
                at = content
                start, long_name, long_size = -1, None, None
            elif kind == _GNU_LONG_NAME:
                data, position = window.view(content, size)
                long_name = bytes(data[position : position + size]).partition(b"\0")[0]
            elif kind == _PAX:
                data, position = window.view(content, size)
                records = _parse_pax(bytes(data[position : position + size]), content)
                long_name = records.get(b"path", long_name)
                if b"size" in records:
                    long_size = int(records[b"size"])
            elif kind not in (_GLOBAL_PAX, _GNU_LONG_LINK):
                what, do = _REFUSED_TYPES.get(kind, (f"a member of type {kind!r}", _COPY_AGAIN))
                shown = _decode(long_name or name.partition(b"\0")[0])
                raise TarFormatError(start, f"has {what}, {shown!r}", do)
            if at > window.size:
                raise TarFormatError(content, "is cut off")
            self.at = at
        self.at = at


def _is_checksum_right(header: bytes | bytearray, field: bytes) -> bool:
    """Return whether the checksum of a header is that of its bytes, its own counted as blanks."""
    try:
        stored = int(field.partition(b"\0")[0], 8)
    except ValueError:
        return False
    # The lower half of Adler-32 is 1 plus the sum of all bytes, modulo a prime. This takes a tenth
    # of the time of sum(header), which is asked where the two differ.
    total = (adler32(header) & 0xFFFF) - (adler32(field) & 0xFFFF) + 8 * ord(" ")
    if total % _ADLER_PRIME == stored % _ADLER_PRIME:
        return True
    # Some old programs took bytes as signed.
    signed = sum(byte - 256 if byte > 127 else byte for byte in header)
    return signed - sum(byte - 256 if byte > 127 else byte for byte in field) + 256 == stored


def _parse_number(field: bytes, at: int) -> int:
    """Return a number of a header: octal digits, or binary after a set bit for large ones."""
    try:
        return int(field.partition(b"\0")[0] or b"0", 8)
    except ValueError:
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        if not field.strip(b" \0"):
            return 0
        raise TarFormatError(at, "has a damaged header") from None


def _parse_pax(data: bytes, at: int) -> dict[bytes, bytes]:
    """Return the records of a pax header: `30 mtime=1700000000.5\\n`."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        digits, blank, _ = data[position : position + 24].partition(b" ")
        if not blank or not digits.isdigit():
            break
        end = position + int(digits)
        key, equals, value = data[position + len(digits) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(data):
            raise TarFormatError(at, "has a damaged header")
        if key.startswith(b"GNU.sparse"):
            what, do = _REFUSED_TYPES[b"S"]
            raise TarFormatError(at, f"has {what}", do)
        records[key] = value[:-1]
        position = end
    return records
