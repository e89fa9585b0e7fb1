"""The process that the ranks of the tests' worlds are forked from.

A forked rank costs a fraction of a second, because torch is imported already. The test process
must not be forked: a backward pass or a pool of threads in any earlier test would break every
rank. A fork server is clean by construction: it is a fresh interpreter with one thread that
imports, and from then on does nothing but fork and wait. Whatever ran in the test process before,
and in which order, is unknown to it.

The first world that a pytest worker asks for starts the worker's server; it ends with the worker.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any


@dataclass(frozen=True)
class ForkRequest:
    """A process to fork. Everything that it would inherit from the test process is given."""

    function: bytes
    """A pickled call without arguments. The test's module is imported in the new process alone, so
    that no code of a test ever runs in the server."""
    output: str
    """The file that takes its stdout."""
    errors: str
    """The file that takes its stderr; it may be the same."""
    working_folder: str
    variables: dict[str, str]
    import_path: list[str]


class ForkServer:
    """The test process's side of it."""

    def __init__(self, *preload: str) -> None:
        """`preload`: modules that it imports beside those of `worlds`."""
        ours, theirs = socketpair()
        # One thread: a pool that a library starts on import would not be forked with the rest.
        single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | single,
            start_new_session=True,  # Ctrl-C is pytest's to handle
        )
        theirs.close()
        self._channel = Connection(ours.detach())

    def fork(
        self,
        function: Callable[[], Any],
        output: Path,
        variables: Mapping[str, str],
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> int:
        """Start a process that calls `function`, and return its process id.

        The function and what is bound to it must be picklable: a function of a module, or a
        `partial` of one. It runs in `folder`; stderr goes where stdout goes, or to `errors`.
        """
        request = ForkRequest(
            pickle.dumps(function),
            str(output),
            str(errors or output),
            str(folder or Path.cwd()),
            {**os.environ, **variables},
            sys.path,
        )
        return int(self._ask(request))

    def start(
        self,
        function: Callable[[], Any],
        output: Path,
        variables: Mapping[str, str],
        errors: Path,
        folder: Path,
    ) -> ForkedProcess:
        """The same, with a handle of the process."""
        return ForkedProcess(self, self.fork(function, output, variables, errors, folder))

    def wait(self, pid: int) -> int:
        """The exit code of a process that has ended; negative for a signal."""
        return int(self._ask(pid))

    def close(self) -> None:
        """End the server, and with it every process it has forked."""
        self._channel.close()
        self._process.wait()

    def _ask(self, question: ForkRequest | int) -> Any:
        self._channel.send(question)
        return self._channel.recv()


class ForkedProcess:
    """A process that the server has forked, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server, self._handle = server, os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._code = self._server.wait(self.pid)
            os.close(self._handle)
        return self._code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- inside the server --------------------------------------------------------------------------


def serve(channel: Connection, preload: Sequence[str]) -> None:
    """Answer until the test process has closed its end."""
    import metric_set  # noqa: F401  torchmetrics takes two seconds to import
    import pytest  # noqa: F401  the tests' modules import it
    import worlds  # noqa: F401  what every rank needs, above all torch

    for name in preload:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"the fork server runs {len(threads)} threads"
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages they share
    while True:
        try:
            question = channel.recv()
        except (EOFError, ConnectionError):
            return
        if isinstance(question, int):
            channel.send(os.waitstatus_to_exitcode(os.waitpid(question, 0)[1]))
        else:
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become(question)
            channel.send(pid)


def _become(request: ForkRequest) -> None:
    """Turn a fresh fork into the requested process. Never returns."""
    code = 70
    try:
        from echelon.utils.processes import die_with_parent

        die_with_parent(os.getppid())
        os.setsid()  # what it leaves behind is found by its session
        _redirect_output(request.output, request.errors)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(request.working_folder)
        os.environ.clear()
        os.environ.update(request.variables)
        sys.path[:] = request.import_path
        pickle.loads(request.function)()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(output: str, errors: str) -> None:
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))


if __name__ == "__main__":
    from rank_fork_server import serve as serve_forks  # ForkRequest is found by this module's name

    serve_forks(Connection(int(sys.argv[1])), sys.argv[2:])
