"""Snapshots of a state of 16 GB on one NVIDIA GPU: for how long they hold the training up.

    PYTHONPATH=src:carried python3 benchmarks/gpu_snapshots.py [--device cpu] [--quick]

The state is that of a transformer of 1.3 billion parameters with AdamW in float32. A step is a
chain of matrix products of about a quarter of a second, in the place of a forward and backward
pass, and AdamW's update of everything. A snapshot holds the training up from the call until the
stream of the training is free again. The steps after it are timed until it is on the disk, beside
steps before. What is on the disk is compared with the state at the step. Under two minutes, and 32
GB of disk for a moment.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import Result, make_figure
from echelon.recipes.transformer import Transformer
from echelon.snapshot.reader import load_weights
from echelon.snapshot.writer import SnapshotWriter
from transformer import SIZES, wait

SAVES, STEPS = 3, 20
STEP_S = 0.25
HELD_UP_S = 0.1
SIDE = 8192


def measure(device: str = "cuda", quick: bool = False) -> Result:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    size = "tiny" if quick else "1.3b"
    torch.manual_seed(0)
    with torch.device(place):
        model = Transformer(**SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
    step = make_step(optimizer, place, 64 if quick else SIDE, 0.01 if quick else STEP_S)
    step()
    wait(place)
    plain_s = [time_s(step, place) for _ in range(STEPS)]
    blocked_s: list[float] = []
    beside_s: list[float] = []
    written_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        writer = SnapshotWriter(Path(folder), keep_last=1)
        for number in range(1, (2 if quick else SAVES) + 1):
            wanted = {
                name: p.detach().cpu().clone() for name, p in list(model.named_parameters())[:3]
            }
            state = {
                "model": model.state_dict(),
                "optimizer": {"optimizer": optimizer.state_dict()},
            }
            blocked_s.append(time_s(partial(writer.save, number, state, {"step": number}), place))
            results: list[Any] = []
            while not (results := writer.take_results()):
                beside_s.append(time_s(step, place))
            assert results[0].error is None, results[0].error
            written_s.append(results[0].duration_s)
            found = load_weights(results[0].folder)
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), number
            del found
        writer.close()
    median_s = sorted(plain_s)[len(plain_s) // 2]
    saved = [t for tree in (state["model"], optimizer.state) for t in list_tensors(tree)]
    return {
        "config": {
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "state_bytes": sum(tensor.nbytes for tensor in saved),
            "saves": len(blocked_s),
        },
        "figures": [
            make_figure("training held up by the first snapshot", blocked_s[:1], HELD_UP_S, "s"),
            make_figure("… by each further one", blocked_s[1:], HELD_UP_S, "s"),
            make_figure(
                "a step while one is written, × without", [s / median_s for s in beside_s], 1.05
            ),
            make_figure("until it is on disk, in the background", written_s, unit="s"),
        ],
    }


def make_step(
    optimizer: torch.optim.Optimizer, device: torch.device, side: int, step_s: float
) -> Callable[[], None]:
    """Return a step that takes about so long."""
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    multiply(3)
    count = max(1, round(step_s / (time_s(partial(multiply, 10), device) / 10)))

    def step() -> None:
        multiply(count)
        optimizer.step()

    return step


def time_s(call: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes, until the stream of the training is free again."""
    begun_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begun_s


def list_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for value in tree.values() for t in list_tensors(value)]


def main() -> None:
    parser = argparse.ArgumentParser(description="snapshots of a large state on a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    given = parser.parse_args()
    result = measure(given.device, given.quick)
    print(json.dumps(result["config"], indent=1))
    for row in result["figures"]:
        print(f"{row['what']:<64}{row['median']:>9} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
