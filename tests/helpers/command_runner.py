"""Start real commands, wait for what they do, and count what they leave behind."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from echelon.cli import run_and_report_faults, run_command
from echelon.runs.metrics_file import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"
ECHELON = (sys.executable, "-m", "echelon")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO = ("launch=local", "launch.procs=2")
QUICK = ("samples=64", "eval_samples=16", "trainer.batch_size=8", "trainer.epochs=2")
"""The toy in 16 steps."""

_MARK = "ECHELON_TEST_MARK"
_GONE_S = 60.0
"""No process may be left so long after the first one ended."""
_OURS = re.compile(r'File ".*/src/echelon/.*", line')


@dataclass(frozen=True)
class CommandResult:
    """A command that ended."""

    code: int
    out: str
    err: str
    left: list[str]
    """What of it still ran a minute later."""
    seconds: float

    @property
    def output(self) -> str:
        return self.out + self.err

    @property
    def last_lines(self) -> str:
        return "\n".join(self.err.rstrip().splitlines()[-3:])


class ProcessHandle(Protocol):
    """What tests use of `subprocess.Popen`; `rank_fork_server.ForkedProcess` has it too."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass
class RunningCommand:
    """A command that runs, and everything it started: known by a variable that they all inherit,
    or by its session, where the command was forked and began it."""

    process: ProcessHandle
    out: IO[bytes]
    err: IO[bytes]
    mark: str
    began: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float = 300.0) -> CommandResult:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(
                f"still running after {timeout_s} s\n{self.read_output()}"
            ) from None
        seconds = time.monotonic() - self.began
        left: list[int] = []
        try:
            until(lambda: not self._find_own(), _GONE_S, "gone")
        except AssertionError:
            left = self._find_own()
        lines = [_command_of(pid) for pid in left]
        _kill(left)
        return CommandResult(code, _text(self.out), _text(self.err), lines, seconds)

    def find_all(self) -> list[int]:
        """The command and all that it started, as far as they live."""
        return find_processes([self])

    def _find_own(self) -> list[int]:
        """Those that must end with the command: not the jobs that it queued."""
        return [pid for pid in self.find_all() if not _is_in_slurm_job(pid)]

    def read_output(self) -> str:
        return _text(self.out) + _text(self.err)

    def describe(self) -> str:
        """What it has printed last, and where its processes stand."""
        return "\n".join([self.read_output()[-2000:], *map(_describe_process, self.find_all())])

    def end(self) -> None:
        _kill(self.find_all())
        self.process.wait()


StartProcess = Callable[[Sequence[str], Path, dict[str, str], IO[bytes], IO[bytes]], ProcessHandle]
"""Of words, a folder, variables, and the files that take stdout and stderr."""


