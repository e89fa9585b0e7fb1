"""A process that has imported torch once and forks workers from then on.

torch takes seconds to import and most of a worker's memory. Forked workers share both, and a
restart costs milliseconds. The fork server has one thread, never touches a device and runs no user
code, so that its children start clean. It exchanges JSON messages with the agent over a socket.
When the agent dies, the fork server dies, and the workers with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.utils.imports import pause_garbage_collection
from echelon.utils.processes import die_with_parent

_MAX_MESSAGE_BYTES = 1 << 17
_MAX_OPENBLAS_THREADS = 64
"""What numpy's wheels are built with."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@dataclass(frozen=True)
class WorkerSpawnRequest:
    """One worker to start."""

    local_rank: int
    variables: dict[str, str]
    entrypoint: str
    """MODULE:FUNCTION, called with the arguments; it ends the process and never returns."""
    arguments: list[str]
    log_file: str | None
    """Where its output goes; None: to the terminal."""


class ForkServerGone(Exception):
    """The fork server was killed, and its workers with it."""


class ForkServer:
    """The agent's handle of its fork server.

    It is made before the agent's process starts threads: a process with threads cannot be forked
    cleanly, and then a new interpreter has to import torch a second time.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._preload = preload
        self.is_gone = False
        if _can_fork_safely():
            self.pid = os.fork()
            if self.pid == 0:
                ours.close()
                _serve_forks(theirs, preload)
        else:
            self.pid = _spawn_fork_server(theirs, preload)
        theirs.close()
        ours.setblocking(False)

    def request_worker(self, request: WorkerSpawnRequest) -> None:
        """Send the request to start a worker; `read_events` reports its process id."""
        self._socket.setblocking(True)
        try:
            self._socket.send(json.dumps(asdict(request)).encode())
        except ConnectionError:
            self.is_gone = True
            raise ForkServerGone from None
        self._socket.setblocking(False)

    def read_events(self) -> Iterator[dict[str, Any]]:
        """What happened since the last call: {"started": pid, "local_rank": n}, {"exited": pid,
        "code": n}, and {"gone": pid} once the fork server has died."""
        while True:
            try:
                message = self._socket.recv(_MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                self.is_gone = True
                yield {"gone": self.pid}
                return
            yield json.loads(message)

    def wait_for_event(self, timeout_s: float) -> None:
        """Sleep until there is something to read, or the time is over."""
        select.select([self._socket], [], [], timeout_s)

    def start_replacement(self) -> ForkServer:
        """Return a new fork server, after this one was killed."""
        self.close()
        return ForkServer(self._preload)

    def close(self) -> None:
        """End the fork server, which ends when its socket closes, and reap it."""
        self._socket.close()
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            return


def _can_fork_safely() -> bool:
    """Return whether workers may be forked from this process.

    A fork copies the memory of all threads, but only the one that forks continues. In the child,
    locks of the others stay locked, an OpenMP region waits for its pool for ever, and autograd
    refuses to run. Code of the user that ran before can have started any of them: autograd starts
    threads in the first backward pass on a machine with a GPU, and in deeply nested ones anywhere;
    OpenMP in the first large operation; a CUDA driver when it is opened.
    The idle threads of OpenBLAS are the exception: they are there from the import of numpy on, and
    OpenBLAS starts them anew after a fork.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    threads = len(os.listdir("/proc/self/task"))
    return threading.active_count() == 1 and threads <= 1 + _count_openblas_threads()


def _count_openblas_threads() -> int:
    """Return how many threads OpenBLAS started when it was loaded, by its own rules. 0: it is not
    loaded.

    Counting too few costs a second's import in a process that could have been forked; counting too
    many would hide a thread that must not be lost.
    """
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    limits = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    wanted = (os.environ.get(name, "") for name in limits)
    processors = min(_MAX_OPENBLAS_THREADS, len(os.sched_getaffinity(0)))
    pool = next((int(text) for text in wanted if text.isdecimal() and int(text) > 0), processors)
    return len(libraries) * (min(pool, processors) - 1)


def _spawn_fork_server(channel: socket.socket, preload: Sequence[str]) -> int:
    """Start the fork server in a new interpreter; returns its process id."""
    code = "from echelon.launch.node.fork_server import main; main()"
    command = [sys.executable, "-c", code, str(channel.fileno()), *preload]
    return subprocess.Popen(command, pass_fds=[channel.fileno()]).pid


def main() -> None:
    """The main program of a fork server that was not forked: the socket's number, then what to
    import."""
    number, *preload = sys.argv[1:]
    _serve_forks(socket.socket(fileno=int(number)), preload)


# --- inside the fork server ---


def _serve_forks(channel: socket.socket, preload: Sequence[str]) -> None:
    """Be the fork server; never returns."""
    try:
        die_with_parent(os.getppid())
        # The agent decides who stops. Workers inherit the mask, so that a signal that comes early
        # waits until the worker handles it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        with pause_garbage_collection():
            for name in preload:
                importlib.import_module(name)
            gc.freeze()  # a garbage collection in a child would copy the pages they share
        _answer_requests(channel)
    except ConnectionError:  # the agent has gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer_requests(channel: socket.socket) -> None:
    """Fork a worker for each request and report each that exits, until the agent closes its end."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        watched: list[Any] = [channel, wake_read]
        ready, _, _ = select.select(watched, [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, code in _reap_children():
                channel.send(json.dumps({"exited": pid, "code": code}).encode())
        if channel in ready:
            message = channel.recv(_MAX_MESSAGE_BYTES)
            if not message:
                return
            order = WorkerSpawnRequest(**json.loads(message))
            server_pid = os.getpid()  # read before the fork: it may end right after
            pid = os.fork()
            if pid == 0:
                channel.close()
                os.close(wake_read)
                os.close(wake_write)
                _become_worker(order, server_pid)
            started = {"started": pid, "local_rank": order.local_rank}
            channel.send(json.dumps(started).encode())


def _reap_children() -> Iterator[tuple[int, int]]:
    """Process id and exit code of each child that has exited."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


# --- inside a worker ---


def _become_worker(request: WorkerSpawnRequest, server_pid: int) -> None:
    """Be a worker: set it up and call its entrypoint; never returns."""
    try:
        die_with_parent(server_pid)
        os.setpgid(0, 0)  # so that the agent can kill what it starts, too
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _set_up_worker(request.variables, request.log_file)
        module, _, function = request.entrypoint.partition(":")
        getattr(importlib.import_module(module), function)(*request.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _set_up_worker(variables: Mapping[str, str], log: str | None) -> None:
    """Set variables, standard streams and the number of threads."""
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    if "torch" in sys.modules and "OMP_NUM_THREADS" in variables:
        sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
