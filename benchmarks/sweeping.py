"""What a sweep's engine costs, a killed worker costs the others, and early stopping saves.

    python benchmarks/sweeping.py [--rounds 3]

* engine: 1,000 trials that do nothing, taken, reported and ended by 8 processes through the book
  that real ones go through. What a trial costs is the time for all of them, divided by 1,000.
* lock: the holder of a lock is killed; how long the next one waits, for our lock and for those of
  Optuna's own journal.
* early stopping: `echelon sweep` with the space of examples/sweeper.yml, 24 trials drawn at random,
  once to the end and once with early_terminate. The draws are the same, so the only question is
  which trials were stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, Figure, Result, compute_ratios, environment, make_figure, run_benchmark
from echelon.sweep.sweep_folder import SweepFolder, SweepLock, SweepSettings
from echelon.sweep.trial_store import LeasedTrial, TrialStore

ROUNDS = 3
TRIALS, WORKERS, SEARCHED = 1000, 8, 24
COST_MS, PART, AS_GOOD = 50.0, 0.5, 1.0
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


def measure(rounds: int = ROUNDS) -> Result:
    costs = {m: [engine(m) for _ in range(rounds)] for m in ("random", "bayes")}
    waits = {name: [after_a_kill(make)] for name, make in _locks().items()}
    searches = [(search(seed, False), search(seed, True)) for seed in range(rounds)]
    epochs = [sum(found.evaluations) for _, found in searches]
    all_epochs = [sum(found.evaluations) for found, _ in searches]
    best, best_of_all = [f.best for _, f in searches], [f.best for f, _ in searches]
    counted = {"trials": TRIALS, "workers": WORKERS, "searched": SEARCHED, "rounds": rounds}
    return {
        "config": counted,
        "figures": [
            *(_cost(f"engine, {m}: a trial", c, "wall", COST_MS) for m, c in costs.items()),
            *(_cost(f"engine, {m}: CPU of all workers", c, "cpu") for m, c in costs.items()),
            make_figure(
                "epochs with early stopping, × without", compute_ratios(epochs, all_epochs), PART
            ),
            make_figure(
                "the best loss it finds, × without", compute_ratios(best, best_of_all), AS_GOOD
            ),
        ],
        "seconds": {name: make_figure(f"lock, {name}", s, unit="s") for name, s in waits.items()},
    }


class Cost(NamedTuple):
    """Of one trial, in milliseconds."""

    wall: float
    """All of them took so long together, divided by their number."""
    cpu: float


def _cost(what: str, costs: Sequence[Cost], kind: str, at_most: float | None = None) -> Figure:
    return make_figure(what, [getattr(cost, kind) for cost in costs], at_most, "ms")


def engine(method: str) -> Cost:
    with tempfile.TemporaryDirectory() as where:
        sweep = SweepFolder(Path(where) / "s")
        sweep.write_files(SweepSettings([], [], {"name": "x"}, TRIALS), FILE.format(method=method))
        TrialStore(sweep)
        begun = time.monotonic()
        pids = [_fork(lambda w=w: _work(sweep, str(w))) for w in range(WORKERS)]
        used = [os.wait4(pid, 0)[2] for pid in pids]
        seconds = time.monotonic() - begun
        results = TrialStore(sweep).summarize_trials()
    assert len(results) == TRIALS
    assert {result.state for result in results} <= {"finished", "pruned"}
    spent = sum(each.ru_utime + each.ru_stime for each in used)
    return Cost(1000 * seconds / TRIALS, 1000 * spent / TRIALS)


def _work(sweep: SweepFolder, name: str) -> None:
    book = TrialStore(sweep, name)
    while taken := book.take_trial():
        if isinstance(taken, LeasedTrial):
            value = (taken.parameters["a"] - 0.3) ** 2 + taken.parameters["c"]
            stop = book.report_history(taken, [value])
            book.end_trial(taken, "pruned" if stop else "finished")
        else:
            time.sleep(0.01)


class Found(NamedTuple):
    evaluations: list[int]
    """Of each trial: one after each epoch."""
    best: float


def search(seed: int, early: bool) -> Found:
    """On data of its own for each seed."""
    text = (HERE.parent / "examples" / "sweeper.yml").read_text()
    text = text.replace("method: bayes", "method: random")
    text = re.sub(r"run_cap: \d+", f"run_cap: {SEARCHED}", text)
    with tempfile.TemporaryDirectory() as where:
        file = Path(where) / "s.yml"
        file.write_text(text if early else text[: text.index("early_terminate")])
        words = [str(file), f"seed={seed}", f"data_seed={seed}", "--parallel", "2", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "echelon", "sweep", *words],
            cwd=where,
            env=environment(OMP_NUM_THREADS="1"),
            check=True,
            capture_output=True,
        )
    told = json.loads(done.stdout)
    return Found([trial["evaluations"] for trial in told["trials"]], told["best"]["value"])


def _locks() -> dict[str, Callable[[str], Any]]:
    from optuna.storages.journal import JournalFileOpenLock, JournalFileSymlinkLock

    return {
        "ours": lambda path: SweepLock(Path(path)),
        "Optuna's symlink": JournalFileSymlinkLock,
        "Optuna's open": JournalFileOpenLock,
    }


def after_a_kill(make: Callable[[str], Any]) -> float:
    """Seconds until a lock is free whose holder was killed."""
    with tempfile.TemporaryDirectory() as where:
        return _freed_s(make, Path(where) / "journal")


def _freed_s(make: Callable[[str], Any], path: Path) -> float:
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
    lock.__enter__() if isinstance(lock, SweepLock) else lock.acquire()


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


if __name__ == "__main__":
    run_benchmark("measure a sweep's engine", measure, ROUNDS)