def _spawn(
    words: Sequence[str], cwd: Path, variables: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> ProcessHandle:
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | variables
    return subprocess.Popen(
        list(words), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    )


def start_with(
    start_process: StartProcess, words: Sequence[str], cwd: Path, **variables: str
) -> RunningCommand:
    mark = uuid.uuid4().hex
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  read at the end
    # torchrun says so itself otherwise, on every start.
    given = {"OMP_NUM_THREADS": "1", _MARK: mark, **variables}
    return RunningCommand(start_process(words, cwd, given, out, err), out, err, mark)


def start(words: Sequence[str], cwd: Path, **variables: str) -> RunningCommand:
    return start_with(_spawn, words, cwd, **variables)


def run(
    words: Sequence[str], cwd: Path, timeout_s: float = 300.0, **variables: str
) -> CommandResult:
    return start(words, cwd, **variables).wait(timeout_s)


@contextmanager
def ended(command: RunningCommand) -> Iterator[RunningCommand]:
    """Whatever a test does to it, nothing of it outlives the test."""
    try:
        yield command
    finally:
        command.end()


def started(
    words: Sequence[str], cwd: Path, **variables: str
) -> AbstractContextManager[RunningCommand]:
    return ended(start(words, cwd, **variables))


def together(
    commands: Sequence[Sequence[str]], cwd: Path, timeout_s: float = 300.0, **variables: str
) -> list[CommandResult]:
    """Commands started in this order without waiting, as by several people at once."""
    return wait_for_all([start(words, cwd, **variables) for words in commands], timeout_s)


def wait_for_all(
    running: Sequence[RunningCommand], timeout_s: float = 300.0
) -> list[CommandResult]:
    try:
        return [command.wait(timeout_s) for command in running]
    finally:
        for command in running:
            command.end()


def run_here(words: Sequence[str], folder: Path, **variables: str) -> CommandResult:
    """`echelon WORDS` in this process, for a command that starts nothing: an interpreter of its
    own would cost more than what it does."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    began, came_from, environ = time.monotonic(), os.getcwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(variables)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run_and_report_faults(lambda: run_command(list(words)))
    except SystemExit as exit_request:  # argparse's
        code = int(exit_request.code or 0)
    finally:
        os.chdir(came_from)
        os.environ.clear()
        os.environ.update(environ)
    texts = []
    for file in (out, err):
        file.flush()
        texts.append(file.detach().getvalue().decode())
    return CommandResult(code, texts[0], texts[1], [], time.monotonic() - began)


def until(
    true: Callable[[], Any], limit_s: float, what: str, explain: Callable[[], str] = lambda: ""
) -> Any:
    """What the function gives once it gives something. It is asked for a quarter of the time at
    most: what it waits for needs the processors too. `explain` says how things stand if it gives
    nothing."""
    deadline = time.monotonic() + limit_s
    while (asked := time.monotonic()) < deadline:
        if found := true():
            return found
        time.sleep(max(0.03, 3 * (time.monotonic() - asked)))
    raise AssertionError(f"not within {limit_s} s: {what}\n{explain()}")


# --- processes ---


def _describe_process(pid: int) -> str:
    """Its processor time and its Python stacks."""
    usage = subprocess.run(["ps", "-o", "pid,time,stat,args", "-p", str(pid)], capture_output=True)
    spy = Path(sys.executable).with_name("py-spy")
    stacks = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True)
    return (usage.stdout + stacks.stdout + stacks.stderr).decode()


def find_processes(commands: Sequence[RunningCommand]) -> list[int]:
    """Living processes of these commands: those that inherited a mark, or are of a session."""
    needles = {f"{_MARK}={each.mark}".encode() for each in commands}
    sessions = {each.process.pid for each in commands}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            if int(fields[3]) in sessions or needles.intersection(_read_variables(entry)):
                found.append(int(entry))
    return found


def _read_variables(pid: str) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _is_in_slurm_job(pid: int) -> bool:
    with suppress(OSError):
        return b"\0SLURM_JOB_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def workers(agent: int) -> list[int]:
    """The children of the agent's fork_server."""
    return [worker for fork_server in children(agent) for worker in children(fork_server)]


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return str(pid)


def free_port() -> int:
    """Below the ports the system gives to clients, so that none of those takes it meanwhile, and
    apart from those of our cluster's jobs and from the default one."""
    while True:
        port = random.SystemRandom().randrange(24_000, 29_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


# --- what a run left ---


def only_run(cwd: Path) -> Path:
    (folder,) = [p for p in (cwd / "runs").iterdir() if not p.is_symlink()]
    return folder


def status(run_folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_folder / "status.json").read_text())
    return loaded


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    return read_metrics(run_folder / "metrics.jsonl")


def curve(run_folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run_folder) if "loss" in line]


def evaluations(run_folder: Path) -> list[tuple[int, float]]:
    return [(m["step"], m["eval_loss"]) for m in metrics(run_folder) if "eval_loss" in m]


def steps_seen(run_folder: Path, ranks: int) -> list[int]:
    """The step of every rank of a local launch, as its agent sees it."""
    import struct

    head, row = struct.Struct("<QQ"), struct.Struct("<QQd")
    try:
        raw = (run_folder / ".heartbeat-0").read_bytes()
    except OSError:
        return [0] * ranks
    if len(raw) < head.size + row.size * ranks:
        return [0] * ranks
    return [row.unpack_from(raw, head.size + r * row.size)[1] for r in range(ranks)]


# --- what a person reads ---


def is_a_sentence_and_a_hint(text: str) -> bool:
    """`error: what` and `hint: what to do`, for every fault, and no traceback."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    hints = [line for line in text.splitlines() if line.startswith("  hint: ")]
    return bool(errors) and len(errors) == len(hints) and "Traceback" not in text


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
