"""Downloading one file over HTTP, resumable across broken connections and across calls.

NAME.part holds what was received, and NAME.part.json says which version of the file it belongs to.
The rest is requested by `Range` with `If-Range`, so that a file that has changed meanwhile is sent
whole.
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

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.files import read_json_object
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason

RETRY_WAITS_S = (1.0, 2.0, 4.0)
"""Waits before the next attempt if one received nothing. After an attempt that received something
they start again from the first."""
_TIMEOUT_S = 30.0
"""How long a server may be silent."""
_CHUNK_BYTES = 1 << 16


class ProgressDisplay(Protocol):
    """Shows how far a download is."""

    def update(self, have: int, total: int | None) -> None:
        """Show how many bytes of how many are there; the total may be unknown."""

    def print_line(self, line: str) -> None:
        """Show a message."""


@dataclass(frozen=True)
class PartialDownload:
    """What was received so far, on disk."""

    data: Path
    metadata: Path

    @staticmethod
    def locate_in_folder(folder: Path, name: str) -> PartialDownload:
        """Return the paths of a partial download in a folder."""
        return PartialDownload(folder / f"{name}.part", folder / f"{name}.part.json")

    def read_version(self, url: str) -> str | None:
        """Return the server's ETag or date of the version this is a part of; None if unknown."""
        about = read_json_object(self.metadata) or {}
        return about.get("version") if about.get("url") == url else None

    def get_size_bytes(self) -> int:
        """Return the bytes received so far."""
        return self.data.stat().st_size if self.data.exists() else 0

    def remove(self) -> None:
        """Delete the data and its metadata."""
        self.data.unlink(missing_ok=True)
        self.metadata.unlink(missing_ok=True)


class _RetryableError(Exception):
    """A failure after which another attempt may succeed."""


def download(
    url: str, part: PartialDownload, progress: ProgressDisplay, waits_s: Sequence[float]
) -> None:
    """Receive the whole file, or raise with what was kept and what to do.

    The file keeps its .part name: the caller removes it when it is no longer needed, and another
    call before that costs one request.
    """
    try:
        with _lock_download(part), part.data.open("ab") as data:
            _download_with_retries(url, part, data, progress, waits_s)
    except OSError as error:
        raise _write_failed_error(part, error) from error
    finally:
        if not part.get_size_bytes():
            part.remove()


def fetch_text(url: str) -> str | None:
    """Return a small text file, or None if it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read(1 << 16).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return None


@contextlib.contextmanager
def _lock_download(part: PartialDownload) -> Iterator[None]:
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


def _download_with_retries(
    url: str,
    part: PartialDownload,
    data: BinaryIO,
    progress: ProgressDisplay,
    waits_s: Sequence[float],
) -> None:
    """Attempt again and again, as long as each attempt receives something or a wait is left."""
    waits = iter(waits_s)
    while True:
        before = data.tell()
        try:
            return _download_rest(url, part, data, progress)
        except _RetryableError as error:
            if data.tell() > before:
                waits = iter(waits_s)
            wait_s = next(waits, None)
            if wait_s is None:
                raise _make_unreachable_error(url, data.tell(), part, str(error)) from error
            progress.print_line(f"{error}; trying again in {wait_s:g} s")
            time.sleep(wait_s)


def _download_rest(
    url: str, part: PartialDownload, data: BinaryIO, progress: ProgressDisplay
) -> None:
    """Request and receive what is missing."""
    with _open_response(url, data.tell(), part) as answer:
        if answer is None:
            return
        have, total = _begin_writing(answer, url, part, data)
        _require_space(part, have, total)
        progress.update(have, total)
        while piece := _read_chunk(answer):
            data.write(piece)
            have += len(piece)
            progress.update(have, total)
    if total is not None and have < total:
        raise _RetryableError(f"the connection broke after {have:,} of {total:,} bytes")
    if total is not None and have > total:
        _restart(part, data)
        raise _RetryableError(f"{have:,} bytes came where {total:,} were promised")
    data.flush()


def _read_chunk(answer: http.client.HTTPResponse) -> bytes:
    """Return the next bytes of the response, or raise a _RetryableError."""
    try:
        return answer.read(_CHUNK_BYTES)
    except (http.client.HTTPException, OSError) as error:
        raise _RetryableError(f"the connection broke ({_format_error_text(error)})") from error


@contextlib.contextmanager
def _open_response(
    url: str, have: int, part: PartialDownload
) -> Iterator[http.client.HTTPResponse | None]:
    """Yield the response to a request for the rest of the file; None if nothing is missing."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "echelon"}
    version = part.read_version(url)
    if have and version:
        headers |= {"Range": f"bytes={have}-", "If-Range": version}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            if error.headers.get("Content-Range") == f"bytes */{have}":
                yield None
                return
            part.metadata.unlink(missing_ok=True)  # the next attempt starts from the beginning
            raise _RetryableError(
                "the local part does not belong to the file on the server"
            ) from error
        raise _make_http_status_error(url, error) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise _make_certificate_error(url, reason) from error
        raise _RetryableError(_format_error_text(reason)) from error
    with answer:
        yield answer


