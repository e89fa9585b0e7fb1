"""torchrun's elastic agent, with workers from a fork server and one root cause at the end.

torch's `SimpleElasticAgent` does the rendezvous, assigns ranks and counts restarts. The subclass
here says how a worker is started, watched and ended, and decides which failure of an attempt was
the first.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from echelon.errors import ExitCode
from echelon.launch.node.fork_server import (
    STOP_SIGNALS,
    ForkServer,
    ForkServerGone,
    WorkerSpawnRequest,
)
from echelon.launch.node.hang_detection import HungRank, RankHeartbeats
from echelon.launch.node.invitation import Invitation, write_invitation
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.log_stamps import NodeLogs
from echelon.launch.node.machine_judge import MachineJudge
from echelon.launch.node.node_reports import SlotAssignment
from echelon.launch.node.node_scaling import ScaleAnswer, ScaleLimits, scale_nodes
from echelon.launch.node.rank_replacement import RankReplacement, ReplacementLimits, WorldStore
from echelon.launch.node.rendezvous import FixedRendezvous, connect_to_leader, host_store
from echelon.launch.node.stack_exchange import StackExchange
from echelon.launch.plan import NodeReport, NodeSpec, ReportNodes
from echelon.runs import failure as failures
from echelon.runs.failure import Failure
from echelon.runs.heartbeat import HeartbeatRecord, HeartbeatTable
from echelon.runs.run_folder import Run
from echelon.runs.stack_text import render_stack
from echelon.utils.processes import read_stat_fields
from echelon.utils.sockets import shut_connections_to_port
from echelon.world.network_key import KEY_VARIABLE
from echelon.world.rounds import (
    AGENT_STOPS_VARIABLE,
    REPLACEMENT_NUMBER_VARIABLE,
    Round,
    write_round_file,
)
from echelon.world.sealed_store import SealedStore, derive_store_key

if TYPE_CHECKING:
    from echelon.launch.node.gpu_watch import GpuWatch

_MONITOR_INTERVAL_S = 0.05
_LEADER_LOSS_S = 3.0
"""A leader's store may be gone a moment before its lifeline."""
_NOTICE_INTERVAL_S = 1.0
_KILL_WAIT_S = 5.0
_LEAVE_WAIT_S = 60.0
"""How long the ranks of a node that leaves may take to end: rank 0 may be writing a snapshot."""


@dataclass(frozen=True)
class NodeJob:
    """What the workers of a node do."""

    run: Run
    node: NodeSpec
    entrypoint: str
    """MODULE:FUNCTION that a worker calls."""
    hang_s: float
    key: str
    """Of the job; see `world/network_key.py`."""
    limits: ReplacementLimits
    """How often in a row lost ranks are replaced without a step between; 0: never."""
    scale_limits: ScaleLimits
    program: list[str] = field(default_factory=list)
    """The words of a program to run instead of the experiment."""
    is_plain: bool = False
    """Whether the program gets no variables of torchrun's (mode=plain)."""
    report_nodes: ReportNodes = lambda report: None
    devices: int = 0
    """How many of the visible GPUs the ranks of a node use, if there are any."""
    prints_to_screen: bool = True
    """Whether somebody sees what the agent prints."""

    def find_shown_rank(self, first_rank: int) -> int | None:
        """Return the rank whose log the agent prints, of a round with this first rank. An
        experiment's rank 0 prints by itself; a program does not know that it should."""
        if self.program:
            return 0
        return first_rank if first_rank and self.prints_to_screen else None


class NodeLeft(Exception):
    """This node has left the run on purpose, and the others go on."""


