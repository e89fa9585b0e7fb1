"""Explains the death of a loader process, which torch may report in the middle of any line.

torch watches its loader processes with a handler of SIGCHLD. The handler raises in whatever line
the training process executes: the traceback points to innocent code, and a report of another
failure may be cut short. So the handler is removed, and a death is noticed where batches are
fetched: torch looks every five seconds there whether its processes are alive.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault

_REAP_WAIT_S = 10.0
"""A broken connection may be noticed before the kernel reports that its process has ended."""
_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly)"
    r"(?: with exit code (?P<code>\d+))?"
)
_TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_RAISED_IN_WORKER = "in DataLoader worker process"
_IN_THIS_PROCESS = "trainer.loader_workers=0 loads in the training process and shows what fails"
_SIGNAL_HINTS = {
    "SIGKILL": "the kernel kills so when memory runs out, see `dmesg | tail`: set fewer "
    "trainer.loader_workers, or hold less of the data in memory",
    "SIGBUS": "shared memory ran out, see `df /dev/shm`: set fewer trainer.loader_workers, or "
    "give more (docker run --shm-size=8g)",
    "SIGSEGV": f"it crashed in compiled code: {_IN_THIS_PROCESS}",
}


def remove_death_signal(previous_handler: Any = signal.SIG_DFL) -> None:
    """Undo torch's handler of SIGCHLD, which raises wherever this process happens to be.

    A handler of the user's is left as it is. `previous_handler` was there before torch's.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # torch sets its handler only there, as Python allows it only there
    if _is_from_torch(signal.getsignal(signal.SIGCHLD)):
        is_users = previous_handler is not None and not _is_from_torch(previous_handler)
        signal.signal(signal.SIGCHLD, previous_handler if is_users else signal.SIG_DFL)


def _is_from_torch(handler: Any) -> bool:
    """Return whether a signal handler is a function of torch's DataLoader."""
    return str(getattr(handler, "__module__", "")).startswith("torch.utils.data.")


def iter_fetched(loader: Any, workers: int, describe_work: Callable[[int], str]) -> Iterator[Any]:
    """Yield the batches of a DataLoader, and raise a fault where one of its processes died.

    Processes that serve several iterations may also have died since the last one. `describe_work`
    returns what a process was fetching, by its number.
    """
    previous_handler = signal.getsignal(signal.SIGCHLD)
    with _explain_death(lambda: loader._iterator, workers, describe_work):
        iterator = iter(loader)
    remove_death_signal(previous_handler)
    while True:
        with _explain_death(lambda: iterator, workers, describe_work):
            batches = [next(iterator, _END)]
        if batches[0] is _END:
            return
        yield batches.pop()  # a batch that is kept here would keep its memory


_END = object()


@contextlib.contextmanager
def _explain_death(
    get_iterator: Callable[[], Any], workers: int, describe_work: Callable[[int], str]
) -> Iterator[None]:
    """Raise a fault instead of an error that the death of a loader process caused.

    A process that dies while its batch is received breaks a connection, so the error itself may be
    of any kind; whether a process is gone decides.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if _RAISED_IN_WORKER in str(error):
            raise  # the process lives: it has sent the error of a sample
        if (late := _TIMED_OUT.match(str(error))) is not None:
            raise _make_timeout_error(late[1]) from error
        processes = getattr(get_iterator(), "_workers", [])
        if not isinstance(error, RuntimeError):
            ended = wait([process.sentinel for process in processes], _REAP_WAIT_S)
            for process in processes:
                # Its descriptors are closed a moment before its exit code can be read.
                if process.sentinel in ended:
                    process.join()
        dead = [p for p in processes if p.exitcode]
        if not dead:
            raise
        work = describe_work(processes.index(dead[0]))
        raise _make_dead_loader_error(dead[0].pid, dead[0].exitcode, workers, work) from error


def explain_dead_loader(error: BaseException, workers: int) -> EchelonError | None:
    """Return the error for a loader process that died, or None where `error` is another one.

    This reads what torch says of a DataLoader that is not ours, such as one in an experiment.
    `workers` is the number of loader processes of this rank.
    """
    if isinstance(error, EchelonError):
        return None  # it is explained already, and torch's error is its cause
    # While it waits for a batch, torch replaces the handler's error by one that knows only the
    # process, and keeps the first as the cause.
    for e in (error.__cause__, error):
        death = _DEATH.search(str(e)) if isinstance(e, RuntimeError) else None
        if death is not None:
            numbers = {signal.strsignal(number): -number for number in signal.Signals}
            code = numbers.get(death["signal"]) or int(death["code"] or 0)
            return _make_dead_loader_error(death["pid"], code, workers)
    return None


def _make_dead_loader_error(
    pid: object, exit_code: int, workers: int, work: str = ""
) -> EchelonError:
    """Return the error for a loader process that died with this code, or by a signal, while it
    fetched something."""
    name = signal.Signals(-exit_code).name if exit_code < 0 else ""
    how = f"ended with exit code {exit_code}" if exit_code else "ended"
    how = f"was killed by {name}" if name else how
    how += f" while it fetched {work}" if work else ""
    return EchelonError(
        Fault(
            f"a process that loads data (pid {pid}, trainer.loader_workers={workers}) "
            f"{how}; the training process itself did not fail",
            _SIGNAL_HINTS.get(name, _IN_THIS_PROCESS),
        ),
        exit=ExitCode.FAILED,
    )


def _make_timeout_error(seconds: str) -> EchelonError:
    """Return the error for a batch that did not come in time."""
    return EchelonError(
        Fault(
            f"loader={{'timeout': {seconds}}}, and the loader processes gave no batch for so long",
            "look at what a sample waits for (trainer.loader_workers=0 shows it), or give more "
            "time",
        ),
        exit=ExitCode.FAILED,
    )
