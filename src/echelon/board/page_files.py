"""The files of the page, which hold nothing of the user's: sent compressed where that is taken.

They are compressed when they are first asked for, and kept. All of them are 0.6 MB, which takes
long over a slow line, and a third of that compressed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from echelon.board.request import NotFoundError, Response

_FOLDER = Path(__file__).parent / "page"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_GZIP_WINDOW = 31  # of zlib: a header of gzip, without a time, so that the bytes are the same


class _PageFile(NamedTuple):
    """A file as it is, and as it is sent compressed."""

    plain: bytes
    compressed: bytes
    mark: str


def answer_page_file(name: str, headers: Mapping[str, str]) -> Response:
    """Return a file of the page, by its name in the folder; nothing else is looked for."""
    suffix = name[name.rfind(".") :]
    if suffix not in _CONTENT_TYPES or name not in _list_names():
        raise NotFoundError(f"there is no /{name[:200]}")
    file = _read_file(name)
    is_compressed = _takes_gzip(headers)
    # The two are different bytes, so that each has a mark of its own.
    mark = f'"{file.mark}-gzip"' if is_compressed else f'"{file.mark}"'
    caching = {"Cache-Control": "no-cache", "ETag": mark, "Vary": "Accept-Encoding"}
    if headers.get("if-none-match") == mark:
        return Response(b"", _CONTENT_TYPES[suffix], 304, caching)
    if is_compressed:
        encoding = {"Content-Encoding": "gzip"}
        return Response(file.compressed, _CONTENT_TYPES[suffix], 200, caching | encoding)
    return Response(file.plain, _CONTENT_TYPES[suffix], 200, caching)


def answer_page(name: str, status: int = 200) -> Response:
    """Return the page itself, or the one that stands in its place. It is never kept by a browser:
    whether it is sent depends on the token."""
    try:
        body = _read_file(name).plain
    except NotFoundError:
        body = f"<!doctype html><title>echelon board</title><p>{name} is missing.".encode()
    return Response(body, _CONTENT_TYPES[".html"], status)


def _list_names() -> list[str]:
    try:
        return os.listdir(_FOLDER)
    except OSError:
        return []


def _read_file(name: str) -> _PageFile:
    try:
        found = os.stat(_FOLDER / name)
        return _read_version(name, found.st_size, found.st_mtime_ns)
    except OSError:
        raise NotFoundError(f"there is no /{name[:200]}") from None


@lru_cache(maxsize=256)
def _read_version(name: str, size: int, changed_ns: int) -> _PageFile:
    """Read a file as it is now, which its size and its time tell from another one."""
    plain = (_FOLDER / name).read_bytes()
    compressor = zlib.compressobj(9, zlib.DEFLATED, _GZIP_WINDOW)
    compressed = compressor.compress(plain) + compressor.flush()
    return _PageFile(plain, compressed, f"{zlib.crc32(plain):08x}-{len(plain)}")


def _takes_gzip(headers: Mapping[str, str]) -> bool:
    for offer in headers.get("accept-encoding", "").lower().split(","):
        coding, _, weight = offer.replace(" ", "").partition(";")
        if coding == "gzip":
            return weight.rstrip("0") not in ("q=", "q=.", "q=0.")
    return False
