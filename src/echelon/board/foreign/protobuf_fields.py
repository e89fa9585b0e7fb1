"""Messages of protobuf, read field by field without their definitions.

TensorBoard and wandb write protobuf, and neither they nor protobuf need be installed to look at
their files. A file may be damaged or made to harm: whatever is wrong with a message is a
ProtobufError, and no message leads to more memory than a few times its own size.
"""

from __future__ import annotations

import struct

Field = int | bytes
"""The value of a field: a number written as a varint, or its bytes. Those of a `double` are eight,
those of a `float` four."""

MAX_FIELDS = 100_000
"""In one message. Those that are read here have some dozens."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class ProtobufError(ValueError):
    """The bytes are not a message of the kind that is expected."""


def parse_fields(data: bytes) -> list[tuple[int, Field]]:
    """Return the fields of a message, each with its number, in their order."""
    fields: list[tuple[int, Field]] = []
    at, end = 0, len(data)
    try:
        while at < end:
            key = data[at]
            at += 1
            if key > 0x7F:
                key, at = _read_varint(data, at - 1)
            kind = key & 7
            value: Field
            if kind == _VARINT:
                value = data[at]
                at += 1
                if value > 0x7F:
                    value, at = _read_varint(data, at - 1)
            else:
                if kind == _BYTES:
                    size = data[at]
                    at += 1
                    if size > 0x7F:
                        size, at = _read_varint(data, at - 1)
                elif kind in (_FIXED64, _FIXED32):
                    size = 8 if kind == _FIXED64 else 4
                else:
                    raise ProtobufError(f"a field of the unknown type {kind}")
                if size > end - at:
                    raise ProtobufError("a field that is longer than its message")
                value = data[at : at + size]
                at += size
            fields.append((key >> 3, value))
            if len(fields) > MAX_FIELDS:
                raise ProtobufError(f"a message of more than {MAX_FIELDS:,} fields")
    except IndexError:
        raise ProtobufError("a message that is cut off") from None
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, as 64 bits without a sign, and the position after it."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + i + 1
    raise ProtobufError("a number of more than ten bytes")


def read_integer(field: Field) -> int:
    """Return a field of type int32, int64, bool or enum."""
    if not isinstance(field, int):
        raise ProtobufError("bytes in the place of a number")
    return field - (1 << 64) if field >> 63 else field


def read_double(field: Field) -> float:
    """Return a field of type double."""
    return float(_unpack("<d", field))


def read_float(field: Field) -> float:
    """Return a field of type float."""
    return float(_unpack("<f", field))


def read_fixed64(field: Field) -> int:
    """Return a field of type sfixed64."""
    return int(_unpack("<q", field))


def _unpack(layout: str, field: Field) -> float:
    if isinstance(field, int) or len(field) != struct.calcsize(layout):
        raise ProtobufError("a number of another size")
    value: float = struct.unpack(layout, field)[0]
    return value


def read_bytes(field: Field) -> bytes:
    """Return a field of type bytes, or that is a message."""
    if isinstance(field, int):
        raise ProtobufError("a number in the place of bytes")
    return field


def read_text(field: Field) -> str:
    """Return a field of type string; bytes that are not UTF-8 are replaced."""
    return read_bytes(field).decode("utf-8", "replace")


def read_message(field: Field) -> list[tuple[int, Field]]:
    """Return the fields of a field that is a message."""
    return parse_fields(read_bytes(field))


def read_repeated_integers(fields: list[Field]) -> list[int]:
    """Return the numbers of a repeated field, packed or not."""
    numbers: list[int] = []
    for field in fields:
        if isinstance(field, int):
            numbers.append(read_integer(field))
            continue
        at = 0
        while at < len(field):
            try:
                value, at = _read_varint(field, at)
            except IndexError:
                raise ProtobufError("a number that is cut off") from None
            numbers.append(read_integer(value))
            if len(numbers) > MAX_FIELDS:
                raise ProtobufError(f"more than {MAX_FIELDS:,} numbers")
    return numbers


def read_repeated_fixed(fields: list[Field], code: str) -> list[float]:
    """Return the numbers of a repeated field of a fixed size, packed or not. `code` is that of the
    module struct: `d` for double, `f` for float."""
    data = b"".join(read_bytes(field) for field in fields)
    size = struct.calcsize(f"<{code}")
    if len(data) % size or len(data) // size > MAX_FIELDS:
        raise ProtobufError("numbers of another size, or too many")
    return list(struct.unpack(f"<{len(data) // size}{code}", data))
