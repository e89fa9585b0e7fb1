"""Explains the death of a loader process, which torch reports wherever the training happens to be.

torch watches its loader processes with a handler of SIGCHLD. The handler raises in the middle of
whatever line the training process executes, so the traceback points to innocent code.
"""

from __future__ import annotations

import re

from echelon.errors import EchelonError, ExitCode, Fault

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly)"
    r"(?: with exit code (?P<code>\d+))?"
)
_IN_THIS_PROCESS = "trainer.loader_workers=0 loads in the training process and shows what fails"
_SIGNAL_HINTS = {
    "Killed": "the kernel kills so when memory runs out, see `dmesg | tail`: set fewer "
    "trainer.loader_workers, or hold less of the data in memory",
    "Bus error": "shared memory ran out, see `df /dev/shm`: set fewer trainer.loader_workers, or "
    "give more (docker run --shm-size=8g)",
    "Segmentation fault": f"it crashed in compiled code: {_IN_THIS_PROCESS}",
}


def explain_dead_loader(error: BaseException, workers: int) -> EchelonError | None:
    """Return the error for a loader process that died, or None where `error` is another one.

    `workers` is the number of loader processes of this rank.
    """
    # While it waits for a batch, torch replaces the handler's error by one that knows only the
    # process, and keeps the first as the cause.
    deaths = [
        death
        for e in (error.__cause__, error)
        if isinstance(e, RuntimeError) and (death := _DEATH.search(str(e)))
    ]
    if not deaths:
        return None
    death = deaths[0]
    how = f"ended with exit code {death['code']}" if death["code"] else "ended"
    if death["signal"]:
        how = f"was killed by a signal ({death['signal']})"
    return EchelonError(
        Fault(
            f"a process that loads data (pid {death['pid']}, trainer.loader_workers={workers}) "
            f"{how}; the training process itself did not fail",
            _SIGNAL_HINTS.get(death["signal"] or "", _IN_THIS_PROCESS),
        ),
        exit=ExitCode.FAILED,
    )
