"""Jobs, the queue, and the machines: GPUs and processors of here and of where runs are.

Machines are sampled every few seconds while a page looks at them, and for a short while after. What
was sampled is kept for an hour. Other machines are reached as `echelon gpus` reaches them: over the
user's own ssh, and through srun for the nodes of her Slurm jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.board.request import Request, Response, Route, json_response
from echelon.board.run_index import is_run_folder

if TYPE_CHECKING:
    from echelon.board.server import Board
    from echelon.gpus.probe import Gpu, GpuNode
    from echelon.gpus.remote import NodeFeed, RemoteMachine

SAMPLE_EVERY_S = 5.0
_KEPT_S = 3600.0
_LOOKED_AT_S = 15.0
"""Sampling ends so long after the last page has asked."""
_FIND_HOSTS_EVERY_S = 30.0
_FIRST_SAMPLE_S = 2.0
_MAX_REMOTE = 64
_RECENT_JOBS = 10
_MAX_QUEUE = 2000
_QUEUE_EVERY_S = 5.0
_QUEUE_WAIT_S = 3.0
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]{0,252}")
"""A name that ssh cannot take for an option."""
_STATE = re.compile(rb'"state":"(\w+)"')
_STARTED = re.compile(rb'"started":([0-9.]+)')


# --- jobs ---


def show_jobs(request: Request) -> Response:
    """``GET /api/jobs``: the runs that are active, the ten that were started last, and the queue.

    Answer::

        {"jobs": [what `echelon jobs --json` prints, with "id", "own"],
         "silence": why Slurm does not answer, or "",
         "queue": null where there is no Slurm, else {"error": text, "jobs": [{"job", "partition",
             "name", "user", "state", "time", "limit", "nodes", "gres", "reason", "submitted",
             "own": bool, "run": id of a run of this board or null}]}}
    """
    from echelon.runs.curves import read_progress
    from echelon.runs.record import read_run_records
    from echelon.runs.run_folder import Run
    from echelon.runs.slurm_queue import query_jobs
    from echelon.views.jobs_table import JobRow

    rows = _choose_job_rows(request.board)
    ids = {row.folder: run_id for run_id, row in rows.items()}
    folders = [Path(row.folder) for row in rows.values() if is_run_folder(row.folder)]
    ask_slurm = request.board.index.ask_slurm or query_jobs
    records, _ = read_run_records([Run(folder) for folder in folders], ask_slurm)
    jobs = []
    for record in records:
        row = JobRow(record.run_status, read_progress(record)).to_dict()
        row["id"] = ids.get(str(record.run.folder))
        row["own"] = _is_own(record.run.folder)
        jobs.append(row)
    by_job = {str(job["job"]): job["id"] for job in jobs if job["job"]}
    queue = _queue.read(by_job)
    silence = queue["error"] if queue else ""
    return json_response({"jobs": jobs, "silence": silence, "queue": queue})


def _choose_job_rows(board: Board) -> dict[str, Any]:
    """Return the rows of runs that are active or were started last, by their ids."""
    from echelon.runs.status import ACTIVE_STATES

    active = {state.encode() for state in ACTIVE_STATES}
    found = []
    for row in board.index.list_rows():
        state, started = _STATE.search(row.text), _STARTED.search(row.text)
        if b'"source":"echelon"' in row.text and state is not None:
            moment = float(started[1]) if started else 0.0
            found.append((state[1] in active, moment, row))
    found.sort(key=lambda each: (not each[0], -each[1]))
    count = sum(is_active for is_active, _, _ in found)
    chosen = found[: max(count, _RECENT_JOBS)]
    return {json.loads(row.text)["id"]: row for _, _, row in chosen}


def _is_own(folder: os.PathLike[str]) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(folder).st_uid == os.geteuid()
    return False


class _SlurmQueueReader:
    """Slurm's queue, asked at most every few seconds: its controller answers all its users."""

    _FORMAT = "%i|%P|%u|%T|%M|%l|%D|%b|%V|%r|%j"

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._answered = threading.Event()
        self._read_at = -1e9
        self._jobs: list[dict[str, Any]] = []
        self._error = ""

    def read(self, runs_by_job: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the queue; None on a machine without Slurm. A controller that is slow is waited
        for in the background, and meanwhile its last answer is returned."""
        if shutil.which("squeue") is None:
            return None
        is_old = time.monotonic() - self._read_at > _QUEUE_EVERY_S
        if is_old and self._asking.acquire(blocking=False):
            self._answered.clear()
            threading.Thread(target=self._ask_and_release, daemon=True).start()
        if is_old and not self._answered.wait(_QUEUE_WAIT_S) and not self._jobs:
            return {"error": "it has not answered yet", "jobs": []}
        jobs = [job | {"run": runs_by_job.get(job["job"])} for job in self._jobs]
        return {"error": self._error, "jobs": jobs}

    def _ask_and_release(self) -> None:
        try:
            self._ask()
            self._read_at = time.monotonic()
        finally:
            self._asking.release()
            self._answered.set()

    def _ask(self) -> None:
        from echelon.gpus.command import get_current_user
        from echelon.runs.slurm_queue import get_last_error_line, run_slurm_command

        done = run_slurm_command("squeue", "-h", "-r", "-o", self._FORMAT)
        self._error = get_last_error_line(done) if done.returncode else ""
        user = get_current_user()
        names = ("job", "partition", "user", "state", "time", "limit", "nodes", "gres")
        found = []
        for line in done.stdout.splitlines()[:_MAX_QUEUE]:
            words = line.split("|", 10)  # the name comes last, as it may have a | in it
            if len(words) == 11:
                job: dict[str, Any] = dict(zip(names, words, strict=False))
                job |= {"submitted": words[8], "reason": words[9], "name": words[10]}
                found.append(job | {"own": job["user"] == user})
        self._jobs = found


_queue = _SlurmQueueReader()


# --- machines ---


class HostHistory:
    """What was sampled of one machine in the last hour."""

    def __init__(self) -> None:
        self.node: GpuNode | None = None
        self.cpu: dict[str, Any] | None = None
        self.sampled = 0.0
        self._gpus: dict[int, deque[tuple[float, float | None, float | None]]] = {}
        self._cpu: deque[tuple[float, float | None, float | None]] = deque()

    def add_gpus(self, when: float, node: GpuNode) -> None:
        """Take over a reading of the GPUs."""
        self.node, self.sampled = node, when
        if node.fault and node.stale_s is not None:
            return
        for gpu in node.gpus:
            samples = self._gpus.setdefault(gpu.index, deque())
            if not gpu.fault:
                samples.append((when, gpu.use_percent, gpu.memory_used_bytes))
            _drop_old(samples, when)

    def add_cpu(self, when: float, cpu: dict[str, Any]) -> None:
        """Take over a reading of the processors and the memory."""
        self.cpu = cpu
        self._cpu.append((when, cpu["used_percent"], cpu["memory_used_bytes"]))
        _drop_old(self._cpu, when)

    def to_dict(self, host: str) -> dict[str, Any]:
        """Return what a page is told of the machine."""
        node = self.node
        cpu = None if self.cpu is None else self.cpu | {"history": [list(s) for s in self._cpu]}
        return {
            "host": host,
            "error": None if node is None else node.fault,
            "stale_s": None if node is None else node.stale_s,
            "driver": None if node is None else node.driver,
            "cuda": None if node is None else node.cuda,
            "sampled": self.sampled,
            "gpus": [self._gpu_to_dict(gpu) for gpu in (node.gpus if node else ())],
            "cpu": cpu,
        }

    def _gpu_to_dict(self, gpu: Gpu) -> dict[str, Any]:
        from echelon.gpus.probe import GpuNode, node_to_dict

        [data] = node_to_dict(GpuNode("", gpus=(gpu,)))["gpus"]
        users = {process.user for process in gpu.list_all_processes()}
        data["users"] = sorted(user or "?" for user in users)
        data["history"] = [list(sample) for sample in self._gpus.get(gpu.index, ())]
        return dict(data)


def _drop_old(samples: deque[tuple[float, float | None, float | None]], now: float) -> None:
    while samples and samples[0][0] < now - _KEPT_S:
        samples.popleft()


class MachineSampler:
    """Samples this machine and those that `list_machines` names, in a thread that ends when nobody
    looks any more."""

    def __init__(
        self, list_machines: Callable[[], list[RemoteMachine]], every_s: float = SAMPLE_EVERY_S
    ) -> None:
        self._list_machines = list_machines
        self._every_s = every_s
        self._lock = threading.Lock()
        self._hosts: dict[str, HostHistory] = {}
        self._feeds: dict[str, NodeFeed] = {}
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None
        self._has_sampled = threading.Event()
        self._cpu_times: tuple[int, int] | None = None

    @property
    def is_running(self) -> bool:
        """Whether machines are being sampled."""
        return self._thread is not None

    def look(self) -> list[dict[str, Any]]:
        """Return the machines, this one first, and have them sampled for a while."""
        with self._lock:
            self._looked_at = time.monotonic()
            if self._thread is None:
                self._has_sampled.clear()
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
        self._has_sampled.wait(_FIRST_SAMPLE_S)
        with self._lock:
            return [history.to_dict(host) for host, history in self._hosts.items()]

    def _run(self) -> None:
        from echelon.gpus.probe import GpuProbe

        probe = GpuProbe()
        found_at = -1e9
        try:
            while True:
                begun = time.monotonic()
                self._sample_here(probe)
                self._sample_others()
                self._has_sampled.set()
                if begun - found_at >= _FIND_HOSTS_EVERY_S:
                    self._follow_machines()
                    found_at = begun
                time.sleep(max(0.0, self._every_s - (time.monotonic() - begun)))
                with self._lock:
                    if time.monotonic() - self._looked_at > _LOOKED_AT_S:
                        self._thread = None
                        return
        finally:
            with self._lock:
                self._thread = None
                feeds, self._feeds = self._feeds, {}
            for feed in feeds.values():
                feed.close()
            probe.close()

    def _sample_here(self, probe: Any) -> None:
        node, when = probe.read_node(), time.time()
        cpu = self._read_cpu()
        with self._lock:
            history = self._hosts.setdefault(node.host, HostHistory())
            history.add_gpus(when, node)
            history.add_cpu(when, cpu)

    def _sample_others(self) -> None:
        for host, feed in self._feeds.items():
            node, when = feed.get_latest(), time.time()
            with self._lock:
                self._hosts.setdefault(host, HostHistory()).add_gpus(when, node)

    def _follow_machines(self) -> None:
        """Open feeds of machines that have come, and close those of machines that have gone."""
        from echelon.gpus.remote import NodeFeed

        wanted = {machine.host: machine for machine in self._list_machines()[:_MAX_REMOTE]}
        gone = [host for host in self._feeds if host not in wanted]
        closed = [self._feeds.pop(host) for host in gone]
        for feed in closed:
            feed.close()
        with self._lock:
            for host in gone:
                self._hosts.pop(host, None)
        for host, machine in wanted.items():
            if host not in self._feeds:
                self._feeds[host] = NodeFeed(machine, self._every_s)

    def _read_cpu(self) -> dict[str, Any]:
        busy, total = _read_cpu_times()
        before, self._cpu_times = self._cpu_times, (busy, total)
        used = None
        if before is not None and total > before[1]:
            used = round(100 * (busy - before[0]) / (total - before[1]), 1)
        memory = _read_memory_bytes()
        load = os.getloadavg()
        return {
            "cores": os.cpu_count(),
            "load": [round(each, 2) for each in load],
            "used_percent": used,
            "memory_used_bytes": memory.get("MemTotal", 0) - memory.get("MemAvailable", 0),
            "memory_total_bytes": memory.get("MemTotal"),
        }


def _read_cpu_times() -> tuple[int, int]:
    """Return the ticks in which processors were busy, and all ticks, since the start."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
    return 0, 0


def _read_memory_bytes() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) << 10
    return found


