"""Getting one file over HTTP, across broken connections and from one call to the next.

What has come is in NAME.part, and NAME.part.json says of which version it is a part: the rest is
asked for by `Range` with `If-Range`, so that a file which changed meanwhile comes whole.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.files import read_json_object
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import describe_os_error

WAITS_S = (1.0, 2.0, 4.0)
"""Before trying again, when an attempt brought nothing; one that brought something starts over."""
_SILENCE_S = 30.0
_PIECE_BYTES = 1 << 16


class Shown(Protocol):
    """Who is told how far it is."""

    def moved(self, have: int, total: int | None) -> None: ...

    def note(self, line: str) -> None: ...


@dataclass(frozen=True)
class Part:
    """What has come so far."""

    data: Path
    about: Path

    @staticmethod
    def of(folder: Path, name: str) -> Part:
        return Part(folder / f"{name}.part", folder / f"{name}.part.json")

    def version(self, url: str) -> str | None:
        """What the server called the version of which this is a part; None if that is not known."""
        about = read_json_object(self.about) or {}
        return about.get("version") if about.get("url") == url else None

    def size(self) -> int:
        return self.data.stat().st_size if self.data.exists() else 0

    def remove(self) -> None:
        self.data.unlink(missing_ok=True)
        self.about.unlink(missing_ok=True)


class _Broken(Exception):
    """May go better the next time."""


def download(url: str, part: Part, shown: Shown, waits_s: Sequence[float]) -> None:
    """The whole file, or a fault that says what was kept and what to do. It stays a part: whoever
    asked removes it once it is of no more use, and asking again before that costs one request."""
    try:
        with _locked(part), part.data.open("ab") as data:
            _all_of(url, part, data, shown, waits_s)
    except OSError as error:
        raise _not_written(part, error) from error
    finally:
        if not part.size():
            part.remove()


def text_at(url: str) -> str | None:
    """A small text file; None if it is not to be had."""
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as answer:
            return str(answer.read(1 << 16).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return None


@contextlib.contextmanager
def _locked(part: Part) -> Iterator[None]:
    """Refuse a second download of the same file, where the file system has locks."""
    lock = FileLock(part.data)
    try:
        is_held = lock.try_acquire()
    except LocksUnsupportedError:
        yield
        return
    if not is_held:
        what = f"another process is downloading {part.data}"
        raise EchelonError(Fault(what, "wait for it"))
    try:
        yield
    finally:
        lock.release()


def _all_of(url: str, part: Part, data: BinaryIO, shown: Shown, waits_s: Sequence[float]) -> None:
    """One attempt after the other, as long as each brings something or a wait is left."""
    waits = iter(waits_s)
    while True:
        before = data.tell()
        try:
            return _rest_of(url, part, data, shown)
        except _Broken as error:
            if data.tell() > before:
                waits = iter(waits_s)
            wait_s = next(waits, None)
            if wait_s is None:
                raise _unreachable(url, data.tell(), part, str(error)) from error
            shown.note(f"{error}; trying again in {wait_s:g} s")
            time.sleep(wait_s)


def _rest_of(url: str, part: Part, data: BinaryIO, shown: Shown) -> None:
    with _answer(url, data.tell(), part) as answer:
        if answer is None:
            return
        have, total = _begin(answer, url, part, data)
        _room(part, have, total)
        shown.moved(have, total)
        while piece := _piece(answer):
            data.write(piece)
            have += len(piece)
            shown.moved(have, total)
    if total is not None and have < total:
        raise _Broken(f"the connection broke after {have:,} of {total:,} bytes")
    if total is not None and have > total:
        _restart(part, data)
        raise _Broken(f"{have:,} bytes came where {total:,} were promised")
    data.flush()


def _piece(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read(_PIECE_BYTES)
    except (http.client.HTTPException, OSError) as error:
        raise _Broken(f"the connection broke ({_worded(error)})") from error


@contextlib.contextmanager
def _answer(url: str, have: int, part: Part) -> Iterator[http.client.HTTPResponse | None]:
    """None when there is nothing left to send."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "echelon"}
    version = part.version(url)
    if have and version:
        headers |= {"Range": f"bytes={have}-", "If-Range": version}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=_SILENCE_S)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            if error.headers.get("Content-Range") == f"bytes */{have}":
                yield None
                return
            part.about.unlink(missing_ok=True)  # the next attempt takes it from the beginning
            raise _Broken("the part that is here does not fit the file there") from error
        raise _refused(url, error) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise _distrusted(url, reason) from error
        raise _Broken(_worded(reason)) from error
    with answer:
        yield answer


