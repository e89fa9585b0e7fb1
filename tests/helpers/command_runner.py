"""Start real commands, wait for what they do, and count what they leave behind."""

from __future__ import annotations

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

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
    def last_lines(self) -> str:
        return "\n".join(self.err.rstrip().splitlines()[-3:])


@dataclass
class RunningCommand:
    """A command that runs, and everything it started, known by a variable they all inherit."""

    process: subprocess.Popen[bytes]
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
        with suppress(AssertionError):
            until(lambda: not self._find_own(), _GONE_S, "gone")
        left = self._find_own()
        lines = [_command_of(pid) for pid in left]
        _kill(left)
        return CommandResult(code, _text(self.out), _text(self.err), lines, seconds)

    def _find_own(self) -> list[int]:
        """Those that must end with the command: not the jobs that it queued."""
        return [pid for pid in marked(self.mark) if not _is_in_slurm_job(pid)]

    def read_output(self) -> str:
        return _text(self.out) + _text(self.err)

    def end(self) -> None:
        _kill(marked(self.mark))
        self.process.wait()


def start(words: Sequence[str], cwd: Path, **variables: str) -> RunningCommand:
    mark = uuid.uuid4().hex
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  read at the end
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    # torchrun says so itself otherwise, on every start.
    env |= {"OMP_NUM_THREADS": "1", _MARK: mark, **variables}
    process = subprocess.Popen(
        list(words), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
    )
    return RunningCommand(process, out, err, mark)


def run(
    words: Sequence[str], cwd: Path, timeout_s: float = 300.0, **variables: str
) -> CommandResult:
    return start(words, cwd, **variables).wait(timeout_s)


@contextmanager
def started(words: Sequence[str], cwd: Path, **variables: str) -> Iterator[RunningCommand]:
    """Whatever a test does to it, nothing of it outlives the test."""
    command = start(words, cwd, **variables)
    try:
        yield command
    finally:
        command.end()


def together(
    commands: Sequence[Sequence[str]], cwd: Path, timeout_s: float = 300.0, **variables: str
) -> list[CommandResult]:
    """Commands started in this order without waiting, as by several people at once."""
    running = [start(words, cwd, **variables) for words in commands]
    try:
        return [command.wait(timeout_s) for command in running]
    finally:
        for command in running:
            command.end()


def until(true: Callable[[], Any], limit_s: float, what: str) -> Any:
    """What the function gives once it gives something."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s} s: {what}")


# --- processes ---


def marked(mark: str) -> list[int]:
    """Living processes that inherited the mark."""
    needle = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if _state_of(pid) not in "ZX"]


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


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


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

    row = struct.Struct("<QQd")
    try:
        raw = (run_folder / ".heartbeat-0").read_bytes()
    except OSError:
        return [0] * ranks
    if len(raw) < row.size * ranks:
        return [0] * ranks
    return [row.unpack_from(raw, r * row.size)[1] for r in range(ranks)]


# --- what a person reads ---


def is_a_sentence_and_a_hint(text: str) -> bool:
    """`error: what` and `hint: what to do`, for every fault, and no traceback."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    hints = [line for line in text.splitlines() if line.startswith("  hint: ")]
    return bool(errors) and len(errors) == len(hints) and "Traceback" not in text


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
