"""Where the documents of a token file are: found once by the token at their border, and kept as the
index of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.index_layout import SampleSpans
from echelon.data.formats.numpy_files import map_array
from echelon.data.formats.remote_rows import RemoteRows
from echelon.errors import EchelonError, Fault
from echelon.object_store.remote_file import RemoteFile

_BLOCK_TOKENS = 1 << 24


def find_documents(file: DataPath, dtype: str, token: int, is_last: bool) -> SampleSpans:
    """Return where the documents of a file are, in bytes from its first token on. `token` is the
    last one of each document, or the first one. What is before the first border, or after the last
    one, is a document as well. Raises EchelonError for a file without the token."""
    tokens: NDArray[Any] | RemoteRows
    if file.suffix == ".npy":
        tokens = map_array(file)
    elif isinstance(file, RemoteFile):
        tokens = RemoteRows(file, 0, np.dtype(dtype), (file.size // np.dtype(dtype).itemsize,))
    else:
        tokens = np.memmap(file, dtype, "r")
    found = [
        np.flatnonzero(tokens[first : first + _BLOCK_TOKENS] == token) + first
        for first in range(0, len(tokens), _BLOCK_TOKENS)
    ]
    places = np.concatenate(found)
    if not len(places):
        which = "eos_token_id" if is_last else "bos_token_id"
        raise EchelonError(
            Fault(
                f"{file} has no token {token} among {len(tokens):,}, so its documents have no "
                "border",
                f"give the {which} and the dtype that it was written with; a file that is one "
                "document has the token, too",
            )
        )
    borders = np.concatenate([[0], places + is_last, [len(tokens)]])
    starts = borders[np.flatnonzero(np.diff(borders))]  # a border may be at the beginning or end
    offsets = starts * tokens.itemsize
    spans = np.diff(offsets, append=len(tokens) * tokens.itemsize)
    notes = {"begins": bool(places[0] == 0), "ends": bool(places[-1] == len(tokens) - 1)}
    return SampleSpans(offsets.astype(np.uint64), spans.astype(np.uint64), notes)
