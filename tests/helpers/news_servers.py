"""Servers on loopback that receive news: a web server and a mail server, both with faults."""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
DIRECTLY = {"no_proxy": "*"}
"""The surroundings of tests may have a proxy for packages, which does not reach loopback."""


@dataclass
class WebSink:
    """What a web server has received, and how it answers."""

    status: int = 200
    location: str = ""
    """Where it redirects to."""
    is_stuck: bool = False
    """Whether it takes requests and never answers."""
    host: str = LOOPBACK
    port: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def events(self) -> list[str]:
        return [body["event"] for body in self.received if "event" in body]


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that nobody else gets, and at which nobody listens."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]


@contextmanager
def serve_web(**faults: Any) -> Iterator[WebSink]:
    sink = WebSink(**faults)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sink.received.append(json.loads(body))
            if sink.is_stuck:
                sink.released.wait()
                return
            self.send_response(sink.status)
            if sink.location:
                self.send_header("Location", sink.location)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer((sink.host, 0), Handler)
    sink.port = server.server_address[1]
    with _in_thread(server):
        yield sink
        sink.released.set()


@dataclass
class MailSink:
    """What a mail server has received, and what it offers."""

    certificate: Path | None = None
    """Of a key and a certificate in one file; with it STARTTLS is offered."""
    password: str = ""
    """With it a login is asked for."""
    is_tls_from_start: bool = False
    port: int = 0
    mails: list[str] = field(default_factory=list)
    recipients: list[list[str]] = field(default_factory=list)
    was_encrypted: list[bool] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


@contextmanager
def serve_mail(**options: Any) -> Iterator[MailSink]:
    """As much of SMTP as smtplib speaks."""
    sink = MailSink(**options)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if sink.certificate is not None:
        tls.load_cert_chain(sink.certificate)

    class Session(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.is_encrypted = sink.is_tls_from_start
            if sink.is_tls_from_start:
                self.request = tls.wrap_socket(self.request, server_side=True)
            self.file, recipients = self.request.makefile("rb"), list[str]()
            self.say("220 sink")
            while line := self.file.readline().decode().strip():
                sink.commands.append(line)
                word = line.split()[0].upper()
                if word == "EHLO":
                    starts = sink.certificate is not None and not self.is_encrypted
                    offers = ["sink", *(["STARTTLS"] if starts else []), "AUTH PLAIN"]
                    self.say(*(f"250-{each}" for each in offers), "250 8BITMIME")
                elif word == "STARTTLS":
                    self.say("220 go")
                    self.request = tls.wrap_socket(self.request, server_side=True)
                    self.file, self.is_encrypted = self.request.makefile("rb"), True
                elif word == "AUTH":
                    given = base64.b64decode(line.split()[-1]).decode().split("\0")[-1]
                    self.say("235 ok" if given == sink.password else f"535 not {given}")
                elif word == "RCPT":
                    recipients.append(line.partition(":")[2].split()[0].strip("<>"))
                    self.say("250 ok")
                elif word == "DATA":
                    self.say("354 go")
                    self.take_mail(recipients)
                    self.say("250 ok")
                else:
                    self.say("221 bye" if word == "QUIT" else "250 ok")

        def take_mail(self, recipients: list[str]) -> None:
            lines: list[str] = []
            while (line := self.file.readline().decode().rstrip("\r\n")) != ".":
                lines.append(line)
            sink.mails.append("\n".join(lines))
            sink.recipients.append(list(recipients))
            sink.was_encrypted.append(self.is_encrypted)

        def say(self, *lines: str) -> None:
            self.request.sendall("".join(f"{line}\r\n" for line in lines).encode())

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None: ...  # clients that refuse to go on

    server = Server((LOOPBACK, 0), Session)
    sink.port = server.server_address[1]
    with _in_thread(server):
        yield sink


@contextmanager
def _in_thread(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_certificate(folder: Path) -> Path:
    """A key and a certificate of this machine's loopback address, in one file."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate), "-days", "1"]
    words = ["openssl", "req", "-x509", *curve, *subject, *files]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    both = folder / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    return both
