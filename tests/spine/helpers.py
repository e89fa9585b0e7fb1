"""Worlds of forked ranks, commands, and what a run left behind.

Ranks are forked from the test process, which has imported torch already: a world costs a fraction
of a second instead of an import per rank. The parent never trains, so that every fork starts clean.
What a rank is to suffer is given as data, see `subjects.py`.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metric_set  # noqa: F401  torchmetrics takes a second to import
import subjects
import torch
import torch._dynamo  # DDP and the optimizers import it on first use: once here, not in every rank
from launching import free_port

from echelon.cli import dispatch, guarded
from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.entry import own_experiment
from echelon.runs import Run
from echelon.track import jsonl
from echelon.track.lines import SPEED
from echelon.train.snapshots import listed, step_of, verify
from echelon.train.worker import train_here

LIMIT_S = 120.0
"""No world of these tests takes as long; one that does hangs."""
GONE_S = 20.0
"""After any end, every process is gone within this."""
ECHELON = [sys.executable, "-m", "echelon"]
_CLOCKS = ("time", *SPEED)


# --- worlds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    """As of subprocess: negative for a signal."""
    output: str
    """What it printed on stdout and stderr."""
    value: Any = None
    """What its function returned, if it did."""


def spawn_world(
    world_size: int,
    rank_main: Callable[[int, str], Any],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    end_together: bool = False,
    limit_s: float = LIMIT_S,
) -> list[Ended]:
    """Fork `rank_main(rank, master)` for every rank and wait for all; the parent asserts.

    `end_together`: when one ends in failure the others are killed, as an agent would.
    """
    folder.mkdir(parents=True, exist_ok=True)
    master = f"127.0.0.1:{free_port()}"
    sys.stdout.flush()
    sys.stderr.flush()
    pids = [_fork(rank_main, r, master, folder, dict(env or {})) for r in range(world_size)]
    try:
        codes = _wait_all(pids, end_together, limit_s)
        require_gone(pids)
    except BaseException:
        kill_sessions(pids)
        raise
    return [_ended(code, folder / f"rank-{rank}") for rank, code in enumerate(codes)]


def _fork(
    rank_main: Callable[[int, str], Any], rank: int, master: str, folder: Path, env: dict[str, str]
) -> int:
    beside = folder / f"rank-{rank}"
    for old in (beside.with_suffix(".out"), beside.with_suffix(".json")):
        old.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()  # what it leaves behind is found by its session
        atexit._clear()  # the parent's
        _become_plain(beside.with_suffix(".out"))
        os.environ.update(env, SPINE_RANK=str(rank))
        torch.set_num_threads(1)
        value = rank_main(rank, master)
        beside.with_suffix(".json").write_text(json.dumps(value))
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_plain(output: Path) -> None:
    """No capture and no signal handlers of pytest's."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _wait_all(pids: Sequence[int], end_together: bool, limit_s: float) -> list[int]:
    deadline = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    handles = {os.pidfd_open(pid): pid for pid in pids}
    try:
        while len(codes) < len(pids):
            waiting = [h for h, pid in handles.items() if pid not in codes]
            ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"after {limit_s} s still running: rank {_of(pids, codes)}")
            for handle in ready:
                pid = handles[handle]
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if end_together and any(codes.values()):
                for pid in set(pids) - codes.keys():
                    os.kill(pid, signal.SIGKILL)
    finally:
        for handle in handles:
            os.close(handle)
    return [codes[pid] for pid in pids]


def _of(pids: Sequence[int], codes: Mapping[int, int]) -> list[int]:
    return [rank for rank, pid in enumerate(pids) if pid not in codes]


def _ended(code: int, beside: Path) -> Ended:
    value = beside.with_suffix(".json")
    told = json.loads(value.read_text()) if value.exists() else None
    return Ended(code, beside.with_suffix(".out").read_text(), told)


# --- processes ----------------------------------------------------------------------------------


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {limit_s} s not yet: {what}")
        time.sleep(0.005)


def members(sessions: Iterable[int]) -> list[int]:
    """The living processes of these sessions; a session outlives its first process."""
    wanted, found = set(sessions), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[3]) in wanted and fields[0] != "Z":
            found.append(int(entry))
    return found


def require_gone(sessions: Sequence[int], limit_s: float = GONE_S) -> None:
    wait_until(lambda: not members(sessions), f"no process of {sessions} left", limit_s)


