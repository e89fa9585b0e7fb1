"""What it costs to start an epoch, and to draw it, beside torch's DistributedSampler.

    python benchmarks/order.py

Two questions. How long and how much memory until a rank holds the first batch of an epoch, as the
data set grows? And what does each sample cost after that? Contestants take turns within every
repetition, so that a slow moment of the machine falls on all; medians are given with the least and
the most seen. Memory is the growth of the resident set's peak in a fresh process that has drawn a
tiny epoch before, so that loading code is not counted. One thread, as in a data worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from echelon.data.sample_order import EpochOrder

WORLD = 8
BATCH = 256
OUR_SIZES = [10**5, 10**9, 2**30 + 1, 10**12]
"""One above a power of two is the worst case: half of the values are drawn again, repeatedly."""
SAMPLER_SIZES = [10**5, 10**6, 10**7, 5 * 10**7]
DRAW_SIZES = [10**6, 2**20 + 1]
REPEATS = 7
SLOW_REPEATS = 3
"""For the sampler from ten million samples on, where one start takes seconds."""

Timings = dict[str, Any]


# --- the contestants ----------------------------------------------------------------------------


def sampler(size: int, world: int, epoch: int) -> DistributedSampler[int]:
    made: DistributedSampler[int] = DistributedSampler(
        range(size),  # type: ignore[arg-type]  # anything with a length will do
        num_replicas=world,
        rank=0,
        shuffle=True,
    )
    made.set_epoch(epoch)
    return made


def start_sampler(size: int, epoch: int) -> object:
    return next(iter(BatchSampler(sampler(size, WORLD, epoch), BATCH // WORLD, drop_last=False)))


def start_ours(size: int, epoch: int) -> object:
    indices, counts = next(EpochOrder(size, BATCH, 0, WORLD, seed=0, epoch=epoch).iter_blocks())
    return indices[: counts[0]].tolist()


STARTS: dict[str, Callable[[int, int], object]] = {
    "echelon": start_ours,
    "DistributedSampler": start_sampler,
}


def draw_sampler(size: int, batch: int, world: int, epoch: int) -> int:
    drawn = 0
    for _ in sampler(size, world, epoch):
        drawn += 1
    return drawn


def draw_ours(size: int, batch: int, world: int, epoch: int) -> int:
    drawn = 0
    for indices, _ in EpochOrder(size, batch, 0, world, 0, epoch).iter_blocks():
        for _ in indices.tolist():
            drawn += 1
    return drawn


def draw_sampler_batches(size: int, batch: int, world: int, epoch: int) -> int:
    lists = BatchSampler(sampler(size, world, epoch), batch // world, drop_last=False)
    return sum(len(indices) for indices in lists)


def draw_our_batches(size: int, batch: int, world: int, epoch: int) -> int:
    drawn = 0
    for indices, counts in EpochOrder(size, batch, 0, world, 0, epoch).iter_blocks():
        numbers = indices.tolist()
        for start, stop in pairwise(accumulate(counts, initial=0)):
            drawn += len(numbers[start:stop])
    return drawn


def draw_our_tensors(size: int, batch: int, world: int, epoch: int) -> int:
    blocks = EpochOrder(size, batch, 0, world, 0, epoch).iter_blocks()
    return sum(indices.numel() for indices, _ in blocks)


DRAWS: dict[str, Callable[[int, int, int, int], int]] = {
    "DistributedSampler, ints": draw_sampler,
    "echelon, ints": draw_ours,
    "DistributedSampler, lists": draw_sampler_batches,
    "echelon, lists": draw_our_batches,
    "echelon, tensors": draw_our_tensors,
}


# --- measuring ----------------------------------------------------------------------------------


def summary(values: list[float]) -> Timings:
    least, most = min(values), max(values)
    return {"median": median(values), "least": least, "most": most, "values": values}


def measure_starts() -> list[dict[str, Any]]:
    entries = [("echelon", s) for s in OUR_SIZES] + [
        ("DistributedSampler", s) for s in SAMPLER_SIZES
    ]
    seconds: dict[tuple[str, int], list[float]] = {entry: [] for entry in entries}
    for repeat in range(REPEATS + 1):  # the first turn warms up and is dropped
        # Whoever follows the sampler's gigabytes finds cold caches: it is another one each time.
        turn = repeat % len(entries)
        for name, size in entries[turn:] + entries[:turn]:
            slow = name == "DistributedSampler" and size >= 10**7
            if slow and not 0 < repeat <= SLOW_REPEATS:
                continue
            begin = time.perf_counter()
            STARTS[name](size, repeat)
            if repeat:
                seconds[name, size].append(time.perf_counter() - begin)
    return [
        {
            "name": name,
            "size": size,
            "seconds": summary(taken),
            "megabytes": peak_growth_in_child(name, size),
        }
        for (name, size), taken in seconds.items()
    ]


def measure_draws() -> list[dict[str, Any]]:
    results = []
    for size in DRAW_SIZES:
        for world, batch in [(1, 32), (1, 1024), (WORLD, 32), (WORLD, 1024)]:
            nanoseconds: dict[str, list[float]] = {name: [] for name in DRAWS}
            for repeat in range(REPEATS):
                for name, draw in DRAWS.items():
                    begin = time.perf_counter()
                    drawn = draw(size, batch, world, repeat)
                    nanoseconds[name].append((time.perf_counter() - begin) / drawn * 1e9)
            results += [
                {"name": n, "size": size, "world": world, "batch": batch, "ns": summary(taken)}
                for n, taken in nanoseconds.items()
            ]
    return results


def peak_growth_in_child(name: str, size: int) -> float | None:
    """Megabytes; none where the system has no /proc to tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--memory", name, str(size)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(child.stdout)


def peak_growth(name: str, size: int) -> float:
    torch.set_num_threads(1)
    STARTS[name](1000, 0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    STARTS[name](size, 1)
    return (resident("VmHWM") - before) / 1e6


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure() -> dict[str, Any]:
    """Everything, ready for JSON. Takes about a minute, and 5 GB for the sampler's lists."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "start": measure_starts(),
            "draw": measure_draws(),
        }
    finally:
        torch.set_num_threads(threads)


# --- showing ------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    print(f"First batch of an epoch, rank 0 of {WORLD}, global batch {BATCH}\n")
    print(f"{'':<20}{'samples':>16}{'ms':>12}{'least to most':>22}{'MB':>10}")
    for row in result["start"]:
        ms = {key: row["seconds"][key] * 1e3 for key in ("median", "least", "most")}
        spread = f"{ms['least']:.2f} to {ms['most']:.2f}"
        megabytes = "-" if row["megabytes"] is None else f"{row['megabytes']:.1f}"
        line = f"{row['name']:<20}{row['size']:>16,}{ms['median']:>12.2f}{spread:>22}"
        print(f"{line}{megabytes:>10}")
    print("\nThe whole share of one rank, nanoseconds per sample\n")
    print(f"{'':<28}{'samples':>12}{'ranks':>7}{'batch':>7}{'ns':>8}{'least to most':>18}")
    for row in result["draw"]:
        ns = row["ns"]
        spread = f"{ns['least']:.1f} to {ns['most']:.1f}"
        where = f"{row['size']:>12,}{row['world']:>7}{row['batch']:>7}"
        print(f"{row['name']:<28}{where}{ns['median']:>8.1f}{spread:>18}")


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print(peak_growth(sys.argv[2], int(sys.argv[3])))
        return
    result = measure()
    if sys.argv[1:] == ["--json"]:
        json.dump(result, sys.stdout, indent=2)
    else:
        show(result)


if __name__ == "__main__":
    main()
