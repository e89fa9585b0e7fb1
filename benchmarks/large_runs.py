"""What a glance costs where much was trained: time and memory of commands that read large files.

    python benchmarks/large_runs.py [--rounds 1]

* a run of 5 million lines of metrics, written by a program, so that nothing is known of them at
  first: `echelon runs` once to read them and once more when it has, `echelon show`, `echelon plot`.
* a log of 1 GB: its last lines, and all of it.
* a sweep of 5,000 trials: `echelon sweep show`, with the best and with all of them.
* a file of 5,000 commands: `echelon submit --dry-run`.

Each is measured at a tenth of its size, too. Time may grow by ten and a little; memory may not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import Figure, Result, environment, make_figure, run_benchmark
from echelon.config.schema import Config
from echelon.runs.run_folder import RUN_FORMAT
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_store import LeasedTrial, TrialStore

ROUNDS = 1
LINES, LOG_BYTES, TRIALS, COMMANDS = 5_000_000, 10**9, 5_000, 5_000
PART = 10
LIST_S, MEMORY_MB, GROWTH = 1.0, 250.0, 12.0
SWEEP = """\
method: random
metric: {name: x}
parameters:
  a: {min: 0.0, max: 1.0}
  b: {values: [1, 2, 3]}
"""


class Usage(NamedTuple):
    """Of one command."""

    seconds: float
    """Of the processor: what other programs do at the same time is not in it."""
    megabytes: float
    """The peak of its memory."""


class Task(NamedTuple):
    """A command in a folder that was filled for it."""

    what: str
    fill: Callable[[Path, int], None]
    size: int
    words: tuple[str, ...]
    limit_s: float | None = None


def measure(rounds: int = ROUNDS) -> Result:
    figures: list[Figure] = []
    seconds: dict[str, Figure] = {}
    for fill, tasks in group_tasks().items():
        large = [measure_tasks(fill, tasks, 1) for _ in range(rounds)]
        small = [measure_tasks(fill, tasks, PART) for _ in range(rounds)]
        for index, task in enumerate(tasks):
            took = [usages[index].seconds for usages in large]
            before = [usages[index].seconds for usages in small]
            peaks = [usages[index].megabytes for usages in large]
            growth = [a / b for a, b in zip(took, before, strict=True)]
            seconds[task.what] = make_figure(task.what, took, task.limit_s, "s")
            figures += [
                make_figure(f"CPU time: {task.what}", took, task.limit_s, "s"),
                make_figure(f"peak memory: {task.what}", peaks, MEMORY_MB, "MB"),
                make_figure(f"CPU time: {task.what}, × for a tenth", growth, GROWTH),
            ]
    sizes = {"lines": LINES, "log_bytes": LOG_BYTES, "trials": TRIALS, "commands": COMMANDS}
    load = f"{os.getloadavg()[0]:.1f} processes wanted to run beside it"
    return {
        "config": {**sizes, "rounds": rounds, "load": load},
        "figures": figures,
        "seconds": seconds,
    }


def group_tasks() -> dict[Callable[[Path, int], None], list[Task]]:
    """Tasks by what fills their folder, in the order in which they must run."""
    tasks = [
        Task("runs, the first time", write_metrics, LINES, ("runs",)),
        Task("runs", write_metrics, LINES, ("runs",), LIST_S),
        Task("show", write_metrics, LINES, ("show", "a")),
        Task("plot", write_metrics, LINES, ("plot", "a", "-o", "a.html")),
        Task("logs --lines 20", write_log, LOG_BYTES, ("logs", "a", "--lines", "20"), LIST_S),
        Task("logs", write_log, LOG_BYTES, ("logs", "a")),
        Task("sweep show", write_sweep, TRIALS, ("sweep", "show", "s")),
        Task("sweep show --all", write_sweep, TRIALS, ("sweep", "show", "s", "--all")),
        Task("submit --dry-run", write_commands, COMMANDS, SUBMIT),
    ]
    grouped: dict[Callable[[Path, int], None], list[Task]] = {}
    for task in tasks:
        grouped.setdefault(task.fill, []).append(task)
    return grouped


SUBMIT = ("submit", "--configs", "commands.txt", "launch=slurm", "--dry-run")


def measure_tasks(fill: Callable[[Path, int], None], tasks: list[Task], part: int) -> list[Usage]:
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        fill(Path(folder), tasks[0].size // part)
        return [measure_command(task.words, Path(folder)) for task in tasks]


def measure_command(words: tuple[str, ...], folder: Path) -> Usage:
    command = [sys.executable, "-m", "echelon", *words]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


# --- what they read -----------------------------------------------------------------------------


def make_run_folder(folder: Path, config: Config) -> Path:
    run = folder / "runs" / "a"
    (run / "logs").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"run_format": RUN_FORMAT, **config.to_dict()}))
    now = time.time()
    status = {"state": "finished", "launcher": "local", "nodes": 1, "world": 1, "started": now}
    (run / "status.json").write_text(json.dumps({**status, "updated": now, "step": 1}))
    return run


def write_metrics(folder: Path, lines: int) -> None:
    run = make_run_folder(folder, Config(experiment={"entry": "own.py:experiment"}))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            file.write(
                f'{{"step": {step}, "epoch": {1 + step // 1000}, "samples": {32 * step}, '
                f'"loss": {1 + 1e6 / (step + 1e6) + step * 7919 % 1000 / 1e4}, "lr": 0.1, '
                f'"samples_per_s": 3200.5, "step_ms": 10.02, "time": {1.7e9 + step / 100}}}\n'
            )


def write_log(folder: Path, size: int) -> None:
    run = make_run_folder(folder, Config())
    with (run / "logs" / "rank-0.log").open("w") as file:
        for line in range(size // 100):
            file.write(f"step {line:>12} {'loss 0.123456 and some more words about it':<81}\n")


def write_sweep(folder: Path, trials: int) -> None:
    sweep = SweepFolder(folder / "runs" / "s")
    sweep.write_files(SweepSettings([], [], {"name": "x"}, trials), SWEEP)
    store = TrialStore(sweep, "w")
    while isinstance(taken := store.take_trial(), LeasedTrial):
        store.report_history(taken, [taken.parameters["a"]])
        store.end_trial(taken, "finished")


def write_commands(folder: Path, commands: int) -> None:
    (folder / "train.py").write_text("print(1)\n")
    lines = [f"python train.py --seed {number} --lr 0.1\n" for number in range(commands)]
    (folder / "commands.txt").write_text("".join(lines))


if __name__ == "__main__":
    run_benchmark("time commands that read large files", measure, ROUNDS)
