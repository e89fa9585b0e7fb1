"""torchrun's elastic agent, with workers forked from a zygote and one root cause at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
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

from echelon import failure as failures
from echelon.errors import Exit
from echelon.failure import Failure
from echelon.launch.lifeline import Alone, Signs, Stuck
from echelon.launch.meeting import Meeting, host_store
from echelon.launch.plan import Node
from echelon.launch.stamps import Stamps
from echelon.launch.zygote import STOP_SIGNALS, Order, Zygote, ZygoteGone
from echelon.pulse import Sign, Watch
from echelon.runs import Run
from echelon.utils.processes import read_stat_fields

_MONITOR_S = 0.05
_STACK_WAIT_S = 0.5
_KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class Job:
    """What the workers of a node do."""

    run: Run
    node: Node
    entry: str
    """MODULE:FUNCTION that a worker is."""
    hang_s: float
    program: list[str] = field(default_factory=list)
    """Somebody else's program; else the run's experiment."""
    plain: bool = False
    """Whether the program is left alone with who it is."""

    @property
    def shown(self) -> bool:
        """Whether the agent puts rank 0's log on the screen; an experiment does so itself."""
        return bool(self.program)


class Agent(SimpleElasticAgent):
    """Starts and watches the workers of this node.

    torch's agent does rendezvous, ranks and restarts; this class says how a worker is started,
    watched and ended.
    """

    def __init__(
        self, spec: WorkerSpec, store: dist.TCPStore, zygote: Zygote, line: Alone, job: Job
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=300)
        self._tcp_store = store
        self._port = store.port
        """Where the workers find a store."""
        self._zygote = zygote
        self._line = line
        self._job = job
        self._run = job.run
        self._attempt = -1
        self._pids: dict[int, int] = {}
        """Local rank → process."""
        self._codes: dict[int, int] = {}
        """Local rank → exit code, of those that ended."""
        self._ranks: dict[int, int] = {}
        """Local rank → rank."""
        self._interrupts = 0
        self._asked: signal.Signals | None = None
        """The signal that asked for a stop."""
        self._untold: list[int] = []
        """Local ranks that would not know of it yet."""
        self._told_done = False
        """Whether the other nodes know that the ranks of this one have ended."""
        self._watch = Watch(self._pulse_file, spec.local_world_size)
        self._stamps = Stamps(self._run, job.node, [], job.shown)
        self.failure: Failure | None = None
        """The first failure of the newest attempt."""

    def was_killed(self, local_rank: int) -> bool:
        """Whether it ended without a chance to say its last words."""
        return self._codes.get(local_rank, -signal.SIGKILL) < 0

    # --- what torch's agent calls ---

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._pids, self._codes, self._untold, self._told_done = {}, {}, [], False
        self._ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        self._watch = Watch(self._pulse_file, worker_group.spec.local_world_size)
        self._stamps = Stamps(
            self._run, self._job.node, list(self._ranks.values()), self._job.shown
        )
        self._line.begin(self._attempt)
        self._port = self._fresh_port()
        # The same on every node, whichever of them noticed the failure first.
        self._remaining_restarts = worker_group.spec.max_restarts - self._attempt
        if self._zygote.gone:
            self._zygote = self._zygote.again()
        with contextlib.suppress(ZygoteGone):  # the codes say so
            for worker in worker_group.workers:
                self._zygote.start(self._order(worker, worker_group))
            while len(self._pids) < len(worker_group.workers):
                self._zygote.wait(1.0)
                self._hear()
        return {local_rank: str(pid) for local_rank, pid in self._pids.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with contextlib.suppress(ZygoteGone):  # the codes say what became of the workers
            self._hear()
        self._stamps.mark()
        self._line.report(self._signs())
        failed = {r: c for r, c in self._codes.items() if c not in (Exit.OK, Exit.PREEMPTED)}
        cause = self._first_failure(failed)
        if cause is not None:
            self._kill_all()  # peers of a dead rank only wait, and would blame each other
            self.failure = self._line.agree(self._attempt, cause)
            if self.failure.exit == Exit.NODE_LOST:
                self._remaining_restarts = 0  # there is nobody to start again with
            self._announce()
            processes = {
                self._ranks[r]: ProcessFailure(r, self._pids.get(r, 0), c, "")
                for r, c in failed.items()
            }
            return RunResult(state=WorkerState.FAILED, failures=processes)
        if len(self._codes) == len(self._ranks) and self._all_are_done():
            self._stamps.mark()
            codes = {self._ranks[r]: code for r, code in self._codes.items()}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)
        return RunResult(state=WorkerState.HEALTHY)

    def _all_are_done(self) -> bool:
        """On every node: until then a rank elsewhere may yet fail, and all start again."""
        attempt = dist.PrefixStore(f"echelon/{self._attempt}", self._tcp_store)
        done = attempt.add("nodes done", 0 if self._told_done else 1)
        self._told_done = True
        return done >= self._job.node.count

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._kill_all()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._kill_all()
        self._zygote.close()

    # --- workers ---

    @property
    def _pulse_file(self) -> Path:
        return self._run.pulse_file(self._job.node.rank)

    def _fresh_port(self) -> int:
        """A program that starts again would find the keys of its last life in the same store."""
        if not self._job.program or self._attempt == 0:
            return self._tcp_store.port
        key = f"port/{self._attempt}"
        if self._job.node.rank == 0:
            self._programs_store = host_store(replace(self._job.node, port=0))
            self._tcp_store.set(key, str(self._programs_store.port))
        return int(self._tcp_store.get(key))

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
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if self._job.plain:
            variables = {}
        elif group.spec.local_world_size > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if self._job.program:  # what it prints is read while it runs, and after it was killed
            variables["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "1")
        log = None if rank == 0 and not self._job.program else str(self._run.log_file(rank))
        return Order(
            worker.local_rank,
            {k: str(v) for k, v in variables.items()},
            self._job.entry,
            self._job.program or [str(self._run.folder)],
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
            elif news.get("exited") in by_pid:  # else one of an attempt before, slow to die
                self._codes[by_pid[news["exited"]]] = self._meant(news["code"])
            elif "gone" in news:  # and by the zygote's death so are the workers
                self._codes |= {r: -signal.SIGKILL for r in self._ranks if r not in self._codes}
                raise ZygoteGone

    def _meant(self, code: int) -> int:
        """A program that a signal ends, which we passed on, did as it was told."""
        told = self._job.program and self._asked and code in (-self._asked, 128 + self._asked)
        return Exit.PREEMPTED if told else code

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

    def _first_failure(self, failed: dict[int, int]) -> Failure | None:
        """Here, on another node, or of all at once."""
        if failed:
            return self._cause(failed)
        if verdict := self._line.verdict(self._attempt):
            return verdict
        stuck = self._line.stuck(self._attempt, self._job.hang_s)
        here = {rank: local_rank for local_rank, rank in self._ranks.items()}
        if stuck is None or stuck.rank not in here:
            return None  # of a rank elsewhere, its own agent tells more
        local_rank = here[stuck.rank]
        return self._hang_report(local_rank, stuck, self._watch.signs()[local_rank])

    def _cause(self, failed: dict[int, int]) -> Failure:
        """What a rank said first; else the rank that died without a word."""
        attempt = dist.PrefixStore(f"echelon/{self._attempt}", self._tcp_store)
        if attempt.check(["failure"]):
            return Failure.from_json(attempt.get("failure"))
        silent = min(failed, key=lambda r: failed[r] >= 0)
        rank, sign = self._ranks[silent], self._watch.signs()[silent]
        step = sign.step if sign.beats else None
        cause = failures.from_exit_code(failed[silent], rank, step)
        if self._zygote.gone:
            together = "killed with all others, as the process was that had started them"
            cause = replace(cause, summary=together)
        elif self._job.program:
            words = "" if rank == 0 else self._stamps.last_words(rank)  # rank 0's are on the screen
            code = failed[silent] if failed[silent] > 0 else cause.exit
            cause = replace(cause, detail=cause.detail or words, exit=code, of_program=True)
        attempt.compare_set("failure", "", cause.to_json())  # ranks elsewhere wait to hear it
        return cause

    def _signs(self) -> Signs:
        now, signs = time.monotonic(), self._watch.signs()
        return [
            {
                "rank": self._ranks[r],
                "beats": signs[r].beats,
                "step": signs[r].step,
                "begun": bool(signs[r].time),
                "still": now - signs[r].time,
                "stopped": _is_stopped(pid),
            }
            for r, pid in self._pids.items()
            if r not in self._codes
        ]

    def _hang_report(self, local_rank: int, stuck: Stuck, sign: Sign) -> Failure:
        pid = self._pids[local_rank]
        if _is_stopped(pid):
            detail = (
                f"Process {pid} is stopped (SIGSTOP); `kill -CONT {pid}` would have let it go on."
            )
        else:
            detail = self._stack_of(stuck.rank, pid)
        summary = (
            f"no progress for {stuck.limit_s:g} s (launch.hang_s={self._job.hang_s:g}), "
            "and every other rank waits for it"
        )
        return Failure(stuck.rank, socket.gethostname(), sign.step, summary, detail)

    def _stack_of(self, rank: int, pid: int) -> str:
        """The worker's faulthandler writes it, whatever the worker is stuck in."""
        _signal(pid, signal.SIGQUIT)
        deadline = time.monotonic() + _STACK_WAIT_S
        file = self._run.stack_file(rank)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if file.exists() and (text := file.read_text("utf-8", "replace")):
                return f"Where rank {rank} stands:\n{text}"
        return f"Rank {rank} gave no stack."

    def _announce(self) -> None:
        assert self.failure is not None
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h\x1b[K")  # the bar of a killed rank 0 had hidden the cursor
        for worker in self._worker_group.workers:
            log, words = self._run.log_file(worker.global_rank), str(self.failure)
            with contextlib.suppress(OSError):  # the disk may be full
                if words not in self._stamps.words(worker.global_rank):
                    with log.open("a", encoding="utf-8", errors="replace") as file:
                        file.write(f"\n{words}\n")
        if self._remaining_restarts:
            left = self._remaining_restarts
            print(f"{self.failure}\nstarting again, {left} restart(s) left", file=sys.stderr)

    # --- signals ---

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])  # see `echelon node`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held back by what started us

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


def worker_spec(meeting: Meeting, procs: int, max_restarts: int) -> WorkerSpec:
    return WorkerSpec(
        role="echelon",
        local_world_size=procs,
        rdzv_handler=meeting,
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
    fields = read_stat_fields(pid)
    return fields is not None and fields[0] in "Tt"