# --- which other machines ---


def list_machines_of_runs(board: Board) -> list[RemoteMachine]:
    """Return the machines of active runs in folders of the user's own, and of her Slurm jobs.

    A folder of somebody else names no machine to log in to.
    """
    from echelon.errors import EchelonError
    from echelon.gpus.command import get_current_user
    from echelon.gpus.remote import list_slurm_machines, list_ssh_machines

    here = {socket.gethostname(), socket.gethostname().partition(".")[0], "localhost", "127.0.0.1"}
    by_ssh: dict[str, dict[str, None]] = {}
    for host, ssh in _iterate_hosts(board):
        if host not in here and _HOST.fullmatch(host):
            by_ssh.setdefault(ssh, {})[host] = None
    machines: dict[str, RemoteMachine] = {}
    for ssh, hosts in by_ssh.items():
        with contextlib.suppress(EchelonError):
            for machine in list_ssh_machines(list(hosts), ssh):
                machines.setdefault(machine.host, machine)
    if shutil.which("squeue") is not None:
        with contextlib.suppress(EchelonError):
            for machine in list_slurm_machines("", get_current_user(), "ssh"):
                if machine.host not in here:
                    machines[machine.host] = machine
    return list(machines.values())


def _iterate_hosts(board: Board) -> Iterator[tuple[str, str]]:
    """Yield the hosts of active runs, and the command that logs in to each."""
    from echelon.runs.status import ACTIVE_STATES

    active = {state.encode() for state in ACTIVE_STATES}
    for row in board.index.list_rows():
        state = _STATE.search(row.text)
        if state is None or state[1] not in active or b'"source":"echelon"' not in row.text:
            continue
        data = json.loads(row.text)
        if data.get("job") or not _is_own(data["folder"]):
            continue
        settings = data.get("settings") or {}
        ssh = settings.get("launch.ssh")
        ssh = ssh if isinstance(ssh, str) else "ssh"
        hosts = settings.get("launch.hosts")
        for host in [data.get("host"), *(hosts if isinstance(hosts, list) else [])]:
            if isinstance(host, str):
                yield host.partition(" ")[0], ssh


