"""A recommender with the tables of ML-25M on one NVIDIA GPU: what a step costs.

    PYTHONPATH=src:carried python3 benchmarks/gpu_recommender.py [--device cpu] [--quick]

Embeddings of 162,541 users and 59,047 items, 64 wide, a tower 128 → 128 → 1, Adam, 20 M made-up
ratings, batches of 1,024 and 16,384. Everybody in turns, each in a process of its own; a figure is
the time of a step after the first ones.

- Echelon: `echelon train` on this file, as a person types it; metrics are written every 100 steps.
  Its tables have sparse gradients and RowAdam; "dense" has dense ones and torch's Adam, as the
  others have. The step is captured as a CUDA graph, by default. "compiled, tf32" is the first with
  trainer.compile=true trainer.precision=tf32.
- DataLoader loop: the tutorial's loop over a per-sample Dataset, 8 workers, pinned memory.
- loop, data on the GPU: the same over a permutation of columns that lie on the GPU.

The floor is the time the chip needs to move the bytes that any such step must move: the rows of the
batch that differ, with both averages, read and written once, their gradients written and read once,
the ratings, and the tower's activations and weights; at 4.8 TB/s for an H200.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, Result, compute_ratios, environment, make_figure, measure_in_turns
from echelon.runs.metrics_file import read_metrics

HERE = Path(__file__).resolve()
BATCHES = (1024, 16384)
AT_MOST_US = {1024: 150.0, 16384: 250.0}
LOADER_AT_MOST = {1024: 1 / 25, 16384: 1 / 100}
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
ROUNDS, STEPS, LOADER_STEPS = 3, 6000, 40
OURS, OURS_FAST, OURS_DENSE = "Echelon", "Echelon, compiled, tf32", "Echelon, dense"
LOADER, ON_GPU = "DataLoader loop, 8 workers", "loop, data on the GPU"
WORDS = {
    OURS: ["sparse=true"],
    OURS_FAST: ["sparse=true", "trainer.compile=true", "trainer.precision=tf32"],
    OURS_DENSE: ["sparse=false"],
}


def measure(device: str = "cuda", quick: bool = False) -> Result:
    rounds, steps, size = (1, 300, "100k") if quick else (ROUNDS, STEPS, "20M")
    rows: list[Figure] = []
    micro: dict[str, Any] = {}
    name = ""
    for batch in BATCHES[:1] if quick else BATCHES:
        ways = {name: partial(ours_s, batch, size, steps, device, WORDS[name]) for name in WORDS}
        contestants = ways | {
            ON_GPU: partial(child_s, "on_gpu", batch, size, steps // 10, device),
            LOADER: partial(child_s, "loaded", batch, size, LOADER_STEPS, device),
        }
        seconds = measure_in_turns(contestants, rounds, warm_up=0)
        floor, name = floor_of(batch, size, device)
        micro[f"batch {batch:,}"] = {
            n: make_figure(n, [1e6 * s for s in v], unit="µs") for n, v in seconds.items()
        } | {"floor": 1e6 * floor}
        rows += figures(batch, seconds, floor)
    config = {
        "device": name,
        "command": " ".join(["echelon", *command(BATCHES[0], size, steps, WORDS[OURS])]),
        "rounds": rounds,
        "steps": {OURS: steps, ON_GPU: steps // 10, LOADER: LOADER_STEPS},
        "ratings": size,
    }
    return {"config": config, "figures": rows, "microseconds_per_step": micro}


def figures(batch: int, seconds: dict[str, list[float]], floor: float) -> list[Figure]:
    rows: list[Figure] = []
    for name in WORDS:
        at, ours = f"batch {batch:,}: {name}", seconds[name]
        dense = name == OURS_DENSE
        goals = (None, None, None) if dense else (AT_MOST_US[batch], LOADER_AT_MOST[batch], 2.0)
        rows += [
            make_figure(f"{at}, µs per step", [1e6 * s for s in ours], goals[0], unit="µs"),
            make_figure(f"{at}, × {LOADER}", compute_ratios(ours, seconds[LOADER]), goals[1]),
            make_figure(f"{at}, × {ON_GPU}", compute_ratios(ours, seconds[ON_GPU])),
            make_figure(
                f"{at}, × the floor of memory traffic", [s / floor for s in ours], goals[2]
            ),
        ]
    return rows


def command(batch: int, size: str, steps: int, words: list[str]) -> list[str]:
    return [
        "train",
        f"experiment={HERE.name}:experiment",
        f"size={size}",
        *words,
        f"trainer.batch_size={batch}",
        f"trainer.steps={steps}",
        "trainer.log_steps=100",
        "trainer.save.epochs=null",
    ]


def ours_s(batch: int, size: str, steps: int, device: str, words: list[str]) -> float:
    """From the times in metrics.jsonl, of the second half."""
    words = command(batch, size, steps, words)
    words[1] = f"experiment={HERE}:experiment"
    env = environment() | ({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "echelon", *words, "run.name=a"],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        lines = read_metrics(Path(folder) / "runs" / "a" / "metrics.jsonl")
    first, last = lines[len(lines) // 2], lines[-1]
    return float((last["time"] - first["time"]) / (last["step"] - first["step"]))


def experiment(cfg: Any) -> Any:
    import torch

    import ratings
    from echelon import Experiment

    size = ratings.SIZES[cfg.size]
    users, items, stars = ratings.ratings(size)
    model, optimizer = ratings.parts("tower", size, ours=cfg.sparse)
    return Experiment(
        model, optimizer, torch.nn.functional.mse_loss, (users.long(), items.long(), stars)
    )


def child_s(way: str, batch: int, size: str, steps: int, device: str) -> float:
    code = f"import gpu_recommender as g; print(g.{way}({batch}, {size!r}, {steps}, {device!r}))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE.parent,
        env=environment(),
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return float(out.stdout.split()[-1])


def train_from_loader(batch: int, size: str, steps: int, device: str) -> float:
    import torch

    import ratings

    columns = ratings.ratings(ratings.SIZES[size])
    loader = torch.utils.data.DataLoader(
        ratings.PerSample(columns),
        batch,
        shuffle=True,
        num_workers=8,
        pin_memory=device == "cuda",
        persistent_workers=True,
    )
    batches = iter(loader)
    return _bare(lambda: next(batches), size, steps, device)


def train_from_gpu_tensors(batch: int, size: str, steps: int, device: str) -> float:
    import torch

    import ratings

    columns = [t.to(device) for t in ratings.ratings(ratings.SIZES[size])]
    order = torch.randperm(len(columns[0]), device=device)
    pieces = iter(order.split(batch))

    def following() -> list[Any]:
        rows = next(pieces)
        return [t.index_select(0, rows) for t in columns]

    return _bare(following, size, steps, device)


def _bare(following: Any, size: str, steps: int, device: str) -> float:
    import torch

    import ratings

    model, optimizer = ratings.parts("tower", ratings.SIZES[size], ours=False)
    model.to(device)
    warm = max(5, steps // 10)
    begun = 0.0
    for number in range(warm + steps):
        if number == warm:
            _wait(device)
            begun = time.perf_counter()
        users, items, stars = (t.to(device, non_blocking=True) for t in following())
        torch.nn.functional.mse_loss(model(users, items), stars).backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    return (time.perf_counter() - begun) / steps


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def floor_of(batch: int, size: str, device: str) -> tuple[float, str]:
    """Seconds for the bytes that a step must move, and the chip."""
    code = f"import gpu_recommender as g; print(g.traffic({batch}, {size!r}, {device!r}))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent, check=True, text=True, stdout=subprocess.PIPE
    )
    moved, name = out.stdout.strip().split(" ", 1)
    return float(moved) / BANDWIDTH.get(name, 4.8e12), name


def traffic(batch: int, size: str, device: str) -> str:
    import torch

    import ratings

    columns = ratings.ratings(ratings.SIZES[size])
    row = ratings.WIDTH * 4
    different = sum(len(column[:batch].unique()) for column in columns[:2])
    tables = different * row * 6 + 2 * batch * row * 3
    hidden = batch * (2 * ratings.WIDTH + ratings.HIDDEN) * 4 * 3
    weights = (2 * ratings.WIDTH * ratings.HIDDEN + 2 * ratings.HIDDEN + 1) * 4 * 9
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return f"{tables + hidden + weights + batch * 20} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description="measure a recommender on one GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    given = parser.parse_args()
    result = measure(given.device, given.quick)
    print(json.dumps(result["config"] | result["microseconds_per_step"], indent=1))
    for row in result["figures"]:
        print(f"{row['what']:<64}{row['median']:>9} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
