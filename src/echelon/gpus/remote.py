"""Looking at other machines, over the system's ssh or through Slurm.

Keys, jump hosts and host-key checks are the user's own. What is run there is the text of our own
files, over standard input: any Python there will do, and both sides speak the same version.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from typing import NamedTuple

from echelon.gpus.state import GpuNode, node_from_dict
from echelon.hosts.ask import HostAnswer, ask_hosts, join_last_lines
from echelon.hosts.messages import split_message
from echelon.hosts.ssh import build_ssh_prefix, split_ssh_command
from echelon.utils.os_errors import describe_os_error

_ANSWER_TIMEOUT_S = 30.0
_RECONNECT_DELAY_S = 2.0
_STALE_AFTER_S = 3.0
_MODULES_SENT = (
    "echelon.hosts.messages",
    *(f"echelon.gpus.{name}" for name in ("nvml", "state", "processes", "orphans", "probe")),
    "echelon.gpus.remote_protocol",
)
"""In the order in which they import each other."""
_START_SCRIPT = 'p=$1; command -v "$p" >/dev/null 2>&1 || p=python3; exec "$p" -c "$2" "$3" "$4"'
_READ_PROGRAM = (
    "import sys; sys.version_info < (3, 9) and sys.exit('Python 3.9 is the least, there is ' + "
    "sys.version.split()[0]); exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
_LOADER = """\
import types
for name, text in SOURCES:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
    parent, _, short = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], short, module)
sys.modules["echelon.gpus.remote_protocol"].print_reports(float(sys.argv[2]))
"""


class RemoteMachine(NamedTuple):
    """Another machine, and the words that run a command on it."""

    host: str
    command_prefix: tuple[str, ...]
    needs_shell_quoting: bool
    """Whether it takes the command as one text for a shell."""

    def build_command(self, program_bytes: int, interval_s: float) -> list[str]:
        start = [
            "sh",
            "-c",
            _START_SCRIPT,
            "sh",
            sys.executable,
            _READ_PROGRAM,
            str(program_bytes),
            str(interval_s),
        ]
        return [
            *self.command_prefix,
            *([shlex.join(["exec", *start])] if self.needs_shell_quoting else start),
        ]


def list_ssh_machines(hosts: Sequence[str], ssh: str) -> list[RemoteMachine]:
    ssh_command = split_ssh_command(ssh, "--ssh")
    return [RemoteMachine(host, tuple(build_ssh_prefix(ssh_command, host)), True) for host in hosts]


def build_program() -> bytes:
    """All that is needed to look, in one text."""
    sources = [("echelon", ""), ("echelon.gpus", ""), ("echelon.hosts", "")]
    for module in _MODULES_SENT:
        package, _, name = module.rpartition(".")
        text = resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
        sources.append((module, text))
    return f"SOURCES = {sources!r}\n{_LOADER}".encode()


# --- once ---


def read_remote_nodes(machines: Sequence[RemoteMachine]) -> list[GpuNode]:
    """All at once; one that does not answer is a row that says why."""
    program = build_program()
    commands = [machine.build_command(len(program), 0) for machine in machines]
    answers = ask_hosts(commands, program, _ANSWER_TIMEOUT_S)
    return [_read_answer(*each) for each in zip(machines, answers, strict=True)]


def _read_answer(machine: RemoteMachine, answer: HostAnswer) -> GpuNode:
    for line in answer.stdout.split("\n"):
        if (node := _parse_report_line(machine, line)) is not None:
            return node
    if answer.exit_code is None:
        return GpuNode(machine.host, answer.failure)
    return GpuNode(machine.host, _describe_failure(answer.exit_code, answer.stderr))


def _parse_report_line(machine: RemoteMachine, line: str) -> GpuNode | None:
    _, message = split_message(line)
    with suppress(ValueError, KeyError, TypeError):
        return None if message is None else node_from_dict(message)._replace(host=machine.host)
    return None


def _describe_failure(code: int, stderr: str) -> str:
    return f"cannot be reached: {join_last_lines(stderr, 1) or f'nothing, and ended with {code}'}"


# --- again and again ---


class NodeFeed:
    """The newest that a machine told, over one connection that is made again when it is lost."""

    def __init__(self, machine: RemoteMachine, interval_s: float) -> None:
        self._there, self._every_s = machine, interval_s
        self._node = GpuNode(machine.host, "connecting …")
        self._heard = time.monotonic()
        self._fault = "no answer"
        self._process: subprocess.Popen[bytes] | None = None
        self._answered, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """For its first answer, or for the reason why there is none."""
        self._answered.wait(timeout_s)

    def get_latest(self) -> GpuNode:
        """As it was told last; with its age, where that is too long ago."""
        if not self._node.gpus:
            return self._node
        age = time.monotonic() - self._heard
        if age <= max(_STALE_AFTER_S, 3 * self._every_s):
            return self._node
        return self._node._replace(fault=self._fault, stale_s=age)

    def close(self) -> None:
        self._over.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        sent = build_program()
        while not self._over.is_set():
            self._fault = self._read_until_closed(sent)
            if not self._node.gpus:
                self._node = GpuNode(self._there.host, self._fault)
            self._answered.set()
            self._over.wait(_RECONNECT_DELAY_S)

    def _read_until_closed(self, sent: bytes) -> str:
        """Until the connection ends; why it did."""
        command = self._there.build_command(len(sent), self._every_s)
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as errors:
            program.write(sent)
            program.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=program, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as error:
                return f"{command[0]} cannot be run: {describe_os_error(error)}"
            with process:
                self._process = process
                if self._over.is_set():
                    process.kill()
                for line in process.stdout or ():
                    if (
                        node := _parse_report_line(self._there, line.decode(errors="replace"))
                    ) is not None:
                        self._node, self._heard, self._fault = node, time.monotonic(), "no answer"
                        self._answered.set()
            errors.seek(0)
            return _describe_failure(process.returncode, errors.read().decode(errors="replace"))
