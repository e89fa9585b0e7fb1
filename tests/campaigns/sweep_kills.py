"""Kill workers of a sweep, their trials, and the sweep itself, at random moments; then count.

    python tests/campaigns/sweep_kills.py --trials 50 --kills 40 --json OUT

A random search whose trials are pure functions of their numbers is run twice: undisturbed, and
with `kill -9` of a random worker, a trial's process, or the command itself, which is then typed
again. The second must have as many results, none twice, none lost, and the same ones to the last
bit. Whatever is counted under ``bad`` makes the exit code 1; so does a process that is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import report
from command_runner import ECHELON, RunningCommand, started, until

from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_store import TrialStore

FILE = """\
method: random
metric: {name: eval/loss, goal: minimize}
run_cap: %d
parameters:
  lr: {distribution: log_uniform_values, min: 1e-4, max: 1e-2}
  seed: {min: 0, max: 1000}
  samples: {value: 4096}
  eval_samples: {value: 256}
  trainer: {parameters: {epochs: {value: %d}, batch_size: {value: 16}}}
"""
END_S = 1800.0
_SET_STATE = 6
"""Of Optuna's journal: a trial's state was set."""


def children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry))
    return found


def victim(command: int, rng: random.Random) -> tuple[str, int] | None:
    """The command now and then; else a worker, or what a worker's zygote has forked."""
    if rng.random() < 0.15:
        return "command", command
    workers = children(command)
    if not workers:
        return None
    worker = rng.choice(workers)
    trials = [pid for zygote in children(worker) for pid in children(zygote)]
    if trials and rng.random() < 0.25:
        return "trial", rng.choice(trials)
    return "worker", worker


def disturbed(
    words: list[str], folder: Path, kills: int, pause_s: float, rng: random.Random
) -> tuple[Counter[str], str]:
    """Until the sweep is over; how often what was killed, and what the last command said."""
    count: Counter[str] = Counter()
    deadline = time.monotonic() + END_S
    while True:
        with started(words, folder) as running:
            first = folder / "runs" / f"{words[-1]}-0" / "metrics.jsonl"
            _kill_in(running, first, kills, pause_s, rng, count, deadline)
            done = running.wait(max(1.0, deadline - time.monotonic()))
        count["left"] += len(done.left)
        if done.code != -signal.SIGKILL:
            count["wrong exits"] += done.code != 0
            return count, done.err


def _kill_in(
    running: RunningCommand,
    first: Path,
    kills: int,
    pause_s: float,
    rng: random.Random,
    count: Counter[str],
    deadline: float,
) -> None:
    while running.process.poll() is None and time.monotonic() < deadline:
        if sum(count[what] for what in ("command", "worker", "trial")) >= kills:
            return
        if count:
            time.sleep(rng.uniform(0.2, 1.0) * pause_s)
        else:  # the first one comes for sure, however quick this machine is
            until(lambda: first.exists() or running.process.poll() is not None, END_S, "a trial")
        if found := victim(running.process.pid, rng):
            what, pid = found
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            count[what] += 1
            if what == "command":
                return


def verdict(folder: Path, trials: int, count: Counter[str]) -> dict[str, Any]:
    calm, rough = (
        TrialStore(SweepFolder(folder / "runs" / name)).summarize_trials()
        for name in ("calm", "rough")
    )
    journal = (folder / "runs" / "rough" / "journal.log").read_text().splitlines()
    lines = [json.loads(line) for line in journal]
    ends = Counter(
        line["trial_id"] for line in lines if line["op_code"] == _SET_STATE and line["state"] > 0
    )
    bad = {
        "lost": trials - sum(result.state == "finished" for result in rough),
        "too many": max(0, len(rough) - trials),
        "twice": sum(n > 1 for n in ends.values()),
        "differing": sum(a[3:] != b[3:] for a, b in zip(calm, rough, strict=False)),
        "left": count["left"],
        "wrong exits": count["wrong exits"],
    }
    killed = {what: count[what] for what in ("worker", "trial", "command")}
    return {"bad": bad, "killed": killed, "results": len(rough)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=4, help="of a trial")
    parser.add_argument("--pause-s", type=float, default=12.0, help="the longest between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sweep-kills-"))
    file = folder / "sweep.yml"
    file.write_text(FILE % (given.trials, given.epochs))
    words = [*ECHELON, "sweep", str(file), "--parallel", "2", "launch.threads=1", "--name"]
    begun = time.monotonic()
    with started([*words, "calm"], folder) as running:
        assert running.wait(END_S).code == 0, running.read_output()
    calm_s = time.monotonic() - begun
    rng = random.Random(given.seed)
    pause_s = min(given.pause_s, calm_s / 2)  # so that a quick machine is disturbed as well
    count, said = disturbed([*words, "rough"], folder, given.kills, pause_s, rng)
    result = verdict(folder, given.trials, count)
    result |= {"calm_s": round(calm_s, 1), "rough_s": round(time.monotonic() - begun - calm_s, 1)}
    print(json.dumps(result, indent=1))
    if given.json:
        report.write(given.json, result)
    if any(result["bad"].values()):
        print(f"{said[-3000:]}\nsee {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
