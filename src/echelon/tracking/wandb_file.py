"""The files that wandb writes for `wandb sync`, read back: records in the framing of LevelDB's
log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES = 7
"""Bytes at the beginning of the file, and as many before every piece of a record."""
_BLOCK_BYTES = 32 * 1024
_FULL, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file, up to where a kill cut it off."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < HEADER_BYTES:  # too little for another piece
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER_BYTES])
        part += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if at > len(data):
            return
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            try:
                record.ParseFromString(part)
            except DecodeError:
                return
            part = b""
            yield record


def count_rows(path: Path) -> int:
    """Return how many lines of metrics a file holds."""
    return sum(record.WhichOneof("record_type") == "history" for record in read_records(path))
