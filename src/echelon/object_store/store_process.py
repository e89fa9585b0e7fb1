"""The process that talks to object stores, for the process that started it and for its children.

obstore has threads and sockets of its own, which a fork breaks: a child that uses them hangs, and
one that releases them breaks its parent's (seen with obstore 0.12). Ranks fork loader processes. So
requests are sent to this program, which forks nothing. Bytes go through files, not through here.

A request is a line of JSON, and so is its answer. It ends when its standard input is closed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.object_store.block_cache import (
    WHOLE_OBJECT,
    BlockCache,
    count_blocks,
    get_block_range,
    open_cache,
    split_neighbours,
)
from echelon.object_store.bucket import Bucket
from echelon.object_store.limits import CONCURRENT_REQUESTS, read_limits
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import ObjectInfo, ObjectUrl, parse_url

_BLOCKS_AHEAD = 8
_RUN_BLOCKS = 2
"""So many neighbours are asked for at once, where there are more than requests at a time: stores
charge by the request, and 8 MB are what AWS advises."""
_open_lock = threading.Lock()
_prefetch_lock = threading.Lock()
_prefetched: set[tuple[ObjectInfo, int]] = set()
"""Blocks that are under way, or will be."""


def get_bucket(url: ObjectUrl) -> Bucket:
    """Return the bucket of an address, opened once."""
    with _open_lock:
        return _open_bucket(url.scheme, url.bucket)


@cache
def _open_bucket(scheme: str, bucket: str) -> Bucket:
    return Bucket(ObjectUrl(scheme, bucket, ""), read_limits(os.environ))


def _find(url: str) -> Any:
    parsed = parse_url(url)
    return get_bucket(parsed).find(parsed.key)


def _list(url: str) -> Any:
    parsed = parse_url(url)
    return list(get_bucket(parsed).list_all(parsed.key))


def _find_or_list(url: str, is_likely_folder: bool) -> Any:
    listing = _get_pool().submit(_list, url) if is_likely_folder else None
    try:
        return True, _find(url)
    except ObjectStoreError as error:
        if error.problem is not StoreProblem.NOT_FOUND:
            raise
    return False, _list(url) if listing is None else listing.result()


def _read(url: str, size: int, etag: str) -> Any:
    parsed = parse_url(url)
    info = ObjectInfo(url, size, etag)
    data = get_bucket(parsed).read_range(info, parsed.key, 0, size) if size else b""
    return base64.b64encode(bytes(data)).decode()


def _download(url: str, size: int, etag: str, target: str) -> Any:
    parsed = parse_url(url)
    get_bucket(parsed).download(ObjectInfo(url, size, etag), parsed.key, Path(target))


def _upload(source: str, url: str) -> Any:
    parsed = parse_url(url)
    return get_bucket(parsed).upload(Path(source), parsed.key)


def _delete(urls: list[str]) -> Any:
    parsed = [parse_url(url) for url in urls]
    for bucket in {each._replace(key="") for each in parsed}:
        keys = [each.key for each in parsed if each._replace(key="") == bucket]
        get_bucket(bucket).delete(keys)


def _fetch(wanted: list[Any]) -> Any:
    """Have blocks in the cache: of each object its description and the numbers of blocks."""
    is_many = sum(len(numbers) for *_, numbers in wanted) > CONCURRENT_REQUESTS
    tasks = [
        _get_pool().submit(_fetch_run, ObjectInfo(*info), run)
        for *info, numbers in wanted
        for run in split_neighbours(numbers, _RUN_BLOCKS if is_many else 1)
    ]
    for task in tasks:
        task.result()


def _prefetch(url: str, size: int, etag: str, numbers: list[int]) -> Any:
    """Have blocks fetched after those that somebody waits for."""
    info = ObjectInfo(url, size, etag)
    with _prefetch_lock:
        new = [number for number in numbers if (info, number) not in _prefetched]
        _prefetched.update((info, number) for number in new)
    for run in split_neighbours(new, _RUN_BLOCKS):
        _get_prefetch_pool().submit(_prefetch_run, info, run)


def _prefetch_run(info: ObjectInfo, run: Sequence[int]) -> None:
    try:
        with contextlib.suppress(EchelonError):  # reading says why
            _store_run(info, run)
    finally:
        with _prefetch_lock:
            _prefetched.difference_update((info, number) for number in run)


def _store_run(info: ObjectInfo, run: Sequence[int]) -> list[int]:
    """Have neighbouring blocks in the cache; return those that somebody else fetches."""
    parsed = parse_url(info.url)
    read_range = get_bucket(parsed).stream_range
    fetch = partial(read_range, info, parsed.key)
    return _get_cache().store_neighbours(info, run, fetch)


def _fetch_run(info: ObjectInfo, run: Sequence[int]) -> None:
    """Have neighbouring blocks in the cache, or the whole object in one file."""
    parsed = parse_url(info.url)

    def read_block(number: int) -> Any:
        return get_bucket(parsed).read_range(info, parsed.key, *get_block_range(info, number))

    def read_parts(number: int) -> Iterable[Any]:
        if number != WHOLE_OBJECT:
            return [read_block(number)]
        return _map_ahead(read_block, range(count_blocks(info)))

    left = run if WHOLE_OBJECT in run else _store_run(info, run)
    for number in left:
        _get_cache().store_block(info, number, partial(read_parts, number))


def _map_ahead(read_block: Callable[[int], Any], numbers: Iterable[int]) -> Iterator[Any]:
    """Yield what a function returns for each number; a few calls are ahead."""
    pending: deque[Future[Any]] = deque()
    for number in numbers:
        pending.append(_get_prefetch_pool().submit(read_block, number))
        if len(pending) > _BLOCKS_AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@cache
def _get_cache() -> BlockCache:
    return open_cache(os.environ)


@cache
def _get_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONCURRENT_REQUESTS)


@cache
def _get_prefetch_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONCURRENT_REQUESTS)


REQUESTS: dict[str, Callable[..., Any]] = {
    "find": _find,
    "list": _list,
    "find_or_list": _find_or_list,
    "read": _read,
    "download": _download,
    "upload": _upload,
    "delete": _delete,
    "fetch": _fetch,
    "prefetch": _prefetch,
}


def main() -> None:
    """Serve requests on the socket whose descriptor is the first argument."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)  # requests in flight are nobody's any more


def _serve(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] != os.getuid():
        connection.close()
        return
    with connection, connection.makefile("rwb") as lines, contextlib.suppress(OSError):
        for line in lines:
            lines.write(json.dumps(_answer(line)).encode() + b"\n")
            lines.flush()


def _answer(line: bytes) -> dict[str, Any]:
    name, *arguments = json.loads(line)
    try:
        return {"result": REQUESTS[name](*arguments)}
    except ObjectStoreError as error:
        return {"problem": error.problem.value, "faults": error.faults}
    except EchelonError as error:
        return {"faults": error.faults}
    except Exception as error:  # a mistake of ours; the text may be obstore's, and is not shown
        what = f"the process that talks to object stores failed ({type(error).__name__})"
        return {"problem": StoreProblem.OTHER.value, "faults": [Fault(what, "report this")]}


if __name__ == "__main__":
    main()
