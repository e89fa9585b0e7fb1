"""The tokens of a file, `.bin` or `.npy`, memory-mapped. Does not import torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.numpy_files import map_array
from echelon.data.formats.remote_rows import RemoteRows
from echelon.errors import Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.os_errors import format_os_error_reason

Tokens = NDArray[Any] | RemoteRows
TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
DEFAULT_TOKEN_TYPE = "uint16"
_LLM_C_HEADERS = (20240520, 20240801)
"""What the token files of llm.c begin with. Their first 1024 bytes are no tokens."""


def map_tokens(path: DataPath, dtype: str) -> Tokens | Fault:
    """Return the tokens of a file, memory-mapped."""
    try:
        if path.suffix == ".npy":
            tokens = map_array(path)
            if tokens.ndim == 1 and tokens.dtype.kind in "iu":
                return tokens
            return Fault(
                f"{path} has {tokens.dtype} of shape {tokens.shape}",
                "give a file with one row of integers",
            )
        size = get_size(path)
        if not size or size % np.dtype(dtype).itemsize:
            return Fault(
                f"{path} has {size:,} bytes, which are no whole number of {dtype} tokens",
                "give the dtype that it was written with, or write it again",
            )
        head, tokens = _open_bin(path, np.dtype(dtype), size)
    except (OSError, ValueError) as error:
        reason = format_os_error_reason(error) if isinstance(error, OSError) else error
        return Fault(f"{path} cannot be read: {reason}", "check the file")
    if size >= 1024 and int(np.frombuffer(head, np.int32, 1)[0]) in _LLM_C_HEADERS:
        return Fault(
            f"{path} begins with a header of llm.c, which would be read as tokens",
            f"cut it off: tail -c +1025 {path} > tokens.bin",
        )
    return tokens


def _open_bin(path: DataPath, dtype: np.dtype[Any], size: int) -> tuple[bytes, Tokens]:
    """Return the first bytes of a file and its tokens."""
    if isinstance(path, RemoteFile):
        return path.read_at(0, 4), RemoteRows(path, 0, dtype, (size // dtype.itemsize,))
    tokens = np.asarray(np.memmap(path, dtype, "r"))
    return tokens[:4].tobytes(), tokens