_samplers: dict[int, MachineSampler] = {}
_samplers_lock = threading.Lock()


def _get_sampler(board: Board) -> MachineSampler:
    with _samplers_lock:
        if (sampler := _samplers.get(id(board))) is None:
            sampler = MachineSampler(lambda: list_machines_of_runs(board))
            _samplers[id(board)] = sampler
        return sampler


def show_machines(request: Request) -> Response:
    """``GET /api/machines``: this machine, and those of active runs; ask again every 5 s.

    Answer::

        {"hosts": [{"host", "error": why there is no GPU to show, or null,
             "stale_s": the age of what is shown of a machine that does not answer any more, or
                 null, "driver", "cuda", "sampled": seconds since 1970,
             "gpus": [{what `echelon gpus --json` prints of a GPU, "users": [names, "?" for one that
                 is not known], "history": [[time, percent or null, bytes or null] …]}],
             "cpu": null of other machines, else {"cores", "load": [1, 5, 15 minutes],
                 "used_percent", "memory_used_bytes", "memory_total_bytes",
                 "history": [[time, percent, bytes] …]}}],
         "every_s": seconds between samples,
         "preflight": [the newest results of `echelon preflight`, as its --json prints them, with
             "time" and "run" (a name or null)]}
    """
    from echelon.runs.preflight_results import list_preflight_results

    return json_response(
        {
            "hosts": _get_sampler(request.board).look(),
            "every_s": SAMPLE_EVERY_S,
            "preflight": list_preflight_results(os.environ),
        }
    )


ROUTES: list[Route] = [
    ("GET", "/api/jobs", show_jobs),
    ("GET", "/api/machines", show_machines),
]