def _begin(
    answer: http.client.HTTPResponse, url: str, part: Part, data: BinaryIO
) -> tuple[int, int | None]:
    """How many bytes stand, and how many it will be. An answer with the whole file starts anew."""
    have = data.tell()
    if answer.status == http.client.PARTIAL_CONTENT:
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        if told and int(told[1]) == have:
            return have, None if told[2] == "*" else int(told[2])
        _restart(part, data)
        raise _Broken("the server sent another part than was asked for")
    _restart(part, data)
    part.about.write_text(json.dumps({"url": url, "version": _version(answer)}), encoding="utf-8")
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _version(answer: http.client.HTTPResponse) -> str | None:
    """A weak ETag names content that means the same, not the same bytes."""
    tag = answer.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")


def _restart(part: Part, data: BinaryIO) -> None:
    part.about.unlink(missing_ok=True)
    data.truncate(0)
    data.seek(0)


def _room(part: Part, have: int, total: int | None) -> None:
    if total is not None and shutil.disk_usage(part.data.parent).free < total - have:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- what can go wrong --------------------------------------------------------------------------


def elsewhere(url: str) -> str:
    name = url.rpartition("/")[2]
    return (
        f"fetch {url} where there is internet, bring it here and give it: "
        f"echelon data movielens --from {name}"
    )


def _worded(error: object) -> str:
    """`error` may be what urllib gives as a reason: an exception, or only its text."""
    return describe_os_error(error) if isinstance(error, BaseException) else str(error)


def _unreachable(url: str, have: int, part: Part, reason: str) -> EchelonError:
    if have:
        kept = f"{have:,} bytes are kept in {part.data}"
        again = f"type the same again to go on from there; or {elsewhere(url)}"
        return EchelonError(Fault(f"{url}: {reason}; {kept}", again), exit=Exit.FAILED)
    what = f"{url} cannot be reached: {reason}"
    return EchelonError(Fault(what, elsewhere(url)), exit=Exit.NOT_FOUND)


def _refused(url: str, error: urllib.error.HTTPError) -> Exception:
    told = f"the server answered {error.code} {error.reason}"
    if error.code >= 500 or error.code == http.client.TOO_MANY_REQUESTS:
        return _Broken(told)
    return EchelonError(Fault(f"{url}: {told}", elsewhere(url)), exit=Exit.NOT_FOUND)


def _distrusted(url: str, error: ssl.SSLCertVerificationError) -> EchelonError:
    what = f"{url}: its certificate is not to be trusted: {error.verify_message}"
    return EchelonError(Fault(what, elsewhere(url)), exit=Exit.NOT_FOUND)


def _not_written(part: Part, error: OSError) -> EchelonError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space left for {part.data}; the {part.size():,} bytes that came are kept there"
        do = "make room and type the same again: it goes on from there"
        if not part.size():
            what, do = (
                f"no space left in {part.data.parent}",
                "make room, or give another: --to DIR",
            )
        return EchelonError(Fault(what, do), exit=Exit.FAILED)
    what = f"{part.data} cannot be written: {describe_os_error(error)}"
    return EchelonError(Fault(what, "give a folder that can be written: --to DIR"))
