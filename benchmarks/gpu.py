"""On one NVIDIA GPU: toy steps, the time a save holds the loop up, drawing the order of samples.

    PYTHONPATH=src:carried python3 benchmarks/gpu.py [--device cpu] [--quick]

Steps: as in steps.py, one process, the toy on the GPU; Echelon captures its step as a CUDA graph,
as it does by default, and writes metrics every 10 steps. "bare" has its ready batches on the GPU,
and so have Ignite and Fabric; "tutorial" is the bare loop over a per-sample Dataset and a
DataLoader with no worker, and Accelerate and Lightning (everything off) are given that loader.
Peers that are not installed are left out. The save is that of snapshots.py with its 600 MB on the
GPU. Drawing is the whole share of one of 8 ranks, as tensors, on the device. Under three minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import snapshots
import steps
from common import Figure, Result, compute_ratios, make_figure, measure_in_turns
from echelon.data.sample_order import EpochOrder

ROUNDS, SAVE_ROUNDS = 7, 3
MEGABYTES = 600
SAVE_TARGET = 0.1
STEP_US = 32
STEP_TARGETS = {steps.TUTORIAL: 1 / 20, "Accelerate": 1 / 40, "Lightning, off": 1 / 40}
DRAW_SIZE, DRAW_WORLD, DRAW_BATCH = 10**7, 8, 1024


def measure(device: str = "cuda", quick: bool = False) -> Result:
    """CUDA is opened by children alone until the end: a fork of a process that has is of no use."""
    rounds, saves, megabytes = (2, 2, 30) if quick else (ROUNDS, SAVE_ROUNDS, MEGABYTES)
    step_rows, per_step = measure_steps(device, rounds, quick)
    saved = measure_saves(device, saves, megabytes)
    draw_rows, per_sample = measure_draws(device, rounds, DRAW_SIZE // (10 if quick else 1))
    config = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "command": steps.commands((1,)),
        "rounds": rounds,
        "save_rounds": saves,
        "save_megabytes": megabytes,
        "draw": {"size": DRAW_SIZE, "world": DRAW_WORLD, "batch": DRAW_BATCH},
    }
    return {
        "config": config,
        "figures": [*step_rows, *save_rows(saved), *draw_rows],
        "microseconds_per_step": per_step,
        "save": saved,
        "nanoseconds_per_sample": per_sample,
    }


def measure_steps(device: str, rounds: int, quick: bool) -> tuple[list[Figure], dict[str, Figure]]:
    seconds = steps.alternate(1, rounds, device=device, quick=True)
    rows = [
        make_figure(
            f"{name}, a step, × the bare loop, data on the device",
            compute_ratios(v, seconds["bare"]),
        )
        for name, v in seconds.items()
        if name != "bare"
    ]
    ours = [name for name in (steps.OURS, steps.OURS_BAR) if name in seconds]
    rows += [
        make_figure(
            f"{name}, a step, × {peer}", compute_ratios(seconds[name], seconds[peer]), at_most
        )
        for name in ours
        for peer, at_most in STEP_TARGETS.items()
        if peer in seconds
    ]
    rows += [
        make_figure(f"{name}, µs per step", [1e6 * s for s in seconds[name]], STEP_US, unit="µs")
        for name in ours
    ]
    per_step = {n: make_figure(n, [1e6 * s for s in v], unit="µs") for n, v in seconds.items()}
    return rows, per_step


def measure_saves(device: str, rounds: int, megabytes: int) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    try:
        saved: dict[str, Any] = snapshots.run_in_child(
            lambda: snapshots.measure_writing(root, rounds, megabytes, device)
        )
        return saved
    finally:
        shutil.rmtree(root)


def save_rows(saved: dict[str, Any]) -> list[Figure]:
    blocked = saved["save_blocks / torch.save"]["values"]
    return [
        make_figure("loop blocked by a save from the device, × torch.save", blocked, SAVE_TARGET)
    ]


def measure_draws(device: str, rounds: int, size: int) -> tuple[list[Figure], dict[str, Figure]]:
    draws = {
        "echelon": partial(draw_s, lambda: draw_ours(size, device), device),
        "torch.randperm": partial(draw_s, lambda: draw_randperm(size, device), device),
    }
    seconds = measure_in_turns(draws, rounds)
    share = size / DRAW_WORLD
    rows = [
        make_figure(
            "drawing a rank's share of an epoch, × torch.randperm, which keeps it all in memory",
            compute_ratios(seconds["echelon"], seconds["torch.randperm"]),
        )
    ]
    return rows, {
        n: make_figure(n, [s / share * 1e9 for s in v], unit="ns") for n, v in seconds.items()
    }


def draw_ours(size: int, device: str) -> int:
    blocks = EpochOrder(size, DRAW_BATCH, 0, DRAW_WORLD, 0, 0, device=device).iter_blocks()
    return sum(indices.numel() for indices, _ in blocks)


def draw_randperm(size: int, device: str) -> int:
    """What a sampler does, at its best: the permutation drawn on the device, then every eighth."""
    return torch.randperm(size, device=device)[0::DRAW_WORLD].contiguous().numel()


def draw_s(draw: Callable[[], int], device: str) -> float:
    begun = time.perf_counter()
    draw()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description="measure on one GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    given = parser.parse_args()
    result = measure(given.device, given.quick)
    print(json.dumps(result["config"], indent=1))
    rows = [*result["microseconds_per_step"].values(), *result["nanoseconds_per_sample"].values()]
    for row in [*result["figures"], *rows]:
        print(f"{row['what']:<76}{row['median']:>8} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