def kill_sessions(sessions: Sequence[int]) -> None:
    for pid in members(sessions):
        os.kill(pid, signal.SIGKILL)


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A world after it ended."""

    run: Run
    ranks: list[Ended]

    @property
    def codes(self) -> list[int]:
        return [rank.code for rank in self.ranks]

    @property
    def said(self) -> str:
        return self.ranks[0].output


def configured(
    folder: Path, words: Sequence[str], experiment: Callable[..., Any] = subjects.regression
) -> Config:
    """As `python FILE.py WORDS` would compose it, one thread, every step logged, under `folder`."""
    ours = [f"run.dir={folder}", "track.progress=none", "trainer.log_steps=1", "launch.threads=1"]
    return compose([*ours, *words], own_experiment(experiment))


def train_world(
    folder: Path,
    world_size: int,
    *words: str,
    name: str = "a",
    experiment: Callable[..., Any] = subjects.regression,
    env: Mapping[str, str] | None = None,
    end_together: bool = False,
) -> Trained:
    """Train as `python FILE.py rank=R world_size=N run.name=NAME WORDS` on every rank."""
    config = configured(folder, [f"run.name={name}", *words], experiment)
    return train_config(folder, world_size, config, env=env, end_together=end_together)


def train_config(
    folder: Path,
    world_size: int,
    config: Config,
    *,
    env: Mapping[str, str] | None = None,
    end_together: bool = False,
) -> Trained:
    def rank_main(rank: int, master: str) -> None:
        mine = config
        if world_size > 1:
            mine = dataclasses.replace(config, rank=rank, world_size=world_size, master=master)
        raise SystemExit(train_here(mine))

    output = folder / f"output-{config.run.name}"
    ranks = spawn_world(world_size, rank_main, output, env=env, end_together=end_together)
    assert config.run.name is not None
    return Trained(Run(folder / config.run.name), ranks)


def verb(folder: Path, *words: str) -> Ended:
    """`echelon WORDS`, without the import of torch that a process of its own would pay."""

    def rank_main(rank: int, master: str) -> None:
        raise SystemExit(guarded(lambda: dispatch(list(words))))

    [ended] = spawn_world(1, rank_main, folder / "output-verb")
    return ended


# --- what a run left behind ---------------------------------------------------------------------


def metrics(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock wrote."""
    lines = jsonl.read(run.metrics_file)
    return [{k: v for k, v in line.items() if k not in _CLOCKS} for line in lines]


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def steps_logged(run: Run) -> list[int]:
    return [line["step"] for line in metrics(run) if "loss" in line]


def snapshot_steps(run: Run) -> list[int]:
    return [step_of(folder.name) or 0 for folder in listed(run.snapshots)]


def state_at(run: Run, step: int) -> dict[str, Any]:
    """Every part of a snapshot."""
    snapshot = verify(run.snapshots / f"step-{step:09d}")
    return {part: snapshot.load(part) for part in snapshot.parts}


def differing(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two trees are not the same bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [found for key in a for found in differing(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (x, y) in pairs for found in differing(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]


# --- the command --------------------------------------------------------------------------------


def command(
    words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`echelon WORDS` in a folder, in a session of its own."""
    return subprocess.Popen(
        [*ECHELON, *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
    """Wait for a command; nothing of it may be left."""
    try:
        output, _ = process.communicate(timeout=limit_s)
        require_gone([process.pid])
    except BaseException:
        kill_sessions([process.pid])
        raise
    return Ended(process.returncode, output)


def echelon(words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    return finish(command(words, folder, env))


# --- what ranks wrote down (SPINE_TRACE) --------------------------------------------------------


def traced_lines(folder: Path, key: str) -> list[dict[str, Any]]:
    """Lines with this key, in the order each process wrote them."""
    texts = [file.read_text() for file in sorted(folder.iterdir())]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return [line for line in lines if key in line]


def global_batches(folder: Path) -> list[list[int]]:
    """The samples of every step, the ranks' shares joined in the order of ranks."""
    lines = sorted(traced_lines(folder, "batch"), key=lambda line: (line["batch"], line["rank"]))
    steps = max(line["batch"] for line in lines)
    return [
        [sample for line in lines if line["batch"] == step for sample in line["samples"]]
        for step in range(1, steps + 1)
    ]
