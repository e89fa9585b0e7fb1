"""Kill a laptop while it submits by a login node, again and again, and count what became of it.

    python tests/campaigns/login_kills.py --kills 100 --json OUT

Each submission is killed (SIGKILL to the command and its ssh) after a random time, from before the
connection until after the answer, and the same command is typed again. Then Slurm must have one job
of the run, the laptop a copy of it that knows the job's number, and no note may be left. Jobs are
held, so that none of them runs. Any count but `once` makes the exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import report
import slurm_cluster
from laptop import Laptop, open_laptop
from slurm_cluster import ClusterSlot

from echelon.runs.origin import NOTES_FOLDER


def submit_and_kill(laptop: Laptop, name: str, after_s: float) -> tuple[str, str]:
    """Kill one submission and type it again; returns what became of it, and when it was killed."""
    words = ("train", *laptop.words[:-1], "launch.sbatch=['--hold']", f"run.name={name}")
    running = laptop.start(*words)
    time.sleep(after_s)
    phase = "after" if running.process.poll() is not None else "during"
    laptop.kill(running)
    if laptop.queue(name):
        phase += ", queued"
    again = laptop.type(*words)
    jobs = laptop.queue(name)
    if len(jobs) != 1:
        return f"{len(jobs)} jobs: {again.output[-300:]}", phase
    if laptop.run(name).read_job_id() != jobs[0]:
        return "the copy does not know its job", phase
    if (laptop.folder / "runs" / NOTES_FOLDER).exists():
        return "a note is left", phase
    laptop.cluster.slurm("scancel", *jobs)
    return "once", phase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    slot = ClusterSlot()  # kept: it is free again for others as soon as nobody refers to it
    kind = slot.make_kind(accounting=False)
    was_up = slurm_cluster.is_up(kind)
    cluster = slurm_cluster.start(kind)
    outcomes: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    try:
        with tempfile.TemporaryDirectory() as folder, open_laptop(cluster, Path(folder)) as laptop:
            began = time.monotonic()
            submit_and_kill(laptop, "first", 0.0)
            whole_s = time.monotonic() - began
            for number in range(given.kills):
                after_s = chance.uniform(0.0, 0.7 * whole_s)  # of two commands, the first
                outcome, phase = submit_and_kill(laptop, f"k{number}", after_s)
                outcomes[outcome] += 1
                phases[phase] += 1
                print(f"{number + 1}: killed {phase} after {after_s:.2f} s: {outcome}", flush=True)
                laptop.started.clear()
    finally:
        if not was_up:
            slurm_cluster.require(slurm_cluster.manage(kind, "down"))
    result = {"kills": given.kills, "outcomes": dict(outcomes), "killed": dict(phases)}
    if given.json:
        report.write(given.json, result)
    print(result)
    sys.exit(set(outcomes) != {"once"})


if __name__ == "__main__":
    main()
