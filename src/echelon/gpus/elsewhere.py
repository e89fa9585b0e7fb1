"""Looking at other machines, over the system's ssh or through Slurm.

Keys, jump hosts and host-key checks are the user's own. What is run there is the text of our own
files, over standard input: any Python there will do, and both sides speak the same version.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from typing import NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.gpus.snapshot import Node, from_dict
from echelon.gpus.told import MARK
from echelon.utils.os_errors import describe_os_error

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=2"),
    *("-o", "ControlMaster=no"),  # a connection that others share would keep our pipes open
)
_ANSWER_S = 30.0
_AT_ONCE = 64
_AGAIN_S = 2.0
_STALE_S = 3.0
_SENT = ("nvml", "snapshot", "processes", "ended", "look", "told")
"""In the order in which they import each other."""
_START = 'p=$1; command -v "$p" >/dev/null 2>&1 || p=python3; exec "$p" -c "$2" "$3" "$4"'
_READ = (
    "import sys; sys.version_info < (3, 9) and sys.exit('Python 3.9 is the least, there is ' + "
    "sys.version.split()[0]); exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
_LOAD = """\
import types
for name, text in SOURCES:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
    parent, _, short = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], short, module)
sys.modules["echelon.gpus.told"].tell(float(sys.argv[2]))
"""


class There(NamedTuple):
    """Another machine, and the words that run a command on it."""

    host: str
    words: tuple[str, ...]
    quoted: bool
    """Whether it takes the command as one text for a shell."""

    def command(self, size: int, every_s: float) -> list[str]:
        start = ["sh", "-c", _START, "sh", sys.executable, _READ, str(size), str(every_s)]
        return [*self.words, *([shlex.join(["exec", *start])] if self.quoted else start)]


def by_ssh(hosts: Sequence[str], ssh: str) -> list[There]:
    try:
        words = shlex.split(ssh) or ["ssh"]
    except ValueError as error:
        hint = "give the command that logs in, e.g. --ssh 'ssh -F FILE'"
        raise EchelonError(Fault(f"--ssh {ssh}: {str(error).lower()}", hint)) from None
    return [There(host, (*words, *_OPTIONS, "--", host), True) for host in hosts]


def program() -> bytes:
    """All that is needed to look, in one text."""
    package = resources.files("echelon.gpus")
    sources = [("echelon", ""), ("echelon.gpus", "")]
    for name in _SENT:
        sources.append(
            (f"echelon.gpus.{name}", package.joinpath(f"{name}.py").read_text(encoding="utf-8"))
        )
    return f"SOURCES = {sources!r}\n{_LOAD}".encode()


# --- once ---


def look_at(machines: Sequence[There]) -> list[Node]:
    """All at once; one that does not answer is a row that says why."""
    sent = program()
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(machines)))) as pool:
        return list(pool.map(lambda there: _ask(there, sent), machines))


def _ask(there: There, sent: bytes) -> Node:
    command = there.command(len(sent), 0)
    try:
        done = subprocess.run(command, input=sent, capture_output=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return Node(there.host, f"did not answer within {_ANSWER_S:g} s")
    except OSError as error:
        return Node(there.host, f"{command[0]}: {describe_os_error(error)}")
    for line in done.stdout.decode(errors="replace").split("\n"):
        if (node := _heard(there, line)) is not None:
            return node
    return Node(there.host, _refusal(done.returncode, done.stderr))


def _heard(there: There, line: str) -> Node | None:
    told = line.partition(MARK)[2]
    with suppress(ValueError, KeyError, TypeError):
        return from_dict(json.loads(told))._replace(host=there.host)
    return None


def _refusal(code: int, said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), f"nothing, and ended with {code}")
    return f"cannot be reached: {last}"


# --- again and again ---


class Feed:
    """The newest that a machine told, over one connection that is made again when it is lost."""

    def __init__(self, there: There, every_s: float) -> None:
        self._there, self._every_s = there, every_s
        self._node = Node(there.host, "connecting …")
        self._heard = time.monotonic()
        self._fault = "no answer"
        self._process: subprocess.Popen[bytes] | None = None
        self._answered, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """For its first answer, or for the reason why there is none."""
        self._answered.wait(timeout_s)

    def newest(self) -> Node:
        """As it was told last; with its age, where that is too long ago."""
        if not self._node.gpus:
            return self._node
        age = time.monotonic() - self._heard
        if age <= max(_STALE_S, 3 * self._every_s):
            return self._node
        return self._node._replace(fault=self._fault, stale_s=age)

    def close(self) -> None:
        self._over.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _live(self) -> None:
        sent = program()
        while not self._over.is_set():
            self._fault = self._listen(sent)
            if not self._node.gpus:
                self._node = Node(self._there.host, self._fault)
            self._answered.set()
            self._over.wait(_AGAIN_S)

    def _listen(self, sent: bytes) -> str:
        """Until the connection ends; why it did."""
        command = self._there.command(len(sent), self._every_s)
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as errors:
            program.write(sent)
            program.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=program, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as error:
                return f"{command[0]}: {describe_os_error(error)}"
            with process:
                self._process = process
                if self._over.is_set():
                    process.kill()
                for line in process.stdout or ():
                    if (node := _heard(self._there, line.decode(errors="replace"))) is not None:
                        self._node, self._heard, self._fault = node, time.monotonic(), "no answer"
                        self._answered.set()
            errors.seek(0)
            return _refusal(process.returncode, errors.read())
