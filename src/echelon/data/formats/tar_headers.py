"""The headers of tar files: from one to the next, in a file or in memory.

Python's tarfile is not used: it makes an object for every member, which takes ten times as long.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol
from zlib import adler32

from echelon.data.formats.byte_source import ByteSource

BLOCK_BYTES = 512
_HEADER = struct.Struct("100s24x12s12x8sc100x8s80x155s12x")
"""Name, size, checksum, type, magic and prefix."""
_ZEROS = bytes(BLOCK_BYTES)
POSIX_MAGIC = b"ustar\x0000"
_ADLER_PRIME = 65521

_READ_BYTES = 2 << 20
"""As much as a processor has cache of its own."""
_SHORT_READ_BYTES = 4 << 10
LONG_JUMP_BYTES = 128 << 10
"""From here on it is quicker to read single headers than all that is between them."""

_REGULAR = (b"0", b"\0", b"7")
_DIRECTORY = b"5"
_PAX, _GLOBAL_PAX, _GNU_LONG_NAME, _GNU_LONG_LINK = b"x", b"g", b"L", b"K"
_REFUSED_TYPES = {
    b"1": ("a hard link", "pack again with `tar --hard-dereference`, which stores the content"),
    b"2": ("a symbolic link", "pack again with `tar --dereference`, which stores the content"),
    b"S": ("a sparse file", "pack again without `--sparse`"),
}
_COPY_AGAIN = "copy or pack it again; `tar tf` shows how far it can be read"


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


class TarWindow(Protocol):
    """Bytes of a tar of which a part is in memory."""

    size: int

    def view(self, at: int, length: int) -> tuple[bytes | mmap.mmap, int]:
        """Return a buffer and the position in it where ``length`` bytes from ``at`` on are."""
        ...


class MemoryWindow:
    """The bytes of one sample."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def view(self, at: int, length: int) -> tuple[bytes, int]:
        if at + length > self.size:
            raise TarFormatError(at, "is cut off")
        return self.data, at


class FileWindow:
    """A file that is read from its beginning to its end, without what is between large members."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self.size = source, source.size
        self._buffer = mmap.mmap(-1, min(_READ_BYTES, max(self.size, 1)))
        """Of whole pages: where memory and file differ by a few bytes in their places within pages,
        some processors copy at half the speed."""
        self._filled_bytes = 0
        self._start = 0
        self.last_header = 0
        """From which the next one is reached: a long jump shows large members."""

    def view(self, at: int, length: int) -> tuple[mmap.mmap, int]:
        position = at - self._start
        if position < 0 or position + length > self._filled_bytes:
            if at + length > self.size:
                raise TarFormatError(at, "is cut off")
            is_far = at - self.last_header > LONG_JUMP_BYTES
            self._read(at, max(length, _SHORT_READ_BYTES if is_far else _READ_BYTES))
            position = 0
        self.last_header = at
        return self._buffer, position

    def view_loaded(self, at: int) -> memoryview:
        """Return what is in memory from a header on, at least that, or the rest of the file."""
        _, position = self.view(at, min(BLOCK_BYTES, self.size - at))
        return memoryview(self._buffer)[position : self._filled_bytes]

    def view_next(self, at: int) -> memoryview:
        """Read on from a place, whatever is there."""
        self._read(at, _READ_BYTES)
        return memoryview(self._buffer)[: self._filled_bytes]

    def _read(self, at: int, size: int) -> None:
        size = min(size, self.size - at)
        if size > len(self._buffer):
            self._buffer = mmap.mmap(-1, size)
        self._start, self._filled_bytes = at, 0
        buffer = memoryview(self._buffer)
        while self._filled_bytes < size:
            done = self._filled_bytes
            count = self._source.stream_into(buffer[done:size], at + done)
            if count == 0:
                raise TarFormatError(at + done, "is cut off")
            self._filled_bytes += count


class MemberWalk:
    """Goes from header to header and yields regular files; ends at an end mark, or at the end.

    Knows ustar, the long names of GNU tar, and pax.
    """

    def __init__(self, window: TarWindow, at: int = 0) -> None:
        self._window = window
        self.at = at
        """Where the next header is, or the end mark."""

    def __iter__(self) -> Iterator[TarMember]:
        window, at = self._window, self.at
        start = -1
        long_name: bytes | None = None
        long_size: int | None = None
        while at < window.size:
            data, position = window.view(at, BLOCK_BYTES)
            name, size_field, checksum, kind, magic, prefix = _HEADER.unpack_from(data, position)
            header = data[position : position + BLOCK_BYTES]
            if not _is_checksum_right(header, checksum):
                if header == _ZEROS:
                    break
                raise TarFormatError(at, "has a damaged header")
            if start < 0:
                start = at
            size = _parse_number(size_field, at)
            content = at + BLOCK_BYTES
            if kind in _REGULAR:
                size = size if long_size is None else long_size
                end = content + size + (-size & 511)
                if end > window.size:
                    raise TarFormatError(at, "is cut off in its last member")
                if long_name is None:
                    long_name = name.partition(b"\0")[0]
                    if magic == POSIX_MAGIC and prefix[0]:
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
                shown = decode_name(long_name or name.partition(b"\0")[0])
                raise TarFormatError(start, f"has {what}, {shown!r}", do)
            if at > window.size:
                raise TarFormatError(content, "is cut off")
            self.at = at
        self.at = at


def _is_checksum_right(header: bytes, field: bytes) -> bool:
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


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and the extension of a member; None for one that belongs to no sample, such as
    `README`, `.DS_Store` and `__index__`."""
    base = name.rfind(b"/") + 1
    dot = name.find(b".", base)
    if dot <= base or dot == len(name) - 1:
        return None
    return name[:dot], name[dot + 1 :].lower()


def decode_name(name: bytes) -> str:
    """Return a name as Python shows it; bytes that are not UTF-8 are kept."""
    return name.decode("utf-8", "surrogateescape")
