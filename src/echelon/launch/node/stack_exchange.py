"""What a person asks of a run: the stacks of all ranks on all nodes, as for a hang, or another
number of nodes.

A request is a file in the run folder that node 0's agent looks at. It asks the other agents over
the lifeline, each of them sends the stacks of its ranks back there, one message per rank, and node
0 writes what has come into a file. So it needs no folder that the nodes share.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.node_scaling import ScaleAnswer
from echelon.launch.node.rank_stacks import collect_stacks, find_py_spy
from echelon.launch.plan import NodeSpec
from echelon.runs.process_record import identify_this_process
from echelon.runs.run_folder import Run
from echelon.runs.stack_report import RankStack, StackReport
from echelon.runs.stack_text import render_report
from echelon.utils.files import read_json_object, write_json_atomically, write_text_atomically

_LOOK_INTERVAL_S = 0.5
_NODES_LIMIT_S = 12.0
"""How long node 0 waits for the stacks of the others."""
_HANG_LIMIT_S = 15.0
"""How long an agent waits for node 0 to have written the stacks of a hang."""
_MAX_SENT_BYTES = 12_000
"""Of one rank. Heartbeats wait behind it, also where the network is slow or busy."""
_MAX_REQUEST_BYTES = 4096
_REQUEST_ID = re.compile(r"[0-9a-f]{16}")


@dataclass
class _Collection:
    """What has come so far in answer to one request."""

    ranks: list[RankStack] = field(default_factory=list)
    nodes_done: set[int] = field(default_factory=set)


class StackExchange:
    """One agent's part in collecting stacks.

    `list_workers` returns the process of every living rank of this node. Reading stacks takes a
    while, so it happens in threads; `look_for_request` and `record_hang` return at once.
    """

    def __init__(
        self,
        run: Run,
        node: NodeSpec,
        lifeline: Lifeline,
        list_workers: Callable[[], Mapping[int, int]],
        is_program: bool,
        scale: Callable[[int], ScaleAnswer],
    ) -> None:
        self._run, self._node, self._lifeline, self._scale = run, node, lifeline, scale
        self._list_workers, self._is_program = list_workers, is_program
        self._change = threading.Condition()
        self._reading = threading.Lock()
        """Ranks are asked by one thread at a time: their answers lie in one file."""
        self._collections: dict[str, _Collection] = {}
        self._own_ranks: dict[int, RankStack] = {}
        """As this node has sent them last."""
        self._hang_files: dict[str, str] = {}
        """Attempt → the file with its stacks, or why there is none."""
        self._hang_begun: dict[str, float] = {}
        self._identity = identify_this_process()
        self._last_look = 0.0
        self._last_request = ""
        lifeline.on_stack_message = self._handle_message
        if lifeline.is_leader:
            self.take_requests()

    def take_requests(self) -> None:
        """Be the agent that answers requests."""
        with contextlib.suppress(OSError):  # the disk may be full
            self._run.stack_request_file.write_bytes(b"")
            write_json_atomically(self._run.stack_agent_file, self._identity)

    def close(self) -> None:
        """Answer no more requests."""
        if read_json_object(self._run.stack_agent_file) == self._identity:
            self._run.stack_agent_file.unlink(missing_ok=True)

    # --- node 0: what it is asked for ---

    def look_for_request(self) -> None:
        """On node 0, answer a request that a person has made since the last look."""
        now = time.monotonic()
        if not self._lifeline.is_leader or now - self._last_look < _LOOK_INTERVAL_S:
            return
        self._last_look = now
        # A training that a submitted command starts has an agent of its own, which knows more.
        if self._is_program and not self._run.stack_agent_file.exists():
            self.take_requests()
        request = self._read_request()
        if request is None or request["id"] == self._last_request:
            return
        number = self._last_request = str(request["id"])
        if "scale" in request:
            self._write_answer(number, self._scale(int(request["scale"])).to_json())
        else:
            _start_thread(lambda: self._write_answer(number, self._collect_all(number).to_json()))

    def _read_request(self) -> dict[str, Any] | None:
        """Return the newest request to this agent, if there is one. The file is opened, since that
        shows what another machine has written there."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            with self._run.stack_request_file.open("rb") as file:
                request = json.loads(file.read(_MAX_REQUEST_BYTES))
            is_ours = request.get("agent") == self._identity
            is_count = isinstance(request.get("scale", 1), int)
            if is_ours and is_count and _REQUEST_ID.fullmatch(str(request.get("id"))):
                return dict(request)
        return None

    def _write_answer(self, request: str, answer: dict[str, Any]) -> None:
        file = self._run.get_stack_answer_file(request)
        # Who asked may have gone, or the disk is full.
        with contextlib.suppress(OSError), file.open("r+b") as opened:
            opened.write(json.dumps(answer).encode() + b"\n")

    def _collect_all(self, request: str) -> StackReport:
        """Return where all ranks stand, as far as their nodes answer in time."""
        nodes = {m.node for m in self._lifeline.membership.members.values() if m.place >= 0}
        begun = time.time()
        with self._change:
            collection = self._collections[request] = _Collection()
        self._lifeline.send_stack_message({"ask": request})
        own = self._collect_own()
        with self._change:
            collection.ranks += own
            collection.nodes_done.add(self._node.rank)
            self._change.wait_for(lambda: collection.nodes_done >= nodes, _NODES_LIMIT_S)
            del self._collections[request]
            ranks = tuple(sorted(collection.ranks, key=lambda rank: rank.rank))
            missing = sorted(nodes - collection.nodes_done)
        sentences = (f"node {n} sent no stacks within {_NODES_LIMIT_S:g} s" for n in missing)
        return StackReport(self._run.name, begun, ranks, tuple(sentences))

    # --- a hang ---

    def record_hang(self, where: str) -> bool:
        """Have the stacks of all ranks written, and return whether that is over. It is called
        again until then; on other nodes than 0 it waits for node 0. `where` names the attempt and
        its round, as each has one report."""
        begun = self._hang_begun.get(where)
        if begun is None:
            self._hang_begun[where] = begun = time.monotonic()
            if self._lifeline.is_leader:
                _start_thread(lambda: self._write_hang(where))
        return where in self._hang_files or time.monotonic() - begun > _HANG_LIMIT_S

    def get_hang_file(self, where: str) -> str:
        """Return the file with the stacks of a hang; "" if none was written."""
        return self._hang_files.get(where, "")

    def get_own_rank(self, rank: int) -> RankStack | None:
        """Return where a rank of this node stood when it was asked last."""
        return self._own_ranks.get(rank)

    def _write_hang(self, where: str) -> None:
        report = self._collect_all(secrets.token_hex(8))
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(report.time))
        file = self._run.get_hang_report_file(stamp)
        try:
            write_text_atomically(file, render_report(report, all_threads=True))
            self._hang_files[where] = str(file)
        except OSError:  # the disk may be full
            self._hang_files[where] = ""
        message = {"hang": where, "file": self._hang_files[where]}
        self._lifeline.send_stack_message(message)

    # --- between nodes ---

    def _collect_own(self) -> list[RankStack]:
        with self._reading:
            workers = self._list_workers()
            found = collect_stacks(self._run, workers, self._is_program, find_py_spy())
        self._own_ranks = {rank.rank: rank for rank in found}
        return found

    def _send_own(self, request: str) -> None:
        """Send node 0 the stacks of this node's ranks."""
        for rank in self._collect_own():
            short = asdict(rank.limit_size(_MAX_SENT_BYTES))
            self._lifeline.send_stack_message({"of": request, "rank": short})
        self._lifeline.send_stack_message({"of": request, "done": self._node.rank})

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle a message of another agent. It is called from the thread of the lifeline."""
        if "ask" in message:
            request = str(message["ask"])
            _start_thread(lambda: self._send_own(request))
        elif "hang" in message:
            self._hang_files[str(message["hang"])] = str(message["file"])
        elif "of" in message:
            self._take_answer(message)

    def _take_answer(self, message: dict[str, Any]) -> None:
        """Take what a node sent in answer to a request; what comes too late is dropped."""
        with self._change:
            collection = self._collections.get(str(message["of"]))
            if collection is None:
                return
            if "rank" in message:
                collection.ranks.append(RankStack.from_json(message["rank"]))
            else:
                collection.nodes_done.add(int(message["done"]))
                self._change.notify_all()


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True, name="stacks").start()