class SpareReleased(Exception):
    """The run is over, and this spare was not needed."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run ended with {code}")
        self.code = code


class NodeAgent(SimpleElasticAgent):
    """Starts and watches the workers of this node.

    After `run` has returned, `failure` is the first failure of the newest attempt, of whatever
    node, or None. The methods that begin with an underscore and are named by torch
    (`_start_workers`, `_monitor_workers`, `_stop_workers`, `_shutdown`) are called by torch's
    agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        store: SealedStore,
        fork_server: ForkServer,
        lifeline: Lifeline,
        job: NodeJob,
        standby_store: SealedStore | None = None,
        on_lead: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec)
        self._tcp_store = store
        self._standby_store, self._on_lead = standby_store, on_lead
        self._leader_changes = 0
        """How often the store was that of another leader since the beginning."""
        self._place = job.node.rank
        """The number of the node whose ranks this one runs."""
        self._port = store.port
        """Of the store that the workers are given."""
        self._fork_server = fork_server
        self._lifeline = lifeline
        self._job = job
        self._run = job.run
        self._attempt = -1
        self._pids: dict[int, int] = {}
        """Local rank → process id."""
        self._exit_codes: dict[int, int] = {}
        """Local rank → exit code, of the workers that have ended."""
        self._ranks: dict[int, int] = {}
        """Local rank → rank."""
        self._interrupts = 0
        self._stop_signal: signal.Signals | None = None
        """The first stop signal that came, if one did."""
        self._notice: signal.Signals | None = None
        """A stop signal that may mean this node alone; see `RankReplacement`."""
        self._noticed_s = -math.inf
        """When the leader was told so last."""
        self._unsignalled_ranks: list[int] = []
        """Local ranks to which a stop signal has yet to be sent."""
        self._has_reported_done = False
        """Whether this node has counted itself as done, in this attempt."""
        self._replacement: RankReplacement | None = None
        """Present where lost ranks can be replaced while the others go on."""
        self._lost_ranks: set[int] = set()
        """Local ranks that were reported as lost and have not been started again."""
        self._reported_nodes: NodeReport | None = None
        self._has_copied_keys = False
        """Whether the standby store has what replacements need."""
        self._hang_failures: dict[int, Failure] = {}
        """Local rank → why it was killed, if it was, for standing still."""
        self._judge = MachineJudge(
            lifeline, job.run, job.limits.max_node_faults, job.limits.min_nodes
        )
        self._gpu_watch = _watch_gpus(job)
        self._has_reported_gpu = False
        self._heartbeat_watch = HeartbeatTable(self._heartbeat_file, spec.local_world_size)
        self._log_stamps = NodeLogs(self._run, job.node, [], None)
        self._stacks = StackExchange(
            self._run,
            job.node,
            lifeline,
            self._list_living_workers,
            bool(job.program),
            self._scale,
        )
        self.failure: Failure | None = None
        """The first failure of the newest attempt."""
        lifeline.on_leader_lost = lambda: shut_connections_to_port(self._tcp_store.port)

    def is_rank_killed(self, local_rank: int) -> bool:
        """Return whether this local rank ended by a signal, without a chance to print its last
        lines."""
        return self._exit_codes.get(local_rank, -signal.SIGKILL) < 0

    # --- called by torch's agent ---

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Start the workers after a rendezvous. A spare waits until it is given ranks."""
        if not self._job.node.is_spare:
            super()._initialize_workers(worker_group)
            return
        while (assignment := self._lifeline.find_assignment()) is None:
            if self._lifeline.over_code is not None:
                raise SpareReleased(self._lifeline.over_code)
            self._leave_if_released()
            self._report_notice()
            time.sleep(_MONITOR_INTERVAL_S)
        self._take_slots(assignment, worker_group)
        worker_group.state = WorkerState.HEALTHY

    def _take_slots(self, assignment: SlotAssignment, group: WorkerGroup) -> None:
        """Run the ranks of a lost node: each is one that has to be replaced."""
        self._place, self._attempt = assignment.place, assignment.attempt
        size = max(assignment.world_size, *(slot + 1 for slot in assignment.slots))
        # torch declares them as None, and sets numbers itself.
        group.group_rank = assignment.place  # type: ignore[assignment]
        nodes = max(self._job.node.node_count, assignment.place + 1)
        group.group_world_size = nodes  # type: ignore[assignment]
        group.workers = [
            Worker(local_rank, slot, slot, size, size)
            for local_rank, slot in enumerate(assignment.slots)
        ]
        self._begin_attempt(group, assignment.world_size, assignment.first_replacement_number)
        self._remaining_restarts = 0
        self._lost_ranks = set(self._ranks)
        self._exit_codes = dict.fromkeys(self._ranks, -int(signal.SIGKILL))

    def _exit_barrier(self) -> None:
        """Wait for nobody: all nodes have said over the lifeline that they are done."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of one attempt; returns their process ids by local rank."""
        self._attempt += 1
        self._begin_attempt(worker_group, worker_group.workers[0].world_size)
        self._port = self._get_worker_store_port()
        # The same on every node, whichever of them noticed the failure first.
        self._remaining_restarts = worker_group.spec.max_restarts - self._attempt
        if self._fork_server.is_gone:
            self._fork_server = self._fork_server.start_replacement()
        with contextlib.suppress(ForkServerGone):  # the exit codes show it
            for worker in worker_group.workers:
                self._fork_server.request_worker(self._make_spawn_request(worker, worker_group))
            while len(self._pids) < len(worker_group.workers):
                self._fork_server.wait_for_event(1.0)
                self._handle_fork_server_events()
        return {local_rank: str(pid) for local_rank, pid in self._pids.items()}

    def _begin_attempt(
        self, group: WorkerGroup, world_size: int, first_replacement_number: int = 0
    ) -> None:
        """Forget what was of an earlier attempt. `world_size` is that of the first round."""
        self._pids, self._exit_codes, self._unsignalled_ranks = {}, {}, []
        self._has_reported_done = False
        self._ranks = {w.local_rank: w.global_rank for w in group.workers}
        self._run.get_round_file(self._place).unlink(missing_ok=True)
        self._heartbeat_watch = HeartbeatTable(self._heartbeat_file, len(group.workers))
        self._log_stamps = NodeLogs(
            self._run, self._job.node, list(self._ranks.values()), self._job.find_shown_rank(0)
        )
        self._lost_ranks, self._hang_failures = set(), {}
        self._has_copied_keys = False
        self._lifeline.begin_attempt(self._attempt, self._ranks.values(), self._place)
        self._replacement = self._make_replacement(world_size, first_replacement_number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers once; torch's agent calls this twenty times a second.

        While the leader is lost nothing is decided: another node follows it, or this one ends.
        """
        lifeline = self._lifeline
        try:
            if not lifeline.is_electing:
                self._follow_leader()
                return self._look_at_workers(worker_group)
        except dist.DistError:
            deadline = time.monotonic() + _LEADER_LOSS_S
            while not lifeline.is_electing and lifeline.leader_changes == self._leader_changes:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_MONITOR_INTERVAL_S)
        return RunResult(state=WorkerState.HEALTHY)

    def _follow_leader(self) -> None:
        """Go on with the store of the node that leads, if that is another one than before."""
        changes = self._lifeline.leader_changes
        if changes == self._leader_changes:
            return
        known = self._lifeline.membership
        if self._lifeline.is_leader:
            assert self._standby_store is not None
            self._tcp_store = self._standby_store
            self._on_lead()
            self._stacks.take_requests()
            if self._run.invitation_file.exists():
                self._invite()
        else:
            client = connect_to_leader(known.members[known.leader].store)
            self._tcp_store = SealedStore(client, derive_store_key(self._job.key))
        self._leader_changes, self._port = changes, self._tcp_store.port
        if self._replacement is not None:
            self._replacement.use_store(self._make_world_store())

    def _make_world_store(self) -> WorldStore:
        return WorldStore(self._tcp_store, f"{self._tcp_store.host}:{self._tcp_store.port}")

    def _look_at_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers once.

        Returns FAILED as soon as a rank of this or another node has failed or hangs, SUCCEEDED when
        the ranks of all nodes have ended well, else HEALTHY.
        """
        with contextlib.suppress(ForkServerGone):  # the exit codes show what became of the workers
            self._handle_fork_server_events()
        if (newest := self._lifeline.find_round(self._attempt)) is not None:
            self._log_stamps.show_rank(self._job.find_shown_rank(newest.slots[0]))
        self._log_stamps.record_growth()
        self._stacks.look_for_request()
        self._lifeline.report_heartbeats(self._collect_heartbeats())
        self._leave_if_released()
        self._report_gpu_fault()
        if self._replacement is not None:
            self._replace_lost_ranks(self._replacement, worker_group)
        elif self._lifeline.is_leader:
            self._judge.judge_all(self._lifeline.find_newest_step(), can_replace=False)
        failed = self._find_failed_ranks()
        cause = self._find_first_failure(failed)
        if cause is not None:
            self._close_rounds()
            has_lost_nodes = self._lifeline.membership.has_lost_nodes
            self._lifeline.set_can_lose_nodes(False)
            self._kill_all_workers()  # peers of a dead rank only wait, and would blame each other
            self.failure = self._lifeline.agree_on_failure(self._attempt, cause)
            if has_lost_nodes and self._remaining_restarts:
                # All nodes of the beginning would meet; another job may have them.
                self.failure = replace(self.failure, exit=int(ExitCode.NODE_LOST))
            if self.failure.exit == ExitCode.NODE_LOST:
                self._remaining_restarts = 0  # there is nobody to start again with
            self._write_failure_to_logs()
            processes = {
                self._ranks[r]: ProcessFailure(r, self._pids.get(r, 0), c, "")
                for r, c in failed.items()
            }
            return RunResult(state=WorkerState.FAILED, failures=processes)
        if self._are_local_ranks_done() and self._are_all_nodes_done():
            self._close_rounds()
            self._log_stamps.record_growth()
            codes = {self._ranks[r]: code for r, code in self._exit_codes.items()}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=codes)
        return RunResult(state=WorkerState.HEALTHY)

    def _find_failed_ranks(self) -> dict[int, int]:
        """Return the local ranks that have failed and are not being replaced, with their codes."""
        well = [ExitCode.OK, ExitCode.PREEMPTED]
        if self._is_leaving:
            well.append(ExitCode.LEFT)
        return {
            r: code
            for r, code in self._exit_codes.items()
            if code not in well and r not in self._lost_ranks
        }

    @property
    def _is_leaving(self) -> bool:
        own = self._lifeline.membership.members.get(self._lifeline.own.node)
        return self._lifeline.is_released or (own is not None and bool(own.leaving))

    def _leave_if_released(self) -> None:
        """End where this node has left on purpose: its ranks save what they were saving, and end
        by themselves."""
        if not self._lifeline.is_released:
            return
        for local_rank, slot in self._ranks.items():
            if self._replacement is not None and not self._replacement.has_joined(slot):
                self._kill_worker(local_rank)  # it waits for a round that does not come
        deadline = time.monotonic() + _LEAVE_WAIT_S
        while self._list_living_workers() and time.monotonic() < deadline:
            self._fork_server.wait_for_event(0.1)
            with contextlib.suppress(ForkServerGone):
                self._handle_fork_server_events()
        raise NodeLeft

    def _are_local_ranks_done(self) -> bool:
        """Return whether all ranks of this node have ended. A replacement that has not joined when
        the others have ended has nothing left to do, and is ended."""
        if self._replacement is not None and self._has_world_ended(self._replacement):
            has_joined = self._replacement.has_joined
            late = {r for r, slot in self._ranks.items() if not has_joined(slot)}
            for local_rank in late | self._lost_ranks:
                self._kill_worker(local_rank)
                self._exit_codes[local_rank] = ExitCode.OK
                self._lost_ranks.discard(local_rank)
        return not self._lost_ranks and len(self._exit_codes) == len(self._ranks)

    def _has_world_ended(self, replacement: RankReplacement) -> bool:
        """Return whether a rank has ended well. Ranks end together; a node none of whose ranks
        takes part is told by the others."""
        if not replacement.round.number:
            return False
        if any(code in (ExitCode.OK, ExitCode.PREEMPTED) for code in self._exit_codes.values()):
            self._lifeline.report_ending(self._attempt)
            return True
        if not self._lifeline.is_ending(self._attempt):
            return False
        # A round that was to take them in is never formed if the others ended before it.
        return not any(replacement.has_joined(slot) for slot in self._ranks.values())

    def _are_all_nodes_done(self) -> bool:
        """Return whether the ranks of every node have ended. Until then a rank of another node may
        still fail, and then all start again."""
        if not self._has_reported_done:
            self._has_reported_done = True
            self._lifeline.report_done(self._attempt, int(max(self._exit_codes.values())))
        return self._lifeline.find_end(self._attempt) is not None

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._kill_all_workers()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._kill_all_workers()
        if self._gpu_watch is not None:
            self._gpu_watch.close()
        self._stacks.close()
        self._fork_server.close()

    # --- workers ---

    @property
    def _heartbeat_file(self) -> Path:
        return self._run.get_heartbeat_file(self._place)

    def _get_worker_store_port(self) -> int:
        """Return the port of the store that the workers are given.

        Experiments use the agents' own store, under keys of their attempt. A program that is
        started again would find the keys of its previous attempt there, so each restart gets a
        store of its own.
        """
        if not self._job.program or self._attempt == 0:
            return self._tcp_store.port
        key = f"port/{self._attempt}"
        if self._job.node.rank == 0:
            self._programs_store = host_store(replace(self._job.node, master_port=0))
            self._tcp_store.set(key, str(self._programs_store.port))
        return int(self._tcp_store.get(key))

    def _list_living_workers(self) -> dict[int, int]:
        """Return the process id of every rank of this node that has not ended. Any thread may call
        it."""
        pids = dict(self._pids)
        return {self._ranks[r]: pid for r, pid in pids.items() if r not in self._exit_codes}

    def _make_spawn_request(self, worker: Any, group: WorkerGroup) -> WorkerSpawnRequest:
        """Return what the fork server has to start: torchrun's variables, the function to call,
        the log file."""
        rank = worker.global_rank
        variables = {
            "RANK": rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": len(group.workers),
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "MASTER_ADDR": self._tcp_store.host,
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": group.spec.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            KEY_VARIABLE: self._job.key,
        }
        if self._job.node.is_added:
            variables[AGENT_STOPS_VARIABLE] = 1
        if self._job.is_plain:
            variables = {}
        elif group.spec.local_world_size > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if self._job.program:  # its log is read while it runs, and after it was killed
            variables["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "1")
        log = (
            None if rank == 0 and not self._job.program else str(self._run.get_rank_log_file(rank))
        )
        return WorkerSpawnRequest(
            worker.local_rank,
            {k: str(v) for k, v in variables.items()},
            self._job.entrypoint,
            self._job.program or [str(self._run.folder)],
            log,
        )

    def _handle_fork_server_events(self) -> None:
        """Take in what the fork server reports: workers that started and workers that exited.

        Raises ForkServerGone when it has died; its workers died with it.
        """
        by_pid = {pid: local_rank for local_rank, pid in self._pids.items()}
        for event in self._fork_server.read_events():
            if "started" in event:
                self._pids[event["local_rank"]] = event["started"]
                by_pid[event["started"]] = event["local_rank"]
                self._unsignalled_ranks.append(event["local_rank"])
                self._forward_stop_signal()
            elif event.get("exited") in by_pid:  # else a worker of an earlier attempt
                self._exit_codes[by_pid[event["exited"]]] = self._map_stop_to_preempted(
                    event["code"]
                )
            elif "gone" in event:  # and the workers died with it
                self._exit_codes |= {
                    r: -signal.SIGKILL for r in self._ranks if r not in self._exit_codes
                }
                raise ForkServerGone

    def _map_stop_to_preempted(self, code: int) -> int:
        """Return the exit code of a worker, with a program that was ended by the stop signal we
        forwarded counted as preempted: it did what it was asked to."""
        was_requested = (
            self._job.program
            and self._stop_signal
            and code in (-self._stop_signal, 128 + self._stop_signal)
        )
        return ExitCode.PREEMPTED if was_requested else code

    def _kill_worker(self, local_rank: int) -> None:
        """Kill a worker with what it started, if it lives."""
        if local_rank not in self._exit_codes and local_rank in self._pids:
            _send_signal_to_group(self._pids[local_rank], signal.SIGKILL)

    def _kill_all_workers(self) -> None:
        """Kill all workers with what they started, and wait a few seconds for their exit codes."""
        deadline = time.monotonic() + _KILL_WAIT_S
        for local_rank, pid in self._pids.items():
            _send_signal_to_group(pid, signal.SIGKILL)  # also what a dead worker has left
            if local_rank not in self._exit_codes:
                _send_signal(pid, signal.SIGKILL)
        while len(self._exit_codes) < len(self._pids) and time.monotonic() < deadline:
            self._fork_server.wait_for_event(0.1)
            with contextlib.suppress(ForkServerGone):
                self._handle_fork_server_events()

    # --- ranks that are replaced while the others go on ---

    def _close_rounds(self) -> None:
        if self._replacement is not None:
            self._replacement.close()

    def _make_replacement(
        self, world_size: int, first_replacement_number: int
    ) -> RankReplacement | None:
        limits = self._job.limits
        if self._job.program or not limits.max_losses or world_size == 1:
            return None
        store, run = self._make_world_store(), self._run
        return RankReplacement(
            self._lifeline,
            store,
            world_size,
            self._attempt,
            limits,
            run,
            self._judge,
            first_replacement_number,
        )

    def _replace_lost_ranks(self, replacement: RankReplacement, group: WorkerGroup) -> None:
        """Report the ranks that this node has lost, and start their replacements once the others go
        on without them."""
        for local_rank, code in self._find_failed_ranks().items():
            if not self._is_member(local_rank) and replacement.have_all_ended():
                self._exit_codes[local_rank] = ExitCode.OK  # it came too late, and nobody needs it
                continue
            if not self._is_replaceable(replacement, local_rank, code):
                return
            _send_signal_to_group(self._pids[local_rank], signal.SIGKILL)  # what it has started
            self._lost_ranks.add(local_rank)
            failure = self._hang_failures.pop(local_rank, None)
            failure = failure or self._make_loss_failure(replacement, local_rank, code)
            replacement.report_loss(self._ranks[local_rank], failure)
        done = [self._ranks[r] for r, code in self._exit_codes.items() if code == ExitCode.OK]
        self._prepare_for_lost_nodes(replacement)
        self._report_changed_nodes()
        newest = replacement.advance(self._lifeline.find_newest_step(), done)
        if newest is not None:
            self._publish_round(newest)
        elif not any(self._ranks[r] in replacement.round.slots for r in self._lost_ranks):
            self._kill_hung_rank(replacement)
        for worker in group.workers:
            if (
                worker.local_rank in self._lost_ranks
                and self._stop_signal is None
                and not self._is_leaving
                and replacement.may_start(worker.global_rank)
            ):
                self._start_replacement(replacement, worker, group)

    def _prepare_for_lost_nodes(self, replacement: RankReplacement) -> None:
        """Say whether the ranks could go on without a node, and end them where the leader asks for
        it since too few nodes are left."""
        if self._lifeline.is_leader:
            self._lifeline.set_can_lose_nodes(replacement.can_replace())
        if self._standby_store is not None and not self._has_copied_keys:
            self._has_copied_keys = self._lifeline.membership.can_lose_nodes
            if self._has_copied_keys:
                replacement.copy_shared_keys(self._standby_store)
        self._report_notice()
        if self._lifeline.stop_reason and self._stop_signal is None:
            if self._lifeline.is_leader and self._notice is None:
                _print_over_progress(self._lifeline.stop_reason)
            self._stop_signal = self._notice or signal.SIGTERM
            self._forward_stop_signal()

    def _report_changed_nodes(self) -> None:
        """On the leader, say who makes up the world once nodes were lost or others are wanted, and
        after each change."""
        known = self._lifeline.committed
        has_changed = known.has_lost_nodes or known.wanted_nodes
        if not self._lifeline.is_leader or not has_changed:
            return
        report = NodeReport(
            sorted(known.members),
            [*known.left_nodes],
            known.count_missing_nodes(),
            [(each.node, each.number) for each in known.list_returning_nodes()],
            self._make_world_store().address,
        )
        if report != self._reported_nodes:
            self._reported_nodes = report
            self._job.report_nodes(report)

    def _scale(self, count: int) -> ScaleAnswer:
        """Answer a person who wants another number of nodes."""
        answer = scale_nodes(self._lifeline, count, self._job.scale_limits)
        if answer.missing and self._job.scale_limits.max_nodes is None:
            self._invite()
        return answer

    def _invite(self) -> None:
        """Tell nodes of further jobs where this node leads."""
        node, address = self._job.node, self._make_world_store().address
        invitation = Invitation(self._job.key, address, node.node_count + node.spares)
        write_invitation(self._run, invitation)

    def _publish_round(self, newest: Round) -> None:
        """Tell the ranks of this node of a round. First what it is, then that it is there."""
        write_round_file(self._run.get_round_file(self._place), self._attempt, newest)
        self._heartbeat_watch.write_round(newest.number, newest.is_planned)
        if self._lifeline.is_leader:
            _print_over_progress(newest.reason)

    def _is_replaceable(self, replacement: RankReplacement, local_rank: int, code: int) -> bool:
        """Return whether a rank with this exit code may be replaced: it was killed, or asked for
        it, or was a replacement itself, whose failure is no matter of the others."""
        is_gone = code < 0 or code == ExitCode.TRANSIENT or not self._is_member(local_rank)
        if not is_gone or self._fork_server.is_gone:
            return False
        replacement.wait_until_begun()
        return replacement.can_replace()

    def _make_loss_failure(
        self, replacement: RankReplacement, local_rank: int, code: int
    ) -> Failure:
        slot, heartbeat = self._ranks[local_rank], self._heartbeat_watch.read_all()[local_rank]
        reported = replacement.read_transient(slot) if code == ExitCode.TRANSIENT else None
        return reported or failures.make_failure_from_exit_code(code, slot, heartbeat.step)

    def _start_replacement(
        self, replacement: RankReplacement, worker: Any, group: WorkerGroup
    ) -> None:
        local_rank = worker.local_rank
        self._lost_ranks.discard(local_rank)
        self._exit_codes.pop(local_rank, None)
        self._pids.pop(local_rank, None)
        while local_rank in self._unsignalled_ranks:
            self._unsignalled_ranks.remove(local_rank)
        self._heartbeat_watch.clear(local_rank)
        request = self._make_spawn_request(worker, group)
        replacement_number = replacement.number_replacement(worker.global_rank)
        request.variables[REPLACEMENT_NUMBER_VARIABLE] = str(replacement_number)
        with contextlib.suppress(ForkServerGone):  # the exit codes show it
            self._fork_server.request_worker(request)

    def _kill_hung_rank(self, replacement: RankReplacement) -> None:
        """End a rank of this node for which all others wait, so that it is replaced."""
        hung = self._lifeline.find_hung_rank(self._attempt, self._job.hang_s)
        if hung is None or not replacement.can_replace():
            return
        if not self._stacks.record_hang(self._round_name):
            return  # nothing is killed before it is written where all ranks stand
        local_ranks = {rank: local_rank for local_rank, rank in self._ranks.items()}
        local_rank = local_ranks.get(hung.rank)
        if local_rank is None or local_rank in self._hang_failures:
            return
        if local_rank in self._exit_codes:
            return
        heartbeat = self._heartbeat_watch.read_all()[local_rank]
        self._hang_failures[local_rank] = self._make_hang_failure(local_rank, hung, heartbeat)
        _send_signal(self._pids[local_rank], signal.SIGKILL)

    def _report_gpu_fault(self) -> None:
        """Tell the leader once of an error that a GPU of this node has counted."""
        fault = self._gpu_watch.fault if self._gpu_watch is not None else ""
        if fault and not self._has_reported_gpu:
            self._has_reported_gpu = True
            self._lifeline.report_machine_fault(fault)

    # --- what went wrong ---

    def _find_first_failure(self, failed: dict[int, int]) -> Failure | None:
        """Return the first failure of this attempt: here, on another node, or of a rank for which
        all others wait."""
        if failed:
            return self._find_cause(failed)
        if verdict := self._lifeline.find_failure(self._attempt):
            return verdict
        if self._replacement is not None and self._replacement.can_replace():
            return None  # a rank that hangs is killed, and replaced
        hung = self._lifeline.find_hung_rank(self._attempt, self._job.hang_s)
        local_ranks = {rank: local_rank for local_rank, rank in self._ranks.items()}
        if hung is None or not self._stacks.record_hang(self._round_name):
            return None  # nothing is killed before it is written where all ranks stand
        if hung.rank not in local_ranks:
            return None  # the agent of its own node knows more about it
        local_rank = local_ranks[hung.rank]
        return self._make_hang_failure(
            local_rank, hung, self._heartbeat_watch.read_all()[local_rank]
        )

    @property
    def _round_name(self) -> str:
        """The attempt and its round, as one name."""
        return f"{self._attempt}.{self._replacement.round.number if self._replacement else 0}"

    def _find_cause(self, failed: dict[int, int]) -> Failure:
        """Return the failure that a rank reported through the store; else that of a rank that died
        silently.

        A rank that was killed by a signal is blamed before one with an exit code: the others often
        fail because they lost it.
        """
        if self._replacement is not None and (published := self._replacement.read_failure()):
            return published
        attempt = self._tcp_store.open_prefix(f"echelon/{self._attempt}")
        if self._replacement is None and attempt.check(["failure"]):
            return Failure.from_json(attempt.get("failure"))
        silent_rank = min(failed, key=lambda r: failed[r] >= 0)
        rank, heartbeat = self._ranks[silent_rank], self._heartbeat_watch.read_all()[silent_rank]
        has_begun = heartbeat.beats or heartbeat.step  # no beats: also in an evaluation
        step = heartbeat.step if has_begun else None
        cause = failures.make_failure_from_exit_code(failed[silent_rank], rank, step)
        if self._fork_server.is_gone:
            together = "killed with all others, as the process was that had started them"
            cause = replace(cause, summary=together)
        elif self._job.program:
            words = (
                "" if rank == 0 else self._log_stamps.read_last_lines(rank)
            )  # rank 0's are on the screen already
            code = failed[silent_rank] if failed[silent_rank] > 0 else cause.exit
            cause = replace(cause, detail=cause.detail or words, exit=code, of_program=True)
        attempt.compare_set("failure", "", cause.to_json())  # other ranks wait for it
        return cause

    def _collect_heartbeats(self) -> RankHeartbeats:
        """Return the heartbeats of the living ranks of this node, as lifelines send them."""
        now, heartbeats = time.monotonic(), self._heartbeat_watch.read_all()
        return [
            {
                "rank": self._ranks[r],
                "beats": heartbeats[r].beats,
                "step": heartbeats[r].step,
                "begun": bool(heartbeats[r].time),
                "still": now - heartbeats[r].time,
                "stopped": _is_stopped(pid),
            }
            for r, pid in self._pids.items()
            if r not in self._exit_codes and self._is_member(r)
        ]

    def _is_member(self, local_rank: int) -> bool:
        """Return whether a local rank belongs to the current round; a replacement may not yet."""
        known = self._replacement
        return known is None or self._ranks[local_rank] in known.round.slots

    def _make_hang_failure(
        self, local_rank: int, hung_rank: HungRank, heartbeat: HeartbeatRecord
    ) -> Failure:
        """Return the failure of a rank for which all others wait, with its Python stack if
        possible."""
        pid = self._pids[local_rank]
        if _is_stopped(pid):
            detail = (
                f"Process {pid} is stopped (SIGSTOP); `kill -CONT {pid}` would have let it go on."
            )
        else:
            detail = self._describe_stack(hung_rank.rank)
        if file := self._stacks.get_hang_file(self._round_name):
            detail += f"\nThe stacks of all ranks are in {file}"
        limit = f"launch.hang_s={self._job.hang_s:g}"
        if (times := hung_rank.limit_s / self._job.hang_s) > 1:
            limit += f", {times:g} times as long in first steps, evaluations and saves"
        summary = f"no progress for {hung_rank.limit_s:g} s ({limit})"
        if len(self._ranks) * self._job.node.node_count > 1:
            summary += ", and every other rank waits for it"
        host = socket.gethostname()
        return Failure(hung_rank.rank, host, heartbeat.step, summary, detail, may_be_machine=True)

    def _describe_stack(self, rank: int) -> str:
        """Return where a rank of this node stood when the hang was found."""
        found = self._stacks.get_own_rank(rank)
        if found is None or not found.threads:
            return f"Rank {rank} gave no stack."
        return f"Where rank {rank} stands:\n{render_stack(found)}"

    def _write_failure_to_logs(self) -> None:
        """Append the failure to the logs of the local ranks, and print that a restart follows, if
        one does."""
        assert self.failure is not None
        if sys.stderr.isatty():
            # The progress bar of a killed rank 0 left the cursor hidden.
            sys.stderr.write("\x1b[?25h\x1b[K")
        for worker in self._worker_group.workers:
            log, words = self._run.get_rank_log_file(worker.global_rank), str(self.failure)
            with contextlib.suppress(OSError):  # the disk may be full
                if words not in self._log_stamps.read_attempt_log(worker.global_rank):
                    with log.open("a", encoding="utf-8", errors="replace") as file:
                        file.write(f"\n{words}\n")
        if self._remaining_restarts:
            left = self._remaining_restarts
            print(f"{self.failure}\nstarting again, {left} restart(s) left", file=sys.stderr)

    # --- signals ---

    def install_signal_handlers(self) -> None:
        """Handle the stop signals from now on, and unblock them: whoever started this process
        blocked them until then, so that none was lost."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])  # see `echelon node`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a stop signal to the workers. The ranks agree on a step, save and exit; a second
        Ctrl-C does not wait for that. A signal that no person has typed may mean this node alone,
        which then leaves."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            self._kill_all_workers()
            print("\x1b[?25h\nstopped at once; the last snapshot is intact", file=sys.stderr)
            os._exit(ExitCode.INTERRUPTED)
        if number != signal.SIGINT and self._stop_signal is None and self._may_be_spared:
            self._notice = self._notice or signal.Signals(number)
            return
        self._stop_signal = self._stop_signal or signal.Signals(number)
        self._forward_stop_signal()

    @property
    def _may_be_spared(self) -> bool:
        """Whether the others could go on without this node."""
        known = self._lifeline.membership
        return known.can_lose_nodes and any(
            m.node != self._lifeline.own.node for m in known.list_nodes_with_ranks()
        )

    def _report_notice(self) -> None:
        """Tell the leader of a stop signal that may mean this node alone. Where the others cannot
        go on without it, or `echelon cancel` has sent it, it means all."""
        if self._notice is None or self._stop_signal is not None or self._is_leaving:
            return
        if not self._may_be_spared or self._run.cancel_file.exists():
            self._stop_signal = self._notice
            self._forward_stop_signal()
        elif time.monotonic() - self._noticed_s > _NOTICE_INTERVAL_S:
            self._noticed_s = time.monotonic()
            self._lifeline.report_notice(self._notice.name)

    def _forward_stop_signal(self) -> None:
        """Send the stop signal once to each worker, also to one that starts later. A signal handler
        may interrupt this method and call it again."""
        while self._stop_signal and self._unsignalled_ranks:
            with contextlib.suppress(IndexError):
                local_rank = self._unsignalled_ranks.pop()
                number = signal.SIGINT if self._job.node.is_added else self._stop_signal
                if local_rank not in self._exit_codes and local_rank in self._pids:
                    _send_signal(self._pids[local_rank], number)


def make_worker_spec(rendezvous: FixedRendezvous, procs: int, max_restarts: int) -> WorkerSpec:
    """torch's description of the workers of one node."""
    return WorkerSpec(
        role="echelon",
        local_world_size=procs,
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=_MONITOR_INTERVAL_S,
        entrypoint="echelon",
    )


def _watch_gpus(job: NodeJob) -> GpuWatch | None:
    """Look for errors of this node's GPUs, unless it is the only node: nothing would follow."""
    if job.node.node_count == 1:
        return None
    from echelon.launch.node.gpu_watch import GpuWatch

    return GpuWatch(os.environ, job.devices)


def _print_over_progress(text: str) -> None:
    """Print a line where rank 0 may show a progress bar."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}{text}", file=sys.stderr, flush=True)


def _send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _send_signal_to_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process group that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is halted, by SIGSTOP or a debugger."""
    fields = read_stat_fields(pid)
    return fields is not None and fields[0] in "Tt"
