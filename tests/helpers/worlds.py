"""Worlds of forked ranks, commands, and what a run left behind.

Ranks are forked from a process that has imported torch already, see `fork_server.py`: a world costs
a fraction of a second instead of an import per rank. What a rank is to suffer is given as data, see
`toy_experiments.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import toy_experiments
from command_runner import (
    CommandResult,
    ProcessHandle,
    RunningCommand,
    ended,
    free_port,
    start_with,
    wait_for_all,
)
from main_program import run_as_main_program
from rank_fork_server import ForkServer

import echelon.commands.train
import echelon.launch.node.agent  # noqa: F401  what a launch imports, as above
from echelon.cli import run_and_report_faults, run_command
from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.entrypoint import make_user_experiment
from echelon.launch.node.service import uses_dynamo
from echelon.parallel.process_group import RankGroup
from echelon.runs.metrics_file import SPEED_METRICS, read_metrics
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots, parse_step
from echelon.snapshot.reader import verify_snapshot
from echelon.train.worker import train_in_process
from echelon.world.detect import detect
from echelon.world.sealed_store import SealedStore

LIMIT_S = 300.0
"""No world of these tests takes as long; one that does hangs."""
GONE_S = 60.0
"""After any end, every process is gone within this."""
_CLOCKS = ("time", *SPEED_METRICS)


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
    interrupt: Callable[[Sequence[int]], None] | None = None,
    has_dynamo: bool = False,
) -> list[Ended]:
    """Call `rank_main(rank, master)` in a process for every rank and wait for all.

    `rank_main` is a function of a module, or a `partial` of one: it travels to another process.
    `end_together`: when one ends in failure the others are killed, as an agent would.
    `interrupt` is called here with the processes of the ranks, once all are started.
    `has_dynamo`: ranks find torch._dynamo imported, which each would have to import.
    """
    folder.mkdir(parents=True, exist_ok=True)
    master = f"127.0.0.1:{free_port()}"
    server = _fork_server(has_dynamo)
    pids: list[int] = []
    try:
        for rank in range(world_size):
            beside = folder / f"rank-{rank}"
            for old in (beside.with_suffix(".out"), beside.with_suffix(".json")):
                old.unlink(missing_ok=True)
            call = partial(_run_rank, rank_main, rank, master, beside.with_suffix(".json"))
            variables = {**(env or {}), "ECHELON_TEST_RANK": str(rank)}
            pids.append(server.fork(call, beside.with_suffix(".out"), variables))
        if interrupt is not None:
            interrupt(pids)
        codes = _wait_all(server, pids, end_together, limit_s)
        require_gone(pids)
    except BaseException:
        kill_sessions(pids)
        _end_fork_server(has_dynamo)  # it may be in the middle of an answer
        raise
    return [_ended(code, folder / f"rank-{rank}") for rank, code in enumerate(codes)]


def _run_rank(rank_main: Callable[[int, str], Any], rank: int, master: str, result: Path) -> None:
    torch.set_num_threads(1)
    result.write_text(json.dumps(rank_main(rank, master)))


def join_gloo_group(rank: int, world_size: int, master: str) -> RankGroup:
    """Open a process group in a rank of `spawn_world` that trains nothing."""
    host, port = master.split(":")
    store = torch.distributed.TCPStore(
        host, int(port), world_size, is_master=rank == 0, timeout=timedelta(seconds=60)
    )
    world = detect({}, rank=rank, world_size=world_size, master=master, visible_devices=0).world
    group = RankGroup(world, SealedStore(store, None), rank == 0, 60.0)
    group.init_process_group("gloo")
    return group


_servers: dict[bool, ForkServer] = {}


def _fork_server(has_dynamo: bool = False) -> ForkServer:
    """This process's own, started by the first world that needs it."""
    if has_dynamo not in _servers:
        _servers[has_dynamo] = ForkServer(*(["torch._dynamo"] if has_dynamo else []))
    return _servers[has_dynamo]


def _end_fork_server(has_dynamo: bool) -> None:
    _servers.pop(has_dynamo).close()


def _wait_all(
    server: ForkServer, pids: Sequence[int], end_together: bool, limit_s: float
) -> list[int]:
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
                codes[pid] = server.wait(pid)
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
    folder: Path, words: Sequence[str], experiment: Callable[..., Any] = toy_experiments.regression
) -> Config:
    """As `python FILE.py WORDS` would compose it, one thread, every step logged, under `folder`."""
    ours = [f"run.dir={folder}", "track.progress=none", "trainer.log_steps=1", "launch.threads=1"]
    return compose([*ours, *words], make_user_experiment(experiment))


def make_world_env(folder: Path, name: str, trace: bool = False, fault: str = "") -> dict[str, str]:
    """Return the variables of a world whose ranks write down their batches (`trace`), in a folder
    named after the run, or of which one fails (`fault`, such as `1:6:KILL`)."""
    env = {"ECHELON_TEST_FAULT": fault} if fault else {}
    if trace:
        traces = folder / f"trace-{name}"
        traces.mkdir()
        env["ECHELON_TEST_TRACE"] = str(traces)
    return env


