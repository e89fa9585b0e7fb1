"""One bucket, or one web server, through obstore. Used in the store process only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.store import GCSStore, HTTPStore, S3Store

from echelon.errors import EchelonError
from echelon.object_store.credentials import check_google_credentials, find_aws_config
from echelon.object_store.limits import (
    CONNECT_TIMEOUT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    UPLOAD_PART_BYTES,
    StoreLimits,
)
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem, explain_store_error
from echelon.object_store.urls import ObjectInfo, ObjectUrl
from echelon.utils.files import replace_file
from echelon.utils.os_errors import format_os_error_reason

_Result = TypeVar("_Result")
_WEAK_ETAGS = ("W/", "time ")
"""A server compares only others; these are compared when the answer has come."""
_DOWNLOAD_PART_BYTES = 16 << 20
_STREAM_PART_BYTES = 1 << 20


class Bucket:
    """The objects of one bucket. All methods raise ObjectStoreError, and may be called by several
    threads at once."""

    def __init__(self, url: ObjectUrl, limits: StoreLimits) -> None:
        self._url, self._limits = url, limits
        self._store: Any = _open_store(url, limits)

    def find(self, key: str) -> ObjectInfo:
        """Return what the store says of an object."""
        return self._describe(self._call(key, "read", lambda: obstore.head(self._store, key)))

    def list_all(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose keys begin with a prefix that ends at a slash, by key."""

        def read_all() -> list[Any]:
            return [each for batch in obstore.list(self._store, prefix or None) for each in batch]

        found = self._call(prefix, "listed", read_all)
        return map(self._describe, sorted(found, key=lambda each: each["path"]))

    def read_range(self, info: ObjectInfo, key: str, begin: int, end: int) -> Any:
        """Return some bytes of an object, as a buffer. Raises if it is another one by now."""
        data = self._call(key, "read", lambda: self._get_range(info, key, begin, end).bytes())
        _check_length(info, len(data), end - begin)
        return data

    def stream_range(self, info: ObjectInfo, key: str, begin: int, end: int) -> Iterator[Any]:
        """Yield the same bytes in parts, as they come."""
        result = self._call(key, "read", lambda: self._get_range(info, key, begin, end))
        parts = iter(result.stream(min_chunk_size=_STREAM_PART_BYTES))
        came = 0
        while (part := self._call(key, "read", lambda: next(parts, None))) is not None:
            came += len(part)
            yield part
        _check_length(info, came, end - begin)

    def _get_range(self, info: ObjectInfo, key: str, begin: int, end: int) -> Any:
        """Ask for some bytes of an object, and return what is known when the answer begins."""
        options: Any = {}
        if (begin, end) != (0, info.size):
            options["range"] = (begin, end)
        if not info.etag.startswith(_WEAK_ETAGS):
            options["if_match"] = f'"{info.etag}"'
        result = obstore.get(self._store, key, options=options)
        meta = self._describe(result.meta)
        if (meta.size, meta.etag) != info[1:]:
            what = f"{info.url} changed since it was opened"
            do = "let its writer finish, and start again"
            raise ObjectStoreError(StoreProblem.CHANGED, what, do)
        return result

    def download(self, info: ObjectInfo, key: str, target: Path) -> None:
        """Write a whole object into a file, which appears when it is complete."""
        try:
            with replace_file(target) as temporary, temporary.open("wb") as file:
                for begin in range(0, info.size, _DOWNLOAD_PART_BYTES):
                    end = min(begin + _DOWNLOAD_PART_BYTES, info.size)
                    file.write(self.read_range(info, key, begin, end))
        except OSError as error:
            raise _explain_disk(error, target, "written") from error

    def upload(self, source: Path, key: str) -> ObjectInfo:
        """Write a file into an object, in parts if it is large. The object appears when it is
        complete; the bytes of each part are checked by the store."""
        try:
            with source.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._call(
                    key,
                    "written",
                    lambda: obstore.put(
                        self._store,
                        key,
                        file if size > UPLOAD_PART_BYTES else file.read(),
                        use_multipart=size > UPLOAD_PART_BYTES,
                        chunk_size=UPLOAD_PART_BYTES,
                    ),
                )
        except OSError as error:
            raise _explain_disk(error, source, "read") from error
        found = self.find(key)
        if found.size != size:
            what = f"{found.url} has {found.size:,} bytes after {size:,} were written"
            raise ObjectStoreError(StoreProblem.CHANGED, what, "write it again, from one process")
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there are left out."""
        self._call(keys[0], "removed", lambda: obstore.delete(self._store, list(keys)))

    def _describe(self, meta: Any) -> ObjectInfo:
        url = str(self._url._replace(key=meta["path"]))
        # Some stores leave out the quotes when they list objects.
        etag = (meta.get("e_tag") or "").strip('"') or f"time {meta['last_modified'].isoformat()}"
        return ObjectInfo(url, int(meta["size"]), etag)

    def _call(self, key: str, action: str, function: Callable[[], _Result]) -> _Result:
        try:
            return function()
        except EchelonError:
            raise
        except Exception as error:  # what obstore raises has no common class
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            url = str(self._url._replace(key=key))
            raise explain_store_error(error, url, action, self._limits) from None


def _check_length(info: ObjectInfo, came: int, wanted: int) -> None:
    if came != wanted:
        what = f"{info.url} cannot be read: {came:,} bytes came of {wanted:,}"
        raise ObjectStoreError(StoreProblem.UNAVAILABLE, what, "start again")


def _open_store(url: ObjectUrl, limits: StoreLimits) -> Any:
    client: Any = {
        "allow_http": True,  # AWS_ENDPOINT_URL and http:// say what is meant
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, limits.timeout_s)),
        "timeout": timedelta(seconds=limits.timeout_s),
    }
    retry: Any = {
        "max_retries": limits.retries,
        "retry_timeout": timedelta(seconds=limits.total_s),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
            "base": 2,
        },
    }
    options: Any = {"client_options": client, "retry_config": retry}
    if url.scheme == "s3":
        options["config"] = find_aws_config(url, os.environ)
    elif url.scheme == "gs":
        check_google_credentials(url, os.environ)
    make: Any = {"s3": S3Store, "gs": GCSStore}.get(url.scheme, HTTPStore)
    place = url.bucket if url.can_list else f"{url.scheme}://{url.bucket}"
    try:
        return make(place, **options)
    except Exception as error:  # settings that obstore does not understand
        raise explain_store_error(error, str(url), "opened", limits) from None


def _explain_disk(error: OSError, path: Path, action: str) -> ObjectStoreError:
    return ObjectStoreError(
        StoreProblem.LOCAL_DISK,
        f"{path} cannot be {action}: {format_os_error_reason(error)}",
        "free some space there, or check its permissions",
    )
