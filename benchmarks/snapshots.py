"""How long snapshots hold a training up, as ratios to ``torch.save`` and ``torch.load``.

A state of 600 MB (200 MB of model, Adam's two moments). Each side is run in turn, so that a busy
machine slows both; the figure is the median of the pairs' ratios. Reading is measured in a fresh
process each time, since a restart is one; in a warm process ``torch.load`` finds its memory
already mapped, which is given too.

    python benchmarks/snapshots.py [--rounds 7] [--megabytes 600] [--folder DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echelon.snapshot.reader import find_newest
from echelon.snapshot.writer import SaveResult, SnapshotWriter

State = dict[str, Any]


def measure(rounds: int = 7, megabytes: int = 600, folder: Path | None = None) -> dict[str, Any]:
    """All figures; what it writes (three times the state) is removed again."""
    root = Path(tempfile.mkdtemp(prefix="echelon-bench-", dir=folder))
    config = {
        "megabytes": megabytes,
        "rounds": rounds,
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
    }
    try:
        written = run_in_child(lambda: measure_writing(root, rounds, megabytes))
        return {"config": config, **written, **measure_reading(root, rounds)}
    finally:
        shutil.rmtree(root)


def measure_writing(root: Path, rounds: int, megabytes: int, device: str = "cpu") -> dict[str, Any]:
    state = adam_state(megabytes, device)
    writer = SnapshotWriter(root / "ours", keep_last=1)
    first = time_call(lambda: writer.save(1, state, {}))
    writer.wait()
    plain, blocked, written, stalls = [], [], [], []
    for step in range(2, rounds + 2):
        plain.append(time_call(lambda: torch.save(state, root / "plain.pt")))
        blocked.append(time_call(partial(writer.save, step, state, {})))
        saved, stall = while_watching(writer.wait)
        assert saved[0].error is None, saved[0].error
        written.append(saved[0].duration_s)
        stalls.append(stall)
    writer.close()
    return {
        "torch.save_s": spread(plain),
        "first_save_blocks_s": first,
        "save_blocks_s": spread(blocked),
        "save_blocks / torch.save": ratio(blocked, plain),
        "until_on_disk_s": spread(written),
        "until_on_disk / torch.save (which flushes nothing)": ratio(written, plain),
        "longest_stall_of_another_thread_ms": spread([1000 * stall for stall in stalls]),
    }


def measure_reading(root: Path, rounds: int) -> dict[str, Any]:
    theirs, ours = lambda: read_plain(root), lambda: read_snapshot(root)
    pairs = [
        (run_in_child(lambda: time_call(theirs)), run_in_child(lambda: time_call(ours)))
        for _ in range(rounds)
    ]
    plain, snapshot = zip(*pairs, strict=True)

    def warm() -> list[tuple[float, float]]:
        return [(time_call(theirs), time_call(ours)) for _ in range(rounds + 1)][1:]

    warm_plain, warm_snapshot = zip(*run_in_child(warm), strict=True)
    return {
        "torch.load_s": spread(plain),
        "verify_and_load_s": spread(snapshot),
        "verify_and_load / torch.load": ratio(snapshot, plain),
        "warm torch.load_s": spread(warm_plain),
        "warm verify_and_load / torch.load": ratio(warm_snapshot, warm_plain),
    }


def read_plain(root: Path) -> float:
    return touch(torch.load(root / "plain.pt", weights_only=True))


def read_snapshot(root: Path) -> float:
    snapshot, damaged = find_newest(root / "ours")
    assert snapshot is not None
    assert not damaged
    return touch({part: snapshot.load_part(part) for part in snapshot.parts})


def touch(tree: Any) -> float:
    """Read every byte of every tensor, as cheaply as can be: the reading is what is measured.
    In one thread, since OpenMP's threads wait for each other on a machine with other work."""
    torch.set_num_threads(1)
    if isinstance(tree, torch.Tensor):
        words = tree.view(torch.int64) if tree.nbytes % 8 == 0 else tree
        return float(words.sum())
    return sum(touch(value) for value in tree.values()) if isinstance(tree, dict) else 0.0


def adam_state(megabytes: int, device: str = "cpu") -> State:
    """Twenty equal parameters and the two moments of each."""
    size = megabytes * 1_000_000 // (4 * 3 * 20)
    randn, rand = (partial(make, size, device=device) for make in (torch.randn, torch.rand))
    model = {f"layer{i}.weight": randn() for i in range(20)}
    moments = {
        i: {"step": torch.ones(()), "exp_avg": randn(), "exp_avg_sq": rand()} for i in range(20)
    }
    return {"model": model, "optimizer": {"state": moments}}


def while_watching(work: Callable[[], list[SaveResult]]) -> tuple[list[SaveResult], float]:
    """What the work gives, and the longest another thread was kept from running meanwhile."""
    results: list[list[SaveResult]] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while not results:
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return results[0], longest


def time_call(work: Callable[[], Any]) -> float:
    os.sync()  # the other side's writes must not be paid for here
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run_in_child(work: Callable[[], Any]) -> Any:
    """Run in a fork of this process, which itself never allocates or starts a thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def ratio(ours: Any, theirs: Any) -> dict[str, Any]:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def spread(values: Any) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {
        "median": round(statistics.median(values), 4),
        "min": round(low, 4),
        "max": round(high, 4),
        "values": [round(value, 4) for value in values],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="time snapshots against torch.save and load")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--folder", type=Path, help="the file system to measure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.rounds, options.megabytes, options.folder)
    for name, value in figures.items():
        print(f"{name:52} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
