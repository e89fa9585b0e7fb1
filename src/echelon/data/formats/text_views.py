"""Texts as Arrow's views: 16 bytes for each, with its length and all of it, where that is at most
12 bytes, else its first 4 and where it is: the number of a buffer and the place in there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.arrow_columns import NumberColumn
from echelon.data.formats.packed_rows import TEXT_VIEW

_INLINE_BYTES = 12


@lru_cache(1)
def has_text_views() -> bool:
    """Return whether this pyarrow can make views of texts."""
    pa = import_module("pyarrow")
    try:
        return bool(pa.array(["a"]).cast(pa.string_view()).to_pylist() == ["a"])
    except (AttributeError, NotImplementedError):
        return False


class TextBuffers:
    """The buffers that views of many arrays are in, by numbers that are used again."""

    def __init__(self) -> None:
        self._empty = import_module("pyarrow").py_buffer(b"")
        self._buffers: list[Any] = []
        self._free: list[int] = []

    def add(self, buffer: Any) -> int:
        """Keep a buffer, and return its number."""
        if self._free:
            number = self._free.pop()
            self._buffers[number] = buffer
        else:
            number = len(self._buffers)
            self._buffers.append(buffer)
        return number

    def release(self, number: int) -> None:
        """Keep a buffer no longer."""
        self._buffers[number] = self._empty
        self._free.append(number)

    def list_all(self) -> list[Any]:
        """Return all buffers by number, as an array of views has them."""
        return list(self._buffers)


def make_views(texts: Any, buffers: TextBuffers) -> tuple[NumberColumn, list[int], int]:
    """Return the views of an Arrow array of texts, the numbers of the buffers that these are in,
    and the bytes that they take. That of a null is empty."""
    pa = import_module("pyarrow")
    views = texts.cast(pa.string_view())
    _, stored, *others = views.buffers()
    words = np.frombuffer(stored, np.int32).reshape(-1, 4)[views.offset : views.offset + len(views)]
    is_null, numbers = None, []
    if views.null_count:
        is_null = views.is_null().to_numpy(zero_copy_only=False)
        words = np.where(is_null[:, None], np.int32(0), words)
    if others and (is_long := words[:, 0] > _INLINE_BYTES).any():
        numbers = [buffers.add(buffer) for buffer in others]
        words = words.copy()
        words[is_long, 2] = np.asarray(numbers, np.int32)[words[is_long, 2]]
    size_bytes = sum(buffer.size for buffer in others) if numbers else 0
    return NumberColumn(words.view(TEXT_VIEW)[:, 0], is_null), numbers, size_bytes


class TextValues:
    """Texts that become Python's when they are asked for: many at once would not stay in the
    processor's cache until they are used."""

    def __init__(
        self,
        views: NDArray[Any],
        buffers: list[Any],
        check_rows: Callable[[int, int], None],
    ) -> None:
        """`check_rows` raises for the first of some texts that cannot be Python's."""
        pa = import_module("pyarrow")
        parts = [None, pa.py_buffer(views), *buffers]
        self._values = pa.Array.from_buffers(pa.string_view(), len(views), parts)
        self._check_rows = check_rows

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list(0, len(self)))

    def to_list(self, first: int, stop: int) -> list[str]:
        """Return some of the texts."""
        try:
            texts: list[str] = self._values.slice(first, stop - first).to_pylist()
        except ValueError:  # bytes that are no text
            self._check_rows(first, stop)
            raise
        return texts
