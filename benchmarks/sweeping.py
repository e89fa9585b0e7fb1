"""What a sweep's engine costs, and what a killed worker costs the others.

    python benchmarks/sweeping.py --trials 1000 --workers 8 --json OUT

* ``engine``: trials that do nothing, taken, reported and ended by several processes through the
  book that real ones go through: the time a trial spends in the engine, and trials per second.
* ``lock``: the holder of a lock is killed; how long the next one waits, for our lock and for those
  of Optuna's own journal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import machine, versions
from echelon.sweep.book import Book, Taken
from echelon.sweep.folder import Settings, Sweep
from echelon.sweep.lock import Lock

FILE = """\
method: {method}
metric: {{name: x}}
parameters:
  a: {{min: 0.0, max: 1.0}}
  b: {{distribution: log_uniform_values, min: 0.00001, max: 1}}
  c: {{values: [1, 2, 3]}}
  d: {{min: 1, max: 100}}
early_terminate: {{type: hyperband, min_iter: 1}}
"""


def engine(method: str, trials: int, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        sweep = Sweep(folder / "s")
        sweep.write(Settings([], [], {"name": "x"}, trials), FILE.format(method=method))
        Book(sweep)
        begun = time.monotonic()
        pids = [_fork(lambda w=w: _work(sweep, folder / f"w{w}", str(w))) for w in range(workers)]
        for pid in pids:
            os.waitpid(pid, 0)
        seconds = time.monotonic() - begun
        spent = [s for w in range(workers) for s in json.loads((folder / f"w{w}").read_text())]
        results = Book(sweep).results()
    assert len(results) == trials
    assert {result.state for result in results} <= {"finished", "pruned"}
    return {
        "trials": trials,
        "workers": workers,
        "ms_per_trial_of_all_workers": round(1000 * seconds / trials, 2),
        "ms_of_cpu_per_trial": _ms(sorted(spent)),
    }


def _work(sweep: Sweep, out: Path, name: str) -> None:
    book, spent = Book(sweep, name), []
    while True:
        begun = time.thread_time()
        taken = book.take()
        if isinstance(taken, Taken):
            value = (taken.values["a"] - 0.3) ** 2 + taken.values["c"]
            stop = book.report(taken, [value])
            book.end(taken, "pruned" if stop else "finished")
            spent.append(time.thread_time() - begun)
        elif taken:
            time.sleep(0.01)
        else:
            out.write_text(json.dumps(spent))
            return


def _ms(seconds: list[float]) -> dict[str, float]:
    """Of CPU, so that workers that wait for each other are not counted twice."""
    last = seconds[int(0.99 * (len(seconds) - 1))]
    return {"median": round(1000 * statistics.median(seconds), 2), "p99": round(1000 * last, 2)}


def after_a_kill(make: Callable[[str], Any], path: Path) -> float:
    """Seconds until a lock is free whose holder was killed."""
    path.touch()  # the journal that it guards: its time of change says whether anyone is at it
    ready, told = os.pipe()

    def hold() -> None:
        _acquire(make(str(path)))
        os.write(told, b"1")
        signal.pause()

    pid = _fork(hold)
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    begun = time.monotonic()
    _acquire(make(str(path)))
    return time.monotonic() - begun


def _acquire(lock: Any) -> None:
    lock.__enter__() if isinstance(lock, Lock) else lock.acquire()


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from optuna.storages.journal import JournalFileOpenLock, JournalFileSymlinkLock

    with tempfile.TemporaryDirectory() as where:
        makers: dict[str, Callable[[str], Any]] = {
            "ours": lambda path: Lock(Path(path)),
            "optuna's symlink": JournalFileSymlinkLock,
            "optuna's open": JournalFileOpenLock,
        }
        waits = {
            name: round(after_a_kill(make, Path(where) / name[-4:]), 4)
            for name, make in makers.items()
        }
    found = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "lock_free_s_after_its_holder_was_killed": waits,
        "engine": {m: engine(m, given.trials, given.workers) for m in ("random", "bayes")},
    }
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
