"""The checksum of TensorBoard's records: CRC-32C, masked.

Python has the other CRC-32 only. One short record is computed in Python itself; many at once, or
long ones, with numpy, which is only imported then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

_POLYNOMIAL = 0x82F63B78
_LANES = 1024
_LONG_BYTES = 4096
"""Longer data is cut into lanes that are computed side by side."""


@cache
def _get_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


@cache
def _get_array() -> Any:
    import numpy as np

    return np.array(_get_table(), np.uint32)


def mask_checksum(crc: int) -> int:
    """Return a checksum as it stands in a record: a checksum of data with checksums would be
    weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def compute_crc32c(data: bytes) -> int:
    """Return the checksum of bytes of any length."""
    if len(data) > _LONG_BYTES:
        return _compute_long(data)
    table, crc = _get_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def compute_checksums(records: Sequence[bytes]) -> list[int]:
    """Return the checksums of many records, those of one length together."""
    if len(records) < 32:
        return [compute_crc32c(record) for record in records]
    by_size: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        by_size.setdefault(len(record), []).append(i)
    checksums = [0] * len(records)
    for size, indices in by_size.items():
        if len(indices) < 16 or size > _LONG_BYTES:
            found = [compute_crc32c(records[i]) for i in indices]
        else:
            found = _compute_side_by_side([records[i] for i in indices], size)
        for i, checksum in zip(indices, found, strict=True):
            checksums[i] = checksum
    return checksums


def _compute_side_by_side(records: Sequence[bytes], size: int) -> list[int]:
    import numpy as np

    columns = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), size)
    found: list[int] = (_add_columns(columns, 0xFFFFFFFF) ^ 0xFFFFFFFF).tolist()
    return found


def compute_checksums_of_headers(headers: Any) -> Any:
    """Return the checksums of rows of an array of bytes, as an array."""
    return _add_columns(headers, 0xFFFFFFFF) ^ 0xFFFFFFFF


def _add_columns(columns: Any, start: int) -> Any:
    import numpy as np

    table = _get_array()
    crc = np.full(len(columns), start, np.uint32)
    for column in np.ascontiguousarray(columns.T):
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> 8)
    return crc


def _compute_long(data: bytes) -> int:
    """Return the checksum of long data: pieces of equal length are computed side by side from 0,
    and joined, as a checksum is linear."""
    import numpy as np

    piece_bytes = len(data) // _LANES
    whole = piece_bytes * _LANES
    pieces = np.frombuffer(data, np.uint8, whole).reshape(_LANES, piece_bytes)
    remainders = _add_columns(pieces, 0).tolist()
    shift = _make_shift(piece_bytes)
    crc = 0xFFFFFFFF
    for remainder in remainders:
        crc = _apply(shift, crc) ^ remainder
    table = _get_table()
    for byte in data[whole:]:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _make_shift(size_bytes: int) -> tuple[int, ...]:
    """Return the matrix over bits that adds so many zero bytes to a checksum."""
    power = tuple(1 << i for i in range(32))
    table = _get_table()
    square = tuple(table[(1 << i) & 0xFF] ^ ((1 << i) >> 8) for i in range(32))
    while size_bytes:
        if size_bytes & 1:
            power = tuple(_apply(square, row) for row in power)
        square = tuple(_apply(square, row) for row in square)
        size_bytes >>= 1
    return power


def _apply(matrix: tuple[int, ...], value: int) -> int:
    result = 0
    for row in matrix:
        if value & 1:
            result ^= row
        value >>= 1
    return result


def read_masked(data: bytes) -> int:
    """Return a masked checksum as it stands in four bytes of a file."""
    checksum: int = struct.unpack("<I", data)[0]
    return checksum
