"""Kill workers of long runs again and again, and start runs again and again, until one hangs.

    python tests/campaigns/restarts.py --restarts 200 --starts 200 --json OUT

* ``restarts``: in runs on two processes a random worker is killed at a random moment, every fifth
  time while the world is still starting again. Each first new step is timed, and late after 5 s.
  At the end a run is stopped, and its curve and its last snapshot
  must be those of a run that nobody killed.
* ``starts``: short runs on two processes, from the command to the first step and to the end.

Whatever is counted under ``bad`` makes the exit code 1; so does a process that is left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import report
from command_runner import (
    ECHELON,
    QUICK,
    TWO,
    RunningCommand,
    metrics,
    started,
    steps_seen,
    workers,
)
from rich.progress import Progress

from echelon.runs.metrics_file import SPEED_METRICS

PROCS = 2
PER_RUN = 50
"""Kills of one run, so that there are several runs and none grows without end."""
TRAINING_S, STARTING_S = 1.2, 0.4
"""A kill comes within so many seconds: steps, saves and an evaluation; or all of a start."""
EARLY = 0.2
"""So often the next kill does not wait for the first new step."""
TRAIN = (*ECHELON, "train", *TWO, "track.progress=none")
LONG = ("trainer.save.steps=25", "trainer.evaluate.steps=40", "trainer.log_steps=1")
FOR_EVER = "trainer.steps=1000000000"
_POLL_S = 0.002

Count = Counter[str]
Tick = Callable[[], None]
StartCommand = Callable[[Sequence[str], Path], AbstractContextManager[RunningCommand]]
"""`command_runner.started`, or one that starts commands at less cost."""


class Hang(Exception):
    """What should have come did not; the text is what the run said."""


def wait_for(what: Callable[[], Any], running: RunningCommand, limit_s: float) -> float:
    """Seconds until it is so."""
    begun = time.monotonic()
    while not what():
        waited = time.monotonic() - begun
        if waited > limit_s or running.process.poll() is not None:
            raise Hang(f"after {waited:.1f} s: {running.read_output()[-3000:]}")
        time.sleep(_POLL_S)
    return time.monotonic() - begun


# Restarts --------------------------------------------------------------------------------------


def restarts(
    start: StartCommand,
    folder: Path,
    number: int,
    limit_s: float,
    late_s: float,
    rng: random.Random,
    tick: Tick,
) -> Any:
    count = Count(kills=0, early=0, hangs=0, late=0, left=0, differing=0)
    seconds: list[float] = []
    for first in range(0, number, PER_RUN):
        kills = min(PER_RUN, number - first)
        name = f"run-{first // PER_RUN}"
        run = folder / "runs" / name
        words = [*TRAIN, *LONG, f"run.name={name}", f"launch.max_restarts={kills}"]
        words += ["launch.max_replacements=0"]
        try:
            with start([*words, FOR_EVER], folder) as running:
                seconds += _kill_workers(run, running, kills, limit_s, rng, count, tick)
                running.process.send_signal(signal.SIGTERM)
                done = running.wait(limit_s)
        except (Hang, AssertionError) as error:
            count["hangs"] += 1
            print(error, file=sys.stderr)
            continue
        count["left"] += len(done.left)
        count["wrong exits"] += done.code != 75
        count["differing"] += not _as_if_never_killed(start, folder, run, done.err)
    count["late"] = sum(s > late_s for s in seconds)
    return {"bad": _bad(count, "kills", "early"), "count": dict(count), "seconds": _spread(seconds)}


def _kill_workers(
    run: Path,
    running: RunningCommand,
    kills: int,
    limit_s: float,
    rng: random.Random,
    count: Count,
    tick: Tick,
) -> Iterator[float]:
    """The time from each kill to the first new step of all ranks, where it was given the time."""
    agent = running.process.pid

    def all_step() -> bool:
        return min(steps_seen(run, PROCS)) > 0

    wait_for(all_step, running, limit_s)
    pause_s = TRAINING_S
    for kill in range(kills):
        time.sleep(rng.uniform(0.0, pause_s))
        alive = workers(agent)
        killed = time.monotonic()
        os.kill(rng.choice(alive), signal.SIGKILL)
        count["kills"] += 1
        tick()
        wait_for(lambda old=alive: _all_new(workers(agent), old), running, limit_s)  # type: ignore[misc]
        pause_s = STARTING_S
        if kill == kills - 1 or rng.random() > EARLY:
            wait_for(all_step, running, limit_s)
            pause_s = TRAINING_S
            yield time.monotonic() - killed
        else:
            count["early"] += 1


def _all_new(now: list[int], old: list[int]) -> bool:
    return len(now) == PROCS and not set(now) & set(old)


def _as_if_never_killed(start: StartCommand, folder: Path, run: Path, told: str) -> bool:
    """The curve, the evaluations and the last snapshot, bit for bit."""
    last = max((run / "snapshots").glob("step-*"))
    step = int(last.name.removeprefix("step-"))
    words = [*TRAIN, *LONG, "run.name=whole", "trainer.resume=never", f"trainer.steps={step}"]
    with start(words, folder) as running:
        done = running.wait(600.0)
    whole = folder / "runs" / "whole"
    lines = [_without_clocks(of, step) for of in (run, whole)]
    parts = [
        [(of / "snapshots" / last.name / f"{p}.pt").read_bytes() for p in PARTS]
        for of in (run, whole)
    ]
    same = done.code == 0 and lines[0] == lines[1] and parts[0] == parts[1]
    if not same:
        print(f"{run.name} is not as if never killed: {told[-2000:]}", file=sys.stderr)
    return same


PARTS = ("model", "optimizer", "rng")


def _without_clocks(run: Path, step: int) -> list[dict[str, Any]]:
    """A run that ends evaluates once more than one that is stopped."""
    return [
        {k: v for k, v in line.items() if k not in ("time", *SPEED_METRICS)}
        for line in metrics(run)
        if "loss" in line or line["step"] < step
    ]


# Starts ----------------------------------------------------------------------------------------


def starts(start: StartCommand, folder: Path, number: int, limit_s: float, tick: Tick) -> Any:
    count, first_step, whole = Count(starts=0, hangs=0, left=0), [], []
    for nth in range(number):
        run = folder / "runs" / f"start-{nth}"
        try:
            with start([*TRAIN, *QUICK, f"run.name={run.name}"], folder) as running:
                first_step.append(
                    wait_for(lambda r=run: min(steps_seen(r, PROCS)) > 0, running, limit_s)  # type: ignore[misc]
                )
                done = running.wait(limit_s)
        except (Hang, AssertionError) as error:
            count["hangs"] += 1
            print(error, file=sys.stderr)
            continue
        finally:
            count["starts"] += 1
            tick()
        count["left"] += len(done.left)
        count["wrong exits"] += done.code != 0
        whole.append(done.seconds)
        shutil.rmtree(run)
    return {
        "bad": _bad(count, "starts"),
        "count": dict(count),
        "seconds_to_first_step": _spread(first_step),
        "seconds_to_the_end": _spread(whole),
    }


# -----------------------------------------------------------------------------------------------


def _bad(count: Count, *harmless: str) -> int:
    return sum(n for name, n in count.items() if name not in harmless)


def _spread(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"number": 0}
    ordered = sorted(seconds)
    named = {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }
    rounded = {name: round(value, 3) for name, value in named.items()}
    return {"number": len(seconds), **rounded, "values": [round(s, 3) for s in seconds]}


@contextmanager
def _bar(progress: Progress, what: str, total: int) -> Iterator[Tick]:
    task = progress.add_task(what, total=total)
    yield lambda: progress.advance(task)


def campaign(start: StartCommand, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    result: dict[str, Any] = {}
    with Progress() as progress:
        with _bar(progress, "restarts", options.restarts) as tick:
            limits = options.limit_s, options.late_s
            result["restarts"] = restarts(start, folder, options.restarts, *limits, rng, tick)
        with _bar(progress, "starts", options.starts) as tick:
            result["starts"] = starts(start, folder, options.starts, options.limit_s, tick)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="restarts and starts in a row, without a hang")
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=30.0, help="what takes longer hangs")
    parser.add_argument("--late-s", type=float, default=5.0, help="a new step comes sooner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-restarts-"))
    try:
        result = campaign(started, folder, options)
    finally:
        shutil.rmtree(folder)
    for part, found in result.items():
        print(f"{part:10} " + ", ".join(f"{name} {n}" for name, n in found["count"].items()))
        for name, spread in found.items():
            if name.startswith("seconds"):
                print(f"{'':10} {name}: " + _line(spread))
    if options.json:
        report.write(options.json, result)
    return 1 if any(found["bad"] for found in result.values()) else 0


def _line(spread: dict[str, Any]) -> str:
    return ", ".join(f"{name} {n}" for name, n in spread.items() if name != "values")


if __name__ == "__main__":
    sys.exit(main())
