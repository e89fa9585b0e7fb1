"""Work on many pieces of files in several processes, the results in order."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.processes import die_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Iterator[Result]:
    """Yields the result of every task, in the order of the tasks.

    Few tasks are ahead of the one whose result is awaited, so that any number of them takes little
    memory. Close the iterator, or leave it by an error, to end the processes. With one process the
    work is done in this one. `function` is one at the top of a module.
    """
    if processes == 1:
        yield from map(function, tasks)
        return
    # Forking would copy the locks of threads that pyarrow has started.
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )
    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with _block_interrupts():
                pending.append(pool.submit(function, task))
            if len(pending) >= 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        what = "a process that worked on the samples was killed"
        remedy = "if memory was short (dmesg says so), take fewer with --procs"
        raise EchelonError(Fault(what, remedy), exit=ExitCode.FAILED) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Starts processes that Ctrl-C does not reach: this one ends them, without their tracebacks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def count_processes(wanted: int | None, tasks: int) -> int:
    """Return how many processes to use: as many as asked for, or as there are cores, but not more
    than tasks."""
    return max(1, min(wanted or len(os.sched_getaffinity(0)), tasks))
