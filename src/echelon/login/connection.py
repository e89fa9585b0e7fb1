"""One ssh session with a login node, and the requests that are made in it."""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from echelon.config.schema import LaunchConfig
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.hosts.ask import join_last_lines
from echelon.hosts.ssh import (
    SSH_FAILED,
    build_ssh_prefix,
    explain_host_key_failure,
    require_ssh,
    split_ssh_command,
)
from echelon.login.bootstrap import NO_PYTHON, make_remote_command, read_host_program
from echelon.login.frames import START, ConnectionLostError, receive_frame, send_frame
from echelon.login.package_archive import compute_package_digest, pack_package
from echelon.runs.origin import RunOrigin

_MAX_NOISE_BYTES = 1 << 20
"""More than any login prints before our first line."""
_MAX_STDERR_BYTES = 1 << 16
_COMMAND_NOT_FOUND = 127


class LoginLostError(EchelonError):
    """There is no answer: nobody knows what became of the last request."""


@dataclass(frozen=True)
class LoginTarget:
    """A login node, how it is reached, and the project's folder there."""

    host: str
    ssh: str
    remote_dir: str
    python: str | None

    @classmethod
    def from_launch(cls, launch: LaunchConfig, source_name: str) -> LoginTarget:
        """Return the target that the settings name; a project without a folder there gets one by
        the name of its source folder."""
        assert launch.login is not None
        folder = launch.remote_dir or f"~/echelon/{source_name}"
        return cls(launch.login, launch.ssh, folder, launch.python)

    @classmethod
    def from_origin(cls, origin: RunOrigin) -> LoginTarget:
        """Return where a run is."""
        return cls(origin.host, origin.ssh, origin.remote_dir, origin.python)


