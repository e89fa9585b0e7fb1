"""Many headers of a tar at once, by numpy.

Most headers are plain: a regular file with a name of at most 100 bytes, perhaps after a pax header
with its times. Those of several reads are looked at together, as words of eight bytes. What is not
plain is left to `MemberWalk`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.tar_headers import BLOCK_BYTES, LONG_JUMP_BYTES, FileWindow

_WORD = np.dtype("<u8")
_HALF = np.uint64(32)
MIN_SCAN_BYTES = 64 << 10
"""Of less than that, single headers are read sooner."""
_MANY_HEADERS, _MAX_HEADERS = 2048, 8192
"""When no more is read before they are looked at, and how many there are at most then."""
_MAX_READS = 64


def _make_word(text: bytes) -> np.uint64:
    word: np.uint64 = np.uint64(int.from_bytes(text, "little"))
    return word


_MAGIC, _MAGIC_MASK = _make_word(b"\0ustar\0\0"), _make_word(b"\0\xff\xff\xff\xff\xff\0\0")
"""For the bytes from 256 on."""
_IS_GNU = _make_word(b"\0\0\0\0\0\0\xff\0")
"""For the same bytes: zero in the format of POSIX, whose names may have a prefix."""
_PREFIX_START = _make_word(b"\0\xff\0\0\0\0\0\0")
"""For the bytes from 344 on."""

_TYPE, _PAX, _REGULAR = (
    _make_word(b"\0\0\0\0" + byte + b"\0\0\0") for byte in (b"\xff", b"x", b"0")
)
"""For the bytes from 152 on."""

# Words with numbers: 8 octal digits of the size; 6 of the checksum, a zero, and a byte that may be
# anything; the last 3 digits of the size, a zero or a blank, and others. An octal digit is its
# value when it is taken exclusively-or with a zero, and has no other bits then.
_ZEROS = np.frombuffer(b"0" * 8 + b"000000\0\0" + b"000\0\0\0\0\0", _WORD)[:, None]
_OTHER_BITS = np.frombuffer(
    b"\xf8" * 8 + b"\xf8" * 6 + b"\xff\0" + b"\xf8\xf8\xf8\xdf\0\0\0\0", _WORD
)[:, None]
_EIGHT_DIGITS = (8 ** np.arange(8)[::-1]).astype(np.float32)
_THREE_DIGITS = _make_word(b"\xff\xff\xff\0\0\0\0\0")
_ELEVEN_DIGITS = 8 ** np.arange(11)[::-1]
_CHECKSUM_AND_BYTES = np.array([*(8 ** np.arange(6)[::-1] + 1), 0, 1], np.float32)
"""The checksum, and the sum of the bytes in which it is."""
_CHECKSUM_TEXT = 6 * ord("0") - 8 * ord(" ")
"""The checksum is of a header with blanks in its place: by so much are its zeros more."""

_NAME_WORDS = 13
_NAME_END = _make_word(b"\xff\xff\xff\xff\0\0\0\0")
"""For the bytes from 96 on: a name has 100."""


class PlainMembers(NamedTuple):
    """Members in the order of the file, in arrays."""

    names: NDArray[np.uint8]
    """A row for each, filled up with zeros, of which each has at least one; a multiple of 8."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Fields(NamedTuple):
    """What headers say."""

    names: NDArray[np.uint8]
    blocks: NDArray[np.int64]
    """Of their content; anything for a header that is not plain."""
    is_plain: NDArray[np.bool_]
    """Whether it is a regular file or a pax header in the usual notation, undamaged."""
    is_pax: NDArray[np.bool_]


