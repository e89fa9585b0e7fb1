"""Reads the GPUs of other machines, over the system's ssh or through Slurm's srun.

Keys, jump hosts and the checking of host keys are the user's own ssh configuration. The program
that runs there is the text of our own modules, sent over standard input: Echelon need not be
installed there, any Python from 3.9 on will do, and both ends have the same version.
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

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.gpus.probe import GpuNode, node_from_dict
from echelon.hosts.ask import HostAnswer, ask_hosts, join_last_lines
from echelon.hosts.message_protocol import split_message
from echelon.hosts.ssh import build_ssh_prefix, explain_host_key_failure, split_ssh_command
from echelon.utils.os_errors import format_os_error_reason

_ANSWER_TIMEOUT_S = 30.0
_SLURM_TIMEOUT_S = 30.0
_RECONNECT_DELAY_S = 2.0
_STALE_AFTER_S = 3.0
_MODULES_SENT = (
    "echelon.hosts.message_protocol",
    "echelon.gpus.nvml",
    "echelon.gpus.processes",
    "echelon.gpus.probe",
)
"""Each imports only modules before it."""
_START_SCRIPT = 'p=$1; command -v "$p" >/dev/null 2>&1 || p=python3; exec "$p" -c "$2" "$3" "$4"'
"""Starts the Python at the path of ours if there is one (a shared environment), else python3."""
_READ_PROGRAM = (
    "import sys; sys.version_info < (3, 9) and sys.exit("
    "'Python 3.9 or later is needed, there is ' + sys.version.split()[0]); "
    "exec(sys.stdin.buffer.read(int(sys.argv[1])))"
)
"""Reads the program from standard input: as an argument it would be too long for some kernels."""
_LOADER = """\
import types
for name, text in SOURCES:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
    parent, _, short = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], short, module)