def _begin_writing(
    answer: http.client.HTTPResponse, url: str, part: PartialDownload, data: BinaryIO
) -> tuple[int, int | None]:
    """Return how many bytes are kept and how many there will be. A response with the whole file
    discards what is there."""
    have = data.tell()
    if answer.status == http.client.PARTIAL_CONTENT:
        content_range = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "")
        )
        if content_range and int(content_range[1]) == have:
            return have, None if content_range[2] == "*" else int(content_range[2])
        _restart(part, data)
        raise _RetryableError("the server sent another part than was requested")
    _restart(part, data)
    part.metadata.write_text(
        json.dumps({"url": url, "version": _get_response_version(answer)}), encoding="utf-8"
    )
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _get_response_version(answer: http.client.HTTPResponse) -> str | None:
    """Return the ETag, or else the date. A weak ETag is ignored: it does not promise the same
    bytes."""
    tag = answer.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")


def _restart(part: PartialDownload, data: BinaryIO) -> None:
    """Discard what was received."""
    part.metadata.unlink(missing_ok=True)
    data.truncate(0)
    data.seek(0)


def _require_space(part: PartialDownload, have: int, total: int | None) -> None:
    """Raise if the rest does not fit on the disk."""
    if total is not None and shutil.disk_usage(part.data.parent).free < total - have:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- errors -------------------------------------------------------------------------------------


def suggest_manual_download(url: str) -> str:
    """Return how to bring the file here from another machine."""
    name = url.rpartition("/")[2]
    return (
        f"download {url} on a machine with internet access, copy it here and run: "
        f"echelon data movielens --from {name}"
    )


def _format_error_text(error: object) -> str:
    """`error` may be what urllib gives as a reason: an exception, or only its text."""
    return format_os_error_reason(error) if isinstance(error, BaseException) else str(error)


def _make_unreachable_error(
    url: str, have: int, part: PartialDownload, reason: str
) -> EchelonError:
    """Return the error after the last attempt."""
    if have:
        kept = f"{have:,} bytes are kept in {part.data}"
        again = f"type the same command again to continue; or {suggest_manual_download(url)}"
        return EchelonError(Fault(f"{url}: {reason}; {kept}", again), exit=ExitCode.FAILED)
    what = f"{url} cannot be reached: {reason}"
    return EchelonError(Fault(what, suggest_manual_download(url)), exit=ExitCode.NOT_FOUND)


def _make_http_status_error(url: str, error: urllib.error.HTTPError) -> Exception:
    """Return the error for an HTTP status; a retryable one for those that may pass."""
    answer = f"the server answered {error.code} {error.reason}"
    if error.code >= 500 or error.code == http.client.TOO_MANY_REQUESTS:
        return _RetryableError(answer)
    return EchelonError(
        Fault(f"{url}: {answer}", suggest_manual_download(url)), exit=ExitCode.NOT_FOUND
    )


def _make_certificate_error(url: str, error: ssl.SSLCertVerificationError) -> EchelonError:
    """Return the error for a server whose certificate is not trusted."""
    what = f"{url}: its certificate is not trusted: {error.verify_message}"
    return EchelonError(Fault(what, suggest_manual_download(url)), exit=ExitCode.NOT_FOUND)


def _write_failed_error(part: PartialDownload, error: OSError) -> EchelonError:
    """Return the error for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kept = f"the {part.get_size_bytes():,} bytes that came are kept there"
        what = f"no space left for {part.data}; {kept}"
        do = "free some space and type the same command again: it continues from there"
        if not part.get_size_bytes():
            what, do = (
                f"no space left in {part.data.parent}",
                "free some space, or choose another folder: --to DIR",
            )
        return EchelonError(Fault(what, do), exit=ExitCode.FAILED)
    what = f"{part.data} cannot be written: {format_os_error_reason(error)}"
    return EchelonError(Fault(what, "choose a writable folder: --to DIR"))
