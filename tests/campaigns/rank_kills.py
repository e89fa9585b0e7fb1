"""Kills ranks of one run again and again, and compares its curve with that of a run in peace.

Every kill hits a random rank at a random instant; the run must end well, with every step and every
evaluation once, the numbers of the undisturbed run, and no process left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from command_runner import workers
from curve_comparison import compare_curves

EXPERIMENT = report.ROOT / "tests" / "helpers" / "faulty_experiment.py"
_STANDSTILL_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--procs", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean time between kills")
    parser.add_argument("--epochs", type=int, default=0, help="default: enough for the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    epochs = args.epochs or max(20, int(args.kills * args.pause_s * 6))
    with tempfile.TemporaryDirectory() as folder:
        clean_folder, disturbed_folder = Path(folder) / "clean", Path(folder) / "disturbed"
        clean = _train(clean_folder, args.procs, epochs)
        if clean.wait() != 0:
            sys.exit("the undisturbed run failed")
        disturbed = _train(disturbed_folder, args.procs, epochs)
        metrics = disturbed_folder / "runs" / "r" / "metrics.jsonl"
        while disturbed.poll() is None and not metrics.exists():
            time.sleep(0.05)  # a rank that is lost before the first step is not replaced
        killed = _kill_ranks(disturbed, metrics, args, random.Random(args.seed))
        code = disturbed.wait()
        compared = compare_curves(clean_folder, disturbed_folder, code)
    result = compared | {"kills": killed, "procs": args.procs}
    print(json.dumps(result, indent=2).replace("\\n", "\n"))
    if args.json:
        report.write(args.json, result)
    sys.exit(0 if result["bad"] == 0 else 1)


def _train(folder: Path, procs: int, epochs: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    words = ["-m", "echelon", "train", f"experiment={EXPERIMENT}:experiment", "launch=local"]
    words += [f"launch.procs={procs}", "run.name=r", "trainer.batch_size=8", "trainer.log_steps=1"]
    words += [f"trainer.epochs={epochs}", "pause_s=0.01", "track.progress=none"]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen([sys.executable, *words], cwd=folder, stdout=output, stderr=output)


def _kill_ranks(
    run: subprocess.Popen[bytes], metrics: Path, args: Any, chance: random.Random
) -> int:
    """Kill ranks at random instants. At most one less than there are is killed before all are there
    again: somebody must keep the state."""
    killed = killed_since = 0
    while killed < args.kills and run.poll() is None:
        time.sleep(chance.expovariate(1 / args.pause_s))
        if killed_since == args.procs - 1:
            _wait_for_all(run, metrics, args.procs)
            killed_since = 0
        living = workers(run.pid)
        if len(living) > 1:
            os.kill(chance.choice(living), signal.SIGKILL)
            killed, killed_since = killed + 1, killed_since + 1
    while run.poll() is None:
        _wait_for_all(run, metrics, 0)
    return killed


def _wait_for_all(run: subprocess.Popen[bytes], metrics: Path, procs: int) -> None:
    """Wait until all ranks are there and new lines are written; the run must not stand still."""
    output = metrics.parents[2] / "output"
    lines, deadline = None, time.monotonic() + _STANDSTILL_S
    while run.poll() is None:
        reasons = [t for t in output.read_text().splitlines() if "process" in t]
        is_whole = not procs or (bool(reasons) and reasons[-1].endswith(f": {procs} processes"))
        now = len(metrics.read_bytes().splitlines())
        lines = (now if lines is None else lines) if is_whole else None
        if lines is not None and now > lines + 8:  # by then all have the state
            return
        if time.monotonic() > deadline:
            for worker in workers(run.pid):
                os.kill(worker, signal.SIGQUIT)
            time.sleep(2)
            for file in sorted(metrics.parent.glob("logs/*.stack")):
                print(f"{file.name}\n{file.read_text()}")
            run.kill()
            sys.exit(f"the run stands still:\n{output.read_text()[-2000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