sys.modules["echelon.gpus.probe"].print_reports(float(sys.argv[2]))
"""
"""The end of the program: builds the modules from their texts, then prints reports."""


# --- which machines, and how to run a command there ---


class RemoteMachine(NamedTuple):
    """Another machine, and the arguments that run a command on it."""

    host: str
    command_prefix: tuple[str, ...]
    needs_shell_quoting: bool
    """Whether the command is passed as one text for a shell, as ssh does, not as arguments."""

    def build_command(self, program_bytes: int, interval_s: float) -> list[str]:
        """Return the arguments that start Python there and make it read the program."""
        arguments = (str(program_bytes), str(interval_s))
        start = ["sh", "-c", _START_SCRIPT, "sh", sys.executable, _READ_PROGRAM, *arguments]
        return [
            *self.command_prefix,
            *([shlex.join(["exec", *start])] if self.needs_shell_quoting else start),
        ]


def list_ssh_machines(hosts: Sequence[str], ssh: str) -> list[RemoteMachine]:
    """Return the hosts as machines that ``ssh``, the command of a user, logs in to."""
    ssh_command = split_ssh_command(ssh.strip() or "ssh", "--ssh")
    return [RemoteMachine(host, tuple(build_ssh_prefix(ssh_command, host)), True) for host in hosts]


def list_slurm_machines(partition: str, user: str, ssh: str) -> list[RemoteMachine]:
    """Return the nodes of a partition; with an empty one, those of the user's running jobs.

    The latter are reached through srun, because not every cluster permits logins to its nodes.
    """
    return _list_partition_machines(partition, ssh) if partition else _list_job_machines(user)


def _list_job_machines(user: str) -> list[RemoteMachine]:
    queue = _run_slurm_command("squeue", "-h", "-u", user, "-t", "RUNNING", "-o", "%A|%N")
    jobs = [line.split("|", 1) for line in queue.splitlines() if "|" in line]
    machines: dict[str, RemoteMachine] = {}
    for job, nodes in jobs:
        for host in _run_slurm_command("scontrol", "show", "hostnames", nodes).split():
            step = ("srun", "--overlap", "--quiet", f"--jobid={job}", f"--nodelist={host}")
            machines.setdefault(host, RemoteMachine(host, (*step, "-N1", "-n1"), False))
    if not machines:
        raise EchelonError(
            Fault(
                f"--slurm: {user} has no running job",
                "show all nodes of a partition with --slurm PARTITION",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    return [machines[host] for host in sorted(machines)]


def _list_partition_machines(partition: str, ssh: str) -> list[RemoteMachine]:
    hosts = _run_slurm_command("sinfo", "-h", "-N", "-p", partition, "-o", "%N").split()
    if not hosts:
        partitions = _run_slurm_command("sinfo", "-h", "-o", "%R").split()
        raise EchelonError(
            Fault(
                f"--slurm {partition}: there is no such partition",
                suggest_nearest(partition, partitions),
            ),
            exit=ExitCode.NOT_FOUND,
        )
    return list_ssh_machines(sorted(set(hosts)), ssh)


def _run_slurm_command(*words: str) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=_SLURM_TIMEOUT_S
        )
        reason = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {_SLURM_TIMEOUT_S:g} s"
    except OSError as error:
        reason = format_os_error_reason(error)
    if reason:
        raise EchelonError(
            Fault(f"--slurm: {words[0]} fails: {reason}", "is this a machine of a Slurm cluster?"),
            exit=ExitCode.NOT_FOUND,
        )
    return done.stdout


def build_program() -> bytes:
    """Return the text that reads the GPUs of a machine without Echelon, for standard input."""
    sources = [("echelon", ""), ("echelon.gpus", ""), ("echelon.hosts", "")]
    for module in _MODULES_SENT:
        package, _, name = module.rpartition(".")
        text = resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
        sources.append((module, text))
    return f"SOURCES = {sources!r}\n{_LOADER}".encode()


# --- one reading ---


def read_remote_nodes(machines: Sequence[RemoteMachine]) -> list[GpuNode]:
    """Return one reading of each machine, all read in parallel.

    A machine that does not answer is a node whose ``fault`` says why.
    """
    program = build_program()
    commands = [machine.build_command(len(program), 0) for machine in machines]
    answers = ask_hosts(commands, program, _ANSWER_TIMEOUT_S)
    return [_read_answer(*pair) for pair in zip(machines, answers, strict=True)]


def _read_answer(machine: RemoteMachine, answer: HostAnswer) -> GpuNode:
    for line in answer.stdout.split("\n"):
        if (node := _parse_report_line(machine, line)) is not None:
            return node
    if answer.exit_code is None:
        return GpuNode(machine.host, answer.failure)
    return GpuNode(machine.host, _describe_failure(machine.host, answer.exit_code, answer.stderr))


def _parse_report_line(machine: RemoteMachine, line: str) -> GpuNode | None:
    """Return the node that a line reports; None for a line that a login shell printed."""
    _, message = split_message(line)
    with suppress(ValueError, KeyError, TypeError):
        return None if message is None else node_from_dict(message)._replace(host=machine.host)
    return None


def _describe_failure(host: str, code: int, stderr: str) -> str:
    if key_fault := explain_host_key_failure("ssh", host, stderr, ""):
        return key_fault.what
    reason = join_last_lines(stderr, 1) or f"no message, exit code {code}"
    return f"cannot be reached: {reason}"


# --- repeated readings ---


class NodeFeed:
    """The latest reading of a machine, over one connection that is reopened when it breaks.

    A thread reads the connection; the reading is replaced as a whole, so no lock is needed.
    """

    def __init__(self, machine: RemoteMachine, interval_s: float) -> None:
        self._machine, self._interval_s = machine, interval_s
        self._node = GpuNode(machine.host, "connecting …")
        self._received_at = time.monotonic()
        self._fault = "no answer"
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_for_first_reading(self, timeout_s: float) -> None:
        """Wait for the first reading, or for the reason why there is none."""
        self._has_answered.wait(timeout_s)

    def get_latest(self) -> GpuNode:
        """Return the latest reading; one that is too old has its age and the reason with it."""
        if not self._node.gpus:
            return self._node
        age_s = time.monotonic() - self._received_at
        if age_s <= max(_STALE_AFTER_S, 3 * self._interval_s):
            return self._node
        return self._node._replace(fault=self._fault, stale_s=age_s)

    def close(self) -> None:
        """End the connection and the thread."""
        self._is_closed.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        program = build_program()
        while not self._is_closed.is_set():
            self._fault = self._read_until_closed(program)
            if not self._node.gpus:
                self._node = GpuNode(self._machine.host, self._fault)
            self._has_answered.set()
            self._is_closed.wait(_RECONNECT_DELAY_S)

    def _read_until_closed(self, program: bytes) -> str:
        """Read reports until the connection ends; return why it did."""
        command = self._machine.build_command(len(program), self._interval_s)
        # Files, not pipes: writing or reading two pipes and standard output at once could block.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(program)
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr
                )
            except OSError as error:
                return f"{command[0]} cannot be run: {format_os_error_reason(error)}"
            with process:
                self._process = process
                if self._is_closed.is_set():  # close() may have looked before there was a process
                    process.kill()
                for line in process.stdout or ():
                    node = _parse_report_line(self._machine, line.decode(errors="replace"))
                    if node is not None:
                        self._node, self._received_at = node, time.monotonic()
                        self._fault = "no answer"
                        self._has_answered.set()
            stderr.seek(0)
            printed = stderr.read().decode(errors="replace")
            return _describe_failure(self._machine.host, process.returncode, printed)
