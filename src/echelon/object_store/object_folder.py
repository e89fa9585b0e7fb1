"""The objects below one address, by their names there, to be read and written. Like `bucket`, it is
used in processes of its own only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import obstore

from echelon.object_store.bucket import Bucket
from echelon.object_store.limits import UPLOAD_PART_BYTES, StoreLimits
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem, explain_store_error
from echelon.object_store.urls import ObjectUrl

_Found = TypeVar("_Found")
_MAX_PARTS = 9_000
"""S3 takes 10,000."""
_PARTS_AT_ONCE = 2
"""Of one object. With two objects at once, all arrive within a request's 30 s at 1.1 MB/s."""


class ObjectFolder(Bucket):
    """A folder of a bucket. All methods raise ObjectStoreError, and may be called by several
    threads at once."""

    def __init__(self, url: ObjectUrl, limits: StoreLimits) -> None:
        super().__init__(url, limits)
        self._prefix = f"{url.key.strip('/')}/".lstrip("/")

    def get(self, name: str) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        return self._find_or_none(name, lambda key: bytes(obstore.get(self._store, key).bytes()))

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """Return some bytes of an object."""
        key = self._prefix + name
        read = lambda: bytes(obstore.get_range(self._store, key, start=begin, end=end))  # noqa: E731
        return self._call(key, "read", read)

    def get_size(self, name: str) -> int | None:
        """Return how large an object is; None if there is none."""
        return self._find_or_none(name, lambda key: int(obstore.head(self._store, key)["size"]))

    def list_sizes(self) -> list[tuple[str, int]]:
        """Return all objects of the folder, at any depth, with their sizes."""
        found = self._call(
            self._prefix,
            "listed",
            lambda: [e for batch in obstore.list(self._store, self._prefix or None) for e in batch],
        )
        return [(each["path"].removeprefix(self._prefix), int(each["size"])) for each in found]

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, or put another content in its place."""
        key = self._prefix + name
        self._call(key, "written", lambda: obstore.put(self._store, key, data, use_multipart=False))

    @contextlib.contextmanager
    def open_writer(self, name: str, size_bytes: int) -> Iterator[Callable[[bytes], None]]:
        """Yield what sends the next bytes of an object, in parts. It appears, whole, at the end of
        the block; if the block raises, it does not."""
        key = self._prefix + name
        part_bytes = max(UPLOAD_PART_BYTES, size_bytes // _MAX_PARTS)
        writer = obstore.open_writer(
            self._store, key, buffer_size=part_bytes, max_concurrency=_PARTS_AT_ONCE
        )
        yield lambda data: self._write(key, lambda: writer.write(data))
        self._write(key, writer.close)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are left out."""
        if names:
            self.delete([self._prefix + name for name in names])

    def _write(self, key: str, write: Callable[[], object]) -> None:
        """Send bytes. What goes wrong is the store's, also where obstore raises a plain OSError."""
        try:
            write()
        except Exception as error:
            url = str(self._url._replace(key=key))
            raise explain_store_error(error, url, "written", self._limits) from None

    def _find_or_none(self, name: str, read: Callable[[str], _Found]) -> _Found | None:
        key = self._prefix + name
        try:
            return self._call(key, "read", lambda: read(key))
        except ObjectStoreError as error:
            if error.problem is StoreProblem.NOT_FOUND:
                return None
            raise