class LoginConnection:
    """An ssh session in which a program of ours answers."""

    def __init__(self, target: LoginTarget, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.target = target
        self.root = ""
        """The project's folder there, as an absolute path."""
        self.step = "connecting"
        """What is being done, for the message of a lost connection."""
        self._process = process
        self._input: BinaryIO = process.stdin  # type: ignore[assignment]
        self._output: BinaryIO = process.stdout  # type: ignore[assignment]
        self._stderr = bytearray()
        self._reader = threading.Thread(target=self._read_stderr, name="login-stderr", daemon=True)
        self._reader.start()
        self._timed_out = 0.0

    # --- requests ---

    def ask(self, request: dict[str, Any], data: bytes = b"") -> dict[str, Any]:
        """Make a request and return its only answer."""
        self.send(request, data)
        return self.receive()[0]

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send a frame."""
        with self._explaining_loss():
            send_frame(self._input, message, data)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next frame. Raises the faults that it brings."""
        with self._explaining_loss():
            message, data = receive_frame(self._output)
        raise_faults(self.target.host, message)
        return message, data

    @contextlib.contextmanager
    def _explaining_loss(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLostError, OSError) as error:
            raise self._explain_end() from error

    # --- the session ---

    def open(self) -> None:
        """Start the program there, with the code that it lacks."""
        digest = compute_package_digest()
        hello = {"root": self.target.remote_dir, "package": digest}
        with self._explaining_loss():
            self._input.write(json.dumps(hello).encode() + b"\n")
            self._input.flush()
            self._skip_noise()
            answer = self._read_hello()
            if answer.get("want") == "package":
                self.step = "sending Echelon's own code"
                archive = pack_package()
                self._input.write(json.dumps({"size": len(archive)}).encode() + b"\n" + archive)
                self._input.flush()
                answer = self._read_hello()
        if "error" in answer:
            raise EchelonError(
                Fault(
                    f"{answer['file']} cannot be used on {self.target.host}: {answer['error']}",
                    "free some space or quota there, or give another folder with "
                    "launch.remote_dir=PATH",
                ),
                exit=ExitCode.NOT_READY,
            )
        self.root = str(answer["root"])
        self.step = "waiting for an answer"

    def _skip_noise(self) -> None:
        """Read what the login prints, up to our first line."""
        noise = 0
        while noise < _MAX_NOISE_BYTES:
            line = self._output.readline()
            if line.endswith(START):
                return
            if not line:
                break
            noise += len(line)
        raise ConnectionLostError

    def _read_hello(self) -> dict[str, Any]:
        line = self._output.readline()
        if not line:
            raise ConnectionLostError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the session. What was asked for is over, or goes on without us."""
        for stream in (self._input, self._output):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self, limit_s: float = 0.0) -> None:
        """End the session from another thread; `limit_s` is the time that was too short."""
        self._timed_out = limit_s
        self._process.kill()

    def _read_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := stream.read1(4096):  # type: ignore[attr-defined]
                self._stderr += chunk
                del self._stderr[:-_MAX_STDERR_BYTES]

    def _explain_end(self) -> EchelonError:
        """Return the error of a session that ended before its answer came."""
        host, ssh = self.target.host, self.target.ssh
        if self._timed_out:
            return LoginLostError(
                Fault(
                    f"{host} did not answer within {self._timed_out:g} s ({self.step})",
                    f"look whether `{ssh} {host} true` ends",
                ),
                exit=ExitCode.NOT_FOUND,
            )
        self.close()
        self._reader.join(2)
        code, text = self._process.returncode, bytes(self._stderr).decode(errors="replace")
        return LoginLostError(self._explain_exit(code, text), exit=ExitCode.NOT_FOUND)

    def _explain_exit(self, code: int, text: str) -> Fault:
        host, ssh, words = self.target.host, self.target.ssh, join_last_lines(text)
        if self.step == "connecting" and code == SSH_FAILED:
            return _explain_login(ssh, host, text, words)
        if code == NO_PYTHON:
            return Fault(
                f"{host} has no Python 3.10 or newer on its PATH; it has {words}",
                "name one there with launch.python=PATH, for example of a module",
            )
        if code in (SSH_FAILED, -9, -13, 0):
            return Fault(
                f"the connection to {host} was lost ({self.step})" + f": {words}" * bool(words),
                "type the same command again: it finds out what became of it",
            )
        what = "has no sh" if code == _COMMAND_NOT_FOUND else f"ended with {code}"
        return Fault(
            f"{host} {what} ({self.step}): {words or 'it printed nothing'}",
            f"look whether `{ssh} {host} sh -c true` works",
        )


def _explain_login(ssh: str, host: str, text: str, words: str) -> Fault:
    if fault := explain_host_key_failure(ssh, host, text, "set it up with `echelon setup ssh`"):
        return fault
    if "permission denied" in text.lower() or "too many authentication" in text.lower():
        return Fault(
            f"{host} does not let you in: {words}",
            f"`{ssh} {host} true` has to work without a question; where it asks for a second "
            "factor, keep a shared connection open (ControlMaster auto, ControlPath and "
            "ControlPersist in ssh's configuration) and log in once by hand",
        )
    return Fault(
        f"{host} cannot be reached: {words or 'ssh says nothing'}",
        f"`{ssh} {host} true` has to work without a question",
    )


def raise_faults(host: str, message: dict[str, Any]) -> None:
    """Raise the faults that an answer brings, with the machine that they are of."""
    faults = message.get("faults")
    if faults:
        code = message.get("exit", ExitCode.FAILED)
        raise EchelonError(
            *(Fault(f"on {host}: {what}", do) for what, do in faults), exit=ExitCode(code)
        )


_early: dict[tuple[str, str, str | None], subprocess.Popen[bytes]] = {}
"""Sessions that were begun before they were needed, by host, ssh command and Python."""


def connect_early(host: str, ssh: str, python: str | None) -> None:
    """Begin the session that `open_connection` will take, while this command is busy otherwise.

    Where nobody takes it, it ends with this process.
    """
    key = (host, ssh, python)
    with contextlib.suppress(EchelonError, OSError):
        if key not in _early:
            _early[key] = _start_ssh(*key, asks_questions=_has_terminal())
            atexit.register(_end_early, key)


def _end_early(key: tuple[str, str, str | None]) -> None:
    if (process := _early.pop(key, None)) is not None:
        process.terminate()  # at a question it gives the terminal back as it was
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _start_ssh(
    host: str, ssh: str, python: str | None, *, asks_questions: bool
) -> subprocess.Popen[bytes]:
    """Start ssh with the program that answers there."""
    require_ssh(ssh, "launch.ssh")
    words = split_ssh_command(ssh, "launch.ssh")
    process = subprocess.Popen(
        [
            *build_ssh_prefix(words, host, asks_questions=asks_questions),
            make_remote_command(python),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for this process, which may still have something to say to the other side.
        start_new_session=not asks_questions,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; whoever waits for its answer hears why
        process.stdin.write(read_host_program())
        process.stdin.flush()
    return process


@contextlib.contextmanager
def open_connection(
    target: LoginTarget, limit_s: float = 0.0, asks_questions: bool | None = None
) -> Iterator[LoginConnection]:
    """Open a session; at its end nothing of ours runs there. After `limit_s` it is given up.

    ssh may ask for a password or a second factor where somebody sits at the terminal; lists never
    ask.
    """
    key = (target.host, target.ssh, target.python)
    process = _early.pop(key, None) if asks_questions is None else None
    if process is None:
        asks = _has_terminal() if asks_questions is None else asks_questions
        process = _start_ssh(*key, asks_questions=asks)
    connection = LoginConnection(target, process)
    watchdog = threading.Timer(limit_s, connection.kill, (limit_s,))
    watchdog.daemon = True
    if limit_s:
        watchdog.start()
    try:
        connection.open()
        yield connection
    finally:
        watchdog.cancel()
        connection.close()
