"""Messages with data over the standard streams of one ssh session.

A frame is a line of JSON, and as many bytes as its `bytes` says. Both sides use it, so this file
imports the standard library alone.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, BinaryIO

START = b"\x1eechelon\n"
"""The first line of ours: what a login prints before it is not meant for us."""
MAX_DATA_BYTES = 1 << 20
"""Data of one frame before it is compressed: a slow connection is never silent for long."""


class ConnectionLostError(Exception):
    """The other side is gone."""


def send_frame(stream: BinaryIO, message: dict[str, Any], data: bytes = b"") -> None:
    """Write a message and its data, which is compressed."""
    packed = zlib.compress(data, 1) if data else b""
    try:
        stream.write(json.dumps(message | {"bytes": len(packed)}).encode() + b"\n" + packed)
        stream.flush()
    except (BrokenPipeError, ConnectionResetError, ValueError) as error:
        raise ConnectionLostError from error


def receive_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Return the next message and its data; raises ConnectionLostError where there is none."""
    try:
        line = stream.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(message, dict):
            raise ConnectionLostError
        size = int(message.pop("bytes"))
        packed = stream.read(size)
    except (OSError, ValueError, KeyError) as error:
        raise ConnectionLostError from error
    if len(packed) != size:
        raise ConnectionLostError
    return message, zlib.decompress(packed) if packed else b""