def train_world(
    folder: Path,
    world_size: int,
    *words: str,
    name: str = "a",
    experiment: Callable[..., Any] = toy_experiments.regression,
    env: Mapping[str, str] | None = None,
    end_together: bool = False,
    prepare: Callable[[int], None] | None = None,
) -> Trained:
    """Train as `python FILE.py rank=R world_size=N run.name=NAME WORDS` on every rank."""
    config = configured(folder, [f"run.name={name}", *words], experiment)
    return train_config(
        folder, world_size, config, env=env, end_together=end_together, prepare=prepare
    )


def train_config(
    folder: Path,
    world_size: int,
    config: Config,
    *,
    env: Mapping[str, str] | None = None,
    end_together: bool = False,
    prepare: Callable[[int], None] | None = None,
    interrupt: Callable[[Sequence[int]], None] | None = None,
) -> Trained:
    """`prepare(rank)` is called in every rank before it trains; `interrupt`: see `spawn_world`."""
    rank_main = partial(_train_rank, config=config, world_size=world_size, prepare=prepare)
    output = folder / f"output-{config.run.name}"
    ranks = spawn_world(
        world_size,
        rank_main,
        output,
        env=env,
        end_together=end_together,
        interrupt=interrupt,
        has_dynamo=uses_dynamo(config),
    )
    return Trained(Run(folder / str(config.run.name)), ranks)


def _train_rank(
    rank: int,
    master: str,
    config: Config,
    world_size: int,
    prepare: Callable[[int], None] | None,
) -> None:
    if prepare is not None:
        prepare(rank)
    if world_size > 1:
        config = dataclasses.replace(config, rank=rank, world_size=world_size, master=master)
    raise SystemExit(train_in_process(config))


def verb(folder: Path, *words: str) -> Ended:
    """`echelon WORDS`, without the import of torch that a process of its own would pay."""
    [ended] = run_commands(folder, [words])
    return ended


def run_commands(folder: Path, commands: Sequence[Sequence[str]]) -> list[Ended]:
    """`echelon WORDS` for every command, all at once."""
    rank_main = partial(_run_command, commands=commands)
    return spawn_world(len(commands), rank_main, folder / "output-verb")


def start_forked(
    words: Sequence[str], folder: Path, host: str | None = None, **variables: str
) -> RunningCommand:
    """`python WORDS` in a folder, as `command_runner.start` does it, where WORDS begin with the
    interpreter and then `-m MODULE` or a file; only torch is imported already, which would take
    longer than all of the rest. Stop it, kill it, wait for it: it is a process of its own, on a
    host of the test cluster if one is named."""
    assert words[0] == sys.executable, words
    return start_with(partial(_fork, host), words, folder, **variables)


def _fork(
    host: str | None,
    words: Sequence[str],
    folder: Path,
    variables: dict[str, str],
    out: IO[bytes],
    err: IO[bytes],
) -> ProcessHandle:
    files = [Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in (out, err)]
    call = partial(run_as_main_program, list(words[1:]), host)
    return _fork_server().start(call, files[0], variables, files[1], folder)


def run_forked(words: Sequence[str], folder: Path, **variables: str) -> CommandResult:
    """The same, to its end."""
    return start_forked(words, folder, **variables).wait()


def started_forked(
    words: Sequence[str], folder: Path, **variables: str
) -> AbstractContextManager[RunningCommand]:
    """The same, ended with the test, whatever that does to it."""
    return ended(start_forked(words, folder, **variables))


def run_all_forked(
    commands: Sequence[Sequence[str]], folder: Path, **variables: str
) -> list[CommandResult]:
    """The same of several that run beside each other, started in this order."""
    return wait_for_all([start_forked(words, folder, **variables) for words in commands])


def _run_command(rank: int, master: str, commands: Sequence[Sequence[str]]) -> None:
    sys.argv = ["echelon", *commands[rank]]  # code of the user may read it
    raise SystemExit(run_and_report_faults(lambda: run_command(list(commands[rank]))))


# --- what a run left behind ---------------------------------------------------------------------


def metrics(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock wrote."""
    lines = read_metrics(run.metrics_file)
    return [{k: v for k, v in line.items() if k not in _CLOCKS} for line in lines]


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def steps_logged(run: Run) -> list[int]:
    return [line["step"] for line in metrics(run) if "loss" in line]


def snapshot_steps(run: Run) -> list[int]:
    return [parse_step(folder.name) or 0 for folder in list_snapshots(run.snapshots_folder)]


def state_at(run: Run, step: int) -> dict[str, Any]:
    """Every part of a snapshot."""
    snapshot = verify_snapshot(run.snapshots_folder / f"step-{step:09d}")
    return {part: snapshot.load_part(part) for part in snapshot.parts}


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


# --- what ranks wrote down (ECHELON_TEST_TRACE) ---


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
