"""What programs ask of object stores. Every function may be called in any process and thread, also
after a fork, and raises EchelonError with a sentence (`ObjectStoreError` says what kind)."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import ObjectInfo, parse_url

_MAX_READ_BYTES = 64 << 20
_VARIABLE_PREFIXES = (
    *("AWS_", "GOOGLE_", "GCE_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("ECHELON_STORE_", "ECHELON_CACHE", "ECHELON_DATA_CACHE"),
)


def find_object(url: str) -> ObjectInfo:
    """Return what the store says of an object."""
    return ObjectInfo(*send_request("find", url))


def list_objects(url: str) -> list[ObjectInfo]:
    """Return all objects below `s3://bucket/folder`, at any depth, by key. There may be none."""
    if not parse_url(url).can_list:
        raise EchelonError(
            Fault(f"{url} is on a web server, which cannot list files", "name the files one by one")
        )
    return [ObjectInfo(*each) for each in send_request("list", url)]


def find_object_or_list(url: str, *, is_likely_folder: bool) -> ObjectInfo | list[ObjectInfo]:
    """Return what the store says of an object; where there is none, all objects below the address.
    The store is asked for both at once where a folder is likely, which costs a request more."""
    is_object, found = send_request("find_or_list", url, is_likely_folder)
    return ObjectInfo(*found) if is_object else [ObjectInfo(*each) for each in found]


def read_object(info: ObjectInfo) -> bytes:
    """Return the bytes of a small object, such as a manifest."""
    if info.size > _MAX_READ_BYTES:
        what = f"{info.url} has {info.size:,} bytes, and at most {_MAX_READ_BYTES:,} are read"
        raise EchelonError(Fault(what, "give a smaller object"))
    return base64.b64decode(send_request("read", *info))


def download_file(info: ObjectInfo, target: Path) -> None:
    """Write an object into a file, which appears when it is complete."""
    send_request("download", *info, str(target.absolute()))


def upload_file(source: Path, url: str) -> ObjectInfo:
    """Write a file into an object, in parts if it is large, and return what the store has then. The
    object appears when it is complete."""
    return ObjectInfo(*send_request("upload", str(source.absolute()), url))


def delete_objects(urls: Sequence[str]) -> None:
    """Remove objects; those that are not there are left out."""
    if urls:
        send_request("delete", list(urls))


# --- the process that does it ---


class _StoreProcess(NamedTuple):
    """A running store process."""

    address: str
    environ: dict[str, str]
    """The variables that it was started with and that decide what it does."""
    owner: int
    """The process that started it."""
    process: subprocess.Popen[bytes]


_running: _StoreProcess | None = None
_start_lock = threading.Lock()


def _renew_lock() -> None:
    """A thread that held it is not in the child."""
    global _start_lock
    _start_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class _Connection(threading.local):
    """Of one thread. A forked child has the socket of its parent, and must not use it."""

    owner = 0
    address = ""
    lines: Any = None


_connection = _Connection()


def send_request(name: str, *arguments: Any) -> Any:
    """Have a request carried out and return its result. A store process that has ended is started
    again once."""
    line = json.dumps([name, *arguments]).encode() + b"\n"
    for is_last in (False, True):
        try:
            lines = _connect()
            lines.write(line)
            lines.flush()
            if answer := lines.readline():
                return _take_result(json.loads(answer))
        except OSError:
            pass
        _connection.owner = 0
        if is_last:
            break
    what = "the process that talks to object stores ended while it was asked"
    do = "see above for why, and `dmesg | tail` for whether memory ran out"
    raise ObjectStoreError(StoreProblem.OTHER, what, do)


def _take_result(answer: dict[str, Any]) -> Any:
    if "faults" not in answer:
        return answer["result"]
    faults = [Fault(*each) for each in answer["faults"]]
    if "problem" in answer:
        raise ObjectStoreError(StoreProblem(answer["problem"]), *faults[0])
    raise EchelonError(*faults)


def _connect() -> Any:
    """Return this thread's connection to the store process."""
    address = _get_address()
    if (_connection.owner, _connection.address) != (os.getpid(), address):
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(f"\0{address}")
        except OSError:  # it has ended
            connected.close()
            address = _get_address(ended=address)
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(f"\0{address}")
        with connected:
            _connection.lines = connected.makefile("rwb")
        _connection.owner, _connection.address = os.getpid(), address
    return _connection.lines


def _get_address(ended: str = "") -> str:
    """Return where the store process listens, and start one where there is none with this
    environment. Children use that of their parent."""
    global _running
    with _start_lock:
        environ = _list_variables()
        if not _running or _running.environ != environ or _running.address == ended:
            stop_store_process()
            _running = _start(environ)
        return _running.address


def _list_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(_VARIABLE_PREFIXES)
    }


def _start(environ: dict[str, str]) -> _StoreProcess:
    if find_spec("obstore") is None:
        what = "reading from object stores needs the package obstore, which is not installed"
        raise EchelonError(Fault(what, "pip install 'echelon[cloud]'"))
    address = f"echelon-store-{os.getpid()}-{secrets.token_hex(8)}"
    # It listens before the process runs, so nobody waits for its start.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon.object_store.store_process", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # Ctrl-C is for the program, which then closes the pipe
        )
    return _StoreProcess(address, environ, os.getpid(), process)


def stop_store_process() -> None:
    """End the store process that this process has started, if it has."""
    global _running
    running, _running = _running, None
    if running and running.owner == os.getpid() and running.process.stdin:
        with contextlib.suppress(OSError):
            running.process.stdin.close()
        # A child may hold the pipe as well.
        running.process.kill()
        running.process.wait()


atexit.register(stop_store_process)
