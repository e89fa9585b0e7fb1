"""A real server of S3's protocol on loopback, behind a proxy that counts what is fetched and can
make it ill: `server.answer = 403`, `"hang"` or `"trickle"`, `server.delay_s = 0.02`.

The server is moto's, in a process of its own. It is started once for all tests of a process, and
every test has a bucket of its own. Started as a program, this file is that process.
"""

from __future__ import annotations

import atexit
import http.client
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

ACCESS_KEY = "AKIACANARYACCESSKEY1"
SECRET_KEY = "canarysecret0123456789canarysecret01234567"
"""No output and no file of a run may have them."""
_AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)
_CLOSED_PORT = "http://127.0.0.1:1"


@dataclass
class ObjectStoreServer:
    """The proxy, as a test sees it."""

    port: int
    bucket: str
    delay_s: float = 0.0
    """Before every answer."""
    answer: int | str | None = None
    """Instead of the server's: a status, `hang` (none) or `trickle` (byte by byte)."""
    answer_times: int = -1
    """How many requests are answered so; all without it."""
    answer_path: str = ""
    """Only for paths with this in them."""
    answer_after: int = 0
    """Only when so many requests were made."""
    decide: Callable[[str, str], int | None] | None = None
    """From method and path of a request to the status to answer; it may wait. None: as usual."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each."""
    bytes_sent: int = 0
    """Of the bodies of all answers."""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it, and nothing else on the network."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_METADATA_ENDPOINT": _CLOSED_PORT,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "GOOGLE_BASE_URL": self.endpoint,
            "GOOGLE_SKIP_SIGNATURE": "true",
            "GCE_METADATA_HOST": "127.0.0.1:1",
            "ECHELON_STORE_RETRIES": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def put(self, key: str, data: bytes, bucket: str = "") -> str:
        """Write an object, not through the proxy, and return its address."""
        bucket = bucket or self.bucket
        status, _ = _ask_moto("PUT", f"/{bucket}/{key}", data)
        assert status == 200
        return f"s3://{bucket}/{key}"

    def get(self, key: str) -> bytes | None:
        """Return the bytes of an object, not through the proxy; None where there is none."""
        status, data = _ask_moto("GET", f"/{self.bucket}/{key}")
        return data if status == 200 else None

    def delete(self, *keys: str) -> None:
        """Remove objects, not through the proxy."""
        for key in keys:
            _ask_moto("DELETE", f"/{self.bucket}/{key}")

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects that begin so, not through the proxy."""
        _, listed = _ask_moto("GET", f"/{self.bucket}?list-type=2&prefix={prefix}")
        return sorted(re.findall("<Key>(.*?)</Key>", listed.decode()))

    def list_paths(self, method: str) -> list[str]:
        """Return the keys that requests with this method were for."""
        with self.lock:
            paths = [path.partition("?")[0] for each, path, _ in self.requests if each == method]
        return [path.removeprefix(f"/{self.bucket}/") for path in paths]

    def reset_counts(self) -> None:
        with self.lock:
            self.requests.clear()
            self.bytes_sent = 0

    def take_answer(self, path: str) -> int | str | None:
        with self.lock:
            if self.answer is None or self.answer_path not in path or self.answer_times == 0:
                return None
            if len(self.requests) <= self.answer_after:
                return None
            self.answer_times -= 1
            return self.answer


_buckets = iter(range(1, 1 << 30))


@contextmanager
def serve_object_store() -> Iterator[ObjectStoreServer]:
    """Yield a proxy with a bucket of its own."""
    bucket = f"bucket-{os.getpid()}-{next(_buckets)}"
    status, _ = _ask_moto("PUT", f"/{bucket}")
    assert status == 200
    server = ObjectStoreServer(0, bucket)

    class Handler(_ProxyHandler):
        state = server

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    server.port = proxy.server_port
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: ObjectStoreServer

    def _forward(self) -> None:
        state = self.state
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with state.lock:
            state.requests.append((self.command, self.path, self.headers.get("Range", "")))
        if state.delay_s:
            time.sleep(state.delay_s)
        answer = state.take_answer(self.path)
        if state.decide is not None:
            answer = state.decide(self.command, self.path)
        if answer == "hang":
            state.released.wait()
            self.close_connection = True
            return
        if isinstance(answer, int):
            self._send(answer, {}, b"<Error><Code>AsTold</Code></Error>", slowly=False)
            return
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("host", "content-length", "connection", "transfer-encoding")
        }
        headers.setdefault("Authorization", _AUTHORIZATION)
        upstream = http.client.HTTPConnection("127.0.0.1", _start_moto())
        # Google's clients escape every sign but letters and digits, which moto does not read.
        path, mark, query = self.path.partition("?")
        upstream.request(self.command, quote(unquote(path)) + mark + query, body, headers)
        response = upstream.getresponse()
        data = response.read()
        sent = {
            name: value
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "server", "date")
        }
        upstream.close()
        self._send(response.status, sent, data, slowly=answer == "trickle")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, slowly: bool) -> None:
        self.send_response_only(status)
        if self.command != "HEAD":
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
            headers["Content-Length"] = str(len(data))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.state.lock:
            self.state.bytes_sent += len(data)
        if not slowly:
            self.wfile.write(data)
            return
        for number in range(len(data)):
            if self.state.released.wait(0.05):
                break
            self.wfile.write(data[number : number + 1])
        self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has gone
            self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass


def _ask_moto(method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", _start_moto(), timeout=60)
    connection.request(method, path, data, {"Authorization": _AUTHORIZATION})
    response = connection.getresponse()
    answered = response.status, response.read()
    connection.close()
    return answered


@cache
def _start_moto() -> int:
    """Start moto's server once, and return its port."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.kill)
    return int(process.stdout.readline())


def _run_moto() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()  # until the process of the tests has ended
    os._exit(0)


if __name__ == "__main__":
    _run_moto()
