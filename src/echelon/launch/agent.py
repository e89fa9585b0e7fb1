"""torchrun's elastic agent, with workers forked from a zygote and one root cause at the end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from echelon import failure as failures
from echelon.errors import Exit
from echelon.failure import Failure
from echelon.launch.zygote import Order, Zygote, ZygoteGone
from echelon.pulse import Sign, Watch
from echelon.runs import Run

_MONITOR_S = 0.05
_STARTING_BEATS = 6
"""While a rank has made fewer it is starting or at rest, and the others may wait for it."""
_STARTING_PATIENCE = 8
"""So many times longer, but less than their collectives wait (train.group.meet)."""
_STACK_WAIT_S = 0.5
_KILL_WAIT_S = 5.0


class Agent(SimpleElasticAgent):
    """Starts and watches the workers of this node.

    torch's agent does rendezvous, ranks and restarts; this class says how a worker is started,
    watched and ended.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        store: dist.TCPStore,
        zygote: Zygote,
        run: Run,
        hang_s: float,
        entry: str,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=300)
        self._tcp_store = store
        self._zygote = zygote
        self._run = run
        self._hang_s = hang_s
        self._entry = entry
        self._attempt = -1
        self._pids: dict[int, int] = {}
        """Local rank → process."""
        self._codes: dict[int, int] = {}
        """Local rank → exit code, of those that ended."""
        self._interrupts = 0
        self._asked: signal.Signals | None = None
        """The signal that asked for a stop."""
        self._untold: list[int] = []
        """Local ranks that would not know of it yet."""
        self._hung: Failure | None = None
        self._watch = Watch(run.pulse_file, spec.local_world_size)
        self.failure: Failure | None = None
        """The first failure of the newest attempt."""

    # --- what torch's agent calls ---

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._pids, self._codes, self._untold, self._hung = {}, {}, [], None
        self._watch = Watch(self._run.pulse_file, worker_group.spec.local_world_size)
        if self._zygote.gone:
            self._zygote = self._zygote.again()
        for worker in worker_group.workers:
            self._zygote.start(self._order(worker, worker_group))
        while len(self._pids) + len(self._codes) < len(worker_group.workers):
            self._zygote.wait(1.0)
            self._hear()
        return {local_rank: str(pid) for local_rank, pid in self._pids.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with contextlib.suppress(ZygoteGone):  # the codes say what became of the workers
            self._hear()
        ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        failed = {r: c for r, c in self._codes.items() if c not in (Exit.OK, Exit.PREEMPTED)}
        if not failed:
            self._look_for_hang(ranks)
        if failed or self._hung:
            self._kill_all()  # peers of a dead rank only wait, and would blame each other
            self.failure = self._hung or self._cause(failed, ranks)
            self._announce()
            processes = {
                ranks[r]: ProcessFailure(r, self._pids.get(r, 0), c, "") for r, c in failed.items()
            }
            return RunResult(state=WorkerState.FAILED, failures=processes)
        if len(self._codes) == len(ranks):
            codes = {ranks[r]: code for r, code in self._codes.items()}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)
        return RunResult(state=WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._kill_all()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._kill_all()
        self._zygote.close()

    # --- workers ---

    def _order(self, worker: Any, group: WorkerGroup) -> Order:
        rank = worker.global_rank
        variables = {
            "RANK": rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": group.spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "MASTER_ADDR": self._tcp_store.host,
            "MASTER_PORT": self._tcp_store.port,
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if group.spec.local_world_size > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        log = None if rank == 0 else str(self._run.log_file(rank))
        return Order(
            worker.local_rank,
            {k: str(v) for k, v in variables.items()},
            self._entry,
            [str(self._run.folder)],
            log,
        )

    def _hear(self) -> None:
        by_pid = {pid: local_rank for local_rank, pid in self._pids.items()}
        for news in self._zygote.news():
            if "started" in news:
                self._pids[news["local_rank"]] = news["started"]
                by_pid[news["started"]] = news["local_rank"]
                self._untold.append(news["local_rank"])
                self._pass_on()
            elif "exited" in news:
                self._codes[by_pid[news["exited"]]] = news["code"]
            else:  # the zygote is gone, and by its death so are the workers
                self._codes |= {r: -signal.SIGKILL for r in self._pids if r not in self._codes}
                raise ZygoteGone

    def _kill_all(self) -> None:
        deadline = time.monotonic() + _KILL_WAIT_S
        for local_rank, pid in self._pids.items():
            _signal_group(pid, signal.SIGKILL)  # also what a dead worker left behind
            if local_rank not in self._codes:
                _signal(pid, signal.SIGKILL)
        while len(self._codes) < len(self._pids) and time.monotonic() < deadline:
            self._zygote.wait(0.1)
            with contextlib.suppress(ZygoteGone):
                self._hear()

    # --- what went wrong ---

    def _cause(self, failed: dict[int, int], ranks: dict[int, int]) -> Failure:
        """What a rank said first; else the rank that died without a word."""
        attempt = dist.PrefixStore(f"echelon/{self._attempt}", self._tcp_store)
        if attempt.check(["failure"]):
            return Failure.from_json(attempt.get("failure"))
        signs = self._watch.signs()
        silent = min(failed, key=lambda r: (failed[r] >= 0, r))
        sign = signs[silent]
        cause = failures.from_exit_code(
            failed[silent], ranks[silent], sign.step if sign.beats else None
        )
        if self._zygote.gone:
            together = "killed with all others, as the process was that had started them"
            return replace(cause, summary=together)
        return cause

    def _look_for_hang(self, ranks: dict[int, int]) -> None:
        if not self._hang_s:
            return
        signs = self._watch.signs()
        alive = [r for r in self._pids if r not in self._codes]
        limit_s = self._hang_s
        if any(signs[r].beats <= _STARTING_BEATS for r in alive):
            limit_s *= _STARTING_PATIENCE if len(alive) > 1 else math.inf
        late = time.monotonic() - limit_s
        begun = any(signs[r].time for r in alive)
        if begun and all(signs[r].time < late for r in alive):  # else somebody is only slow
            guilty = min(alive, key=lambda r: (not _is_stopped(self._pids[r]), signs[r].beats))
            self._hung = self._hang_report(guilty, ranks[guilty], signs[guilty], limit_s)

    def _hang_report(self, local_rank: int, rank: int, sign: Sign, limit_s: float) -> Failure:
        pid = self._pids[local_rank]
        if _is_stopped(pid):
            detail = (
                f"Process {pid} is stopped (SIGSTOP); `kill -CONT {pid}` would have let it go on."
            )
        else:
            detail = self._stack_of(rank, pid)
        summary = (
            f"no progress for {limit_s:g} s (launch.hang_s={self._hang_s:g}), "
            "and every other rank waits for it"
        )
        return Failure(rank, socket.gethostname(), sign.step, summary, detail)

    def _stack_of(self, rank: int, pid: int) -> str:
        """The worker's faulthandler writes it, whatever the worker is stuck in."""
        _signal(pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACK_WAIT_S
        file = self._run.stack_file(rank)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if file.exists() and (text := file.read_text()):
                return f"Where rank {rank} stands:\n{text}"
        return f"Rank {rank} gave no stack."

    def _announce(self) -> None:
        assert self.failure is not None
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\x1b[K")  # the bar of a killed rank 0 had hidden the cursor
        for worker in self._worker_group.workers:
            log = self._run.log_file(worker.global_rank)
            with contextlib.suppress(OSError), log.open("a") as file:  # the disk may be full
                file.write(f"\n{self.failure}\n")
        if self._remaining_restarts:
            left = self._remaining_restarts
            print(f"{self.failure}\nstarting again, {left} restart(s) left", file=sys.stderr)

    # --- signals ---

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass it on. The ranks agree, save and exit; a second Ctrl-C does not wait for that."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            self._kill_all()
            print("\x1b[?25h\nstopped at once; the last snapshot stands", file=sys.stderr)
            os._exit(Exit.INTERRUPTED)
        self._asked = self._asked or signal.Signals(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Once to each worker, also to one that starts later; a handler may come in between."""
        while self._asked and self._untold:
            with contextlib.suppress(IndexError):
                local_rank = self._untold.pop()
                if local_rank not in self._codes:
                    _signal(self._pids[local_rank], self._asked)


def loopback_store() -> dist.TCPStore:
    """A store on a port the system chose, reachable from this machine alone."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def one_node_spec(store: dist.TCPStore, run_id: str, procs: int, max_restarts: int) -> WorkerSpec:
    timeout = RendezvousTimeout(last_call=timedelta(milliseconds=1))
    rendezvous = DynamicRendezvousHandler.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        timeout=timeout,
    )
    return WorkerSpec(
        role="echelon",
        local_world_size=procs,
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=_MONITOR_S,
        entrypoint="echelon",
    )


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