class PlainScan:
    """Finds plain members, those of several reads together: a call of numpy takes as long as some
    hundred headers."""

    def __init__(self, window: FileWindow) -> None:
        self._window = window
        self._headers = np.empty((_MAX_HEADERS, BLOCK_BYTES // 8), _WORD)
        """Blocks that may be headers. Content may look like one as well: a tar within a tar."""
        self._reads = 1
        """Fewer where members are not plain, as what was read after those is read again."""

    def find_members(self, at: int) -> PlainMembers | None:
        """Return plain members from a header on, up to the first one that is not plain; None if
        there are none, or too few to be worth it."""
        found, refused = self._find_headers(at)
        if not len(found):
            return None
        fields = _parse_headers(self._headers[: len(found)])
        ends = found + fields.blocks
        ends += 1
        is_plain = fields.is_plain
        is_plain &= ends <= (self._window.size - at) // BLOCK_BYTES
        if refused:
            is_plain[refused] = False
        chain = _follow_chain(found, ends, is_plain)
        self._reads = min(2 * self._reads, _MAX_READS) if len(chain) == len(found) else 1
        starts, ends, is_pax = found[chain], ends[chain], fields.is_pax[chain]
        if is_pax.any():
            # A pax header belongs to the next one, which is of a member.
            is_alone = is_pax & np.append(is_pax[1:], True)
            count = int(is_alone.argmax()) if is_alone.any() else len(chain)
            is_member = ~is_pax[:count]
            follows_pax = np.append(False, is_pax)[:count]
            starts = np.where(follows_pax, np.roll(starts[:count], 1), starts[:count])[is_member]
            ends, chain = ends[:count][is_member], chain[:count][is_member]
        if not len(chain):
            return None
        self._window.last_header = at + int(found[chain[-1]]) * BLOCK_BYTES
        names = fields.names if len(chain) == len(found) else fields.names[chain]
        return PlainMembers(names, at + starts * BLOCK_BYTES, at + ends * BLOCK_BYTES)

    def _find_headers(self, at: int) -> tuple[NDArray[np.int64], list[int]]:
        """Return the numbers of blocks, from a header on, that may be headers, and which of them
        are pax headers that say more than plain ones."""
        window, begin = self._window, at
        none: NDArray[np.int64] = np.zeros(0, np.int64)
        if at + BLOCK_BYTES > window.size:
            return none, []
        buffer = window.view_loaded(at)
        if len(buffer) < MIN_SCAN_BYTES:
            return none, []
        parts: list[NDArray[np.int64]] = []
        refused: list[int] = []
        count = 0
        while True:
            blocks = np.frombuffer(buffer, _WORD, len(buffer) // BLOCK_BYTES * 64).reshape(-1, 64)
            found = np.flatnonzero(blocks[:, 32] & _MAGIC_MASK == _MAGIC)[: _MAX_HEADERS - count]
            headers = self._headers[count : count + len(found)]
            blocks.take(found, axis=0, out=headers, mode="clip")  # other modes copy twice
            is_last = (
                begin + len(buffer) + BLOCK_BYTES > window.size
                or len(parts) + 1 == self._reads
                or count + len(found) >= _MANY_HEADERS
                # Where members are large, it is quicker to read from header to header.
                or len(found) * LONG_JUMP_BYTES < len(buffer)
            )
            next_begin = begin + len(blocks) * BLOCK_BYTES
            pax = np.flatnonzero(headers[:, 19] & _TYPE == _PAX)
            if len(pax):
                is_harmless = _leaves_name_and_size(blocks, found[pax] + 1, headers[pax])
                refused += (count + pax[~is_harmless]).tolist()
                if not (is_last or is_harmless[-1]) and 0 < pax[-1] == len(found) - 1:
                    # Its content may be in the next read.
                    next_begin = begin + int(found[-1]) * BLOCK_BYTES
                    found = found[:-1]
                    refused.pop()
            parts.append(found + (begin - at) // BLOCK_BYTES)
            count += len(found)
            if is_last:
                return np.concatenate(parts), refused
            begin, buffer = next_begin, window.view_next(next_begin)


def _leaves_name_and_size(
    blocks: NDArray[np.uint64], begins: NDArray[np.int64], headers: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return which pax headers, with their content from some blocks on, leave name and size to the
    header that follows."""
    lengths = (headers.view(np.uint8)[:, 124:135] & 7) @ _ELEVEN_DIGITS
    is_harmless = begins < len(blocks)
    is_harmless[is_harmless] = _has_only_mtime(
        blocks[begins[is_harmless], :2], lengths[is_harmless]
    )
    for number in np.flatnonzero(~is_harmless).tolist():
        begin, length = int(begins[number]), int(lengths[number])
        content = blocks[begin : begin + -(-length // BLOCK_BYTES)].tobytes()[:length]
        is_harmless[number] = len(content) == length and not any(
            word in content for word in (b"path=", b"size=", b"GNU.")
        )
    return is_harmless


def _has_only_mtime(heads: NDArray[np.uint64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which pax headers are just `28 mtime=1700000000.1234567`, as tarfile writes them."""
    text = heads.view(np.uint8)
    is_mtime = (text[:, 2:9] == np.frombuffer(b" mtime=", np.uint8)).all(axis=1)
    digits = text[:, :2] - np.uint8(ord("0"))
    is_mtime &= (digits < 10).all(axis=1)
    result: NDArray[np.bool_] = is_mtime & (digits @ np.array([10, 1]) == lengths)
    return result


def _parse_headers(headers: NDArray[np.uint64]) -> _Fields:
    # By columns, as rows are many and numpy's time is for each of them.
    numbers = np.empty((3, len(headers)), _WORD)
    size, types = headers[:, 16], headers[:, 19]
    numbers[0] = headers[:, 15] >> _HALF | size << _HALF
    numbers[1] = headers[:, 18] >> _HALF | types << _HALF
    numbers[2] = size >> _HALF
    numbers ^= _ZEROS
    digits = numbers[:2].view(np.uint8).reshape(2, -1, 8).astype(np.float32)
    # The bytes of a block are the last 3 digits of a size. Numbers below 2^24 are exact.
    blocks = (digits[0] @ _EIGHT_DIGITS).astype(np.int64)
    blocks += numbers[2] & _THREE_DIGITS != 0
    # In 16 bits, which are enough for most and take half the time.
    sums = headers.view(np.uint8).sum(axis=1, dtype=np.uint16)
    is_plain = sums == digits[1] @ _CHECKSUM_AND_BYTES + _CHECKSUM_TEXT
    numbers &= _OTHER_BITS
    if numbers.any():
        is_plain &= ~numbers.any(axis=0)
    types = types & _TYPE
    is_pax = types == _PAX
    is_plain &= is_pax | (types == _REGULAR)
    has_prefix = (headers[:, 43] & _PREFIX_START) != 0
    if has_prefix.any():
        is_plain &= ~(has_prefix & (headers[:, 32] & _IS_GNU == 0))
    names = _trim_names(headers[:, :_NAME_WORDS])
    is_zero = names == 0
    # Each name ends in zeros: from those to the next name there is a change, and no other.
    flat = is_zero.reshape(-1)
    if is_zero[:, 0].any() or np.count_nonzero(flat[:-1] > flat[1:]) != len(names) - 1:
        is_plain &= ~is_zero[:, 0] & ~(is_zero[:, :-1] > is_zero[:, 1:]).any(axis=1)
    return _Fields(names, blocks, is_plain, is_pax)


def _trim_names(names: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return names without words that all of them leave empty, but with a zero at the end."""
    for words in range(_NAME_WORDS, 0, -1):
        used = np.bitwise_or.reduce(names[:, words - 1])
        if words == _NAME_WORDS:
            used &= _NAME_END
        if used:
            break
    words += bool(used >> np.uint64(56))
    trimmed: NDArray[np.uint64] = names[:, :words].copy()
    if words == _NAME_WORDS:
        trimmed[:, -1] &= _NAME_END
    text: NDArray[np.uint8] = trimmed.view(np.uint8)
    return text


def _follow_chain(
    found: NDArray[np.int64], ends: NDArray[np.int64], is_plain: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return which headers follow each other from the first block on; none if that is not one."""
    if found[0] != 0 or not is_plain[0]:
        return np.zeros(0, np.int64)
    if is_plain.all() and (ends[:-1] == found[1:]).all():
        return np.arange(len(found))
    following = np.searchsorted(found, ends)
    is_header = following < len(found)
    is_header[is_header] = found[following[is_header]] == ends[is_header]
    chain, at = [0], 0
    while is_header[at] and is_plain[following[at]]:
        at = int(following[at])
        chain.append(at)
    return np.array(chain)
