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

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
EXPERIMENT = HELPERS / "faulty_experiment.py"
_TOLERANCE = 1e-4
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
        clean = _train(Path(folder) / "clean", args.procs, epochs)
        if clean.wait() != 0:
            sys.exit("the undisturbed run failed")
        disturbed = _train(Path(folder) / "disturbed", args.procs, epochs)
        metrics = Path(folder) / "disturbed" / "runs" / "r" / "metrics.jsonl"
        while disturbed.poll() is None and not metrics.exists():
            time.sleep(0.05)  # a rank that is lost before the first step is not replaced
        killed = _kill_ranks(disturbed, metrics, args, random.Random(args.seed))
        code = disturbed.wait()
        result = _compare(Path(folder), code) | {"kills": killed, "procs": args.procs}
    print(json.dumps(result, indent=2).replace("\\n", "\n"))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
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
        workers = _list_workers(run.pid)
        if len(workers) > 1:
            os.kill(chance.choice(workers), signal.SIGKILL)
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
            for worker in _list_workers(run.pid):
                os.kill(worker, signal.SIGQUIT)
            time.sleep(2)
            for file in sorted(metrics.parent.glob("logs/*.stack")):
                print(f"{file.name}\n{file.read_text()}")
            run.kill()
            sys.exit(f"the run stands still:\n{output.read_text()[-2000:]}")
        time.sleep(0.1)


def _list_workers(agent: int) -> list[int]:
    return [worker for fork_server in _children(agent) for worker in _children(fork_server)]


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _compare(folder: Path, code: int) -> dict[str, Any]:
    clean, disturbed = (_read(folder / name) for name in ("clean", "disturbed"))
    differences = [
        f"{key}: {disturbed.get(key)} beside {clean.get(key)}"
        for key in sorted(clean.keys() | disturbed.keys())
        if not _is_close(clean.get(key), disturbed.get(key))
    ]
    if code:
        differences.insert(0, (folder / "disturbed" / "output").read_text()[-6000:])
    return {"exit": code, "lines": len(clean), "bad": len(differences), "first": differences[:5]}


def _read(folder: Path) -> dict[str, float]:
    """Return every number of the metrics by its step and name; one that stands twice is bad."""
    numbers: dict[str, float] = {}
    for text in (folder / "runs" / "r" / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name in ("loss", "eval_loss"):
            if name in line:
                key = f"{name} at {line['step']:06d}"
                numbers[key] = float("nan") if key in numbers else line[name]
    return numbers


def _is_close(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a - b) <= _TOLERANCE * max(1e-3, abs(a))


if __name__ == "__main__":
    main()
