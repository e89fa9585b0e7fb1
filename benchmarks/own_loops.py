"""What a session costs in a training loop of one's own, beside the bare loop and the peers.

    python benchmarks/own_loops.py [--rounds 15]

The toy of `steps.py`: Linear 20 → 1, a global batch of 32, SGD, one thread per process. This file
is started by `echelon train` (with two processes: by launch=local); its function is given a session
and advances the session's loop by some hundred iterations in each round, between the others, who
train in the same processes. The session shuffles, logs every ten steps, checks for a stop and gives
signs of life. The others do nothing but train, over batches that are ready in a list.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as a training imports it

from common import (
    Figure,
    Result,
    compute_ratios,
    environment,
    make_figure,
    measure_in_turns,
)
from steps import (
    BARE,
    BATCH,
    FEATURES,
    STEPS,
    _nothing,
    _toy,
    accelerate,
    fabric,
    optional,
    run_echelon_train,
    time_steps,
    train_bare_loop,
)

ROUNDS = 15
OURS = "session"
AT_MOST = 1.05


def measure(rounds: int = ROUNDS) -> Result:
    rows: list[Figure] = []
    microseconds: dict[str, dict[str, float]] = {}
    for procs in (1, 2):
        seconds = alternate(procs, rounds)
        base = "the bare loop" if procs == 1 else "the bare DDP loop"
        where = "one process" if procs == 1 else f"{procs} processes"
        rows += [
            make_figure(
                f"{where}: {name}, a step, × {base}",
                compute_ratios(each, seconds[BARE]),
                AT_MOST if name == OURS else None,
            )
            for name, each in seconds.items()
            if name != BARE
        ]
        micro = {
            name: make_figure(name, [1e6 * s for s in each], unit="µs")["median"]
            for name, each in seconds.items()
        }
        microseconds[f"{procs} process(es)"] = micro
    return {
        "config": {"rounds": rounds, "steps_per_round": STEPS},
        "figures": rows,
        "microseconds_per_step": microseconds,
    }


def alternate(procs: int, rounds: int) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    answer = folder / "seconds.json"
    env = environment(
        BENCH_ANSWER=str(answer),
        BENCH_ROUNDS=str(rounds),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    launch = ["launch=local", f"launch.procs={procs}", "launch.hang_s=0"] if procs > 1 else []
    words = [
        f"experiment={Path(__file__).resolve()}:train",
        *launch,
        *("launch.threads=1", "trainer.steps=1000000000", "trainer.save.epochs=null"),
        *("track.progress=none", f"run.dir={folder / 'runs'}"),
    ]
    try:
        return run_echelon_train(words, env, folder, answer)
    finally:
        shutil.rmtree(folder)


def train(session: Any) -> None:
    """Inside `echelon train`."""
    import torch

    world, steps = session.world_size, STEPS[session.world_size]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * steps, FEATURES, generator=generator)
    y = torch.randn(BATCH * steps, 1, generator=generator)
    mine = BATCH // world
    ready = list(zip(x.split(mine), y.split(mine), strict=True))[session.rank :: world]
    toy = partial(_toy, session.device)
    model, optimizer = session.prepare(*toy())
    batches = session.batches((x, y), batch_size=BATCH)
    contestants: dict[str, Callable[[], tuple[float, int]] | None] = {
        BARE: train_bare_loop(toy, ready, world, steps, _nothing),
        OURS: partial(advance, session, batches, model, optimizer, steps),
        "Fabric": optional(fabric, toy, ready, world, steps, _nothing),
        "Accelerate": optional(accelerate, toy, ready, max(steps // 4, 10), _nothing),
    }
    seconds = measure_in_turns(
        {
            name: partial(time_steps, run, session.device)
            for name, run in contestants.items()
            if run is not None
        },
        int(os.environ["BENCH_ROUNDS"]),
    )
    if session.is_main_process:
        Path(os.environ["BENCH_ANSWER"]).write_text(json.dumps(seconds))


def advance(
    session: Any, batches: Iterator[Any], model: Any, optimizer: Any, steps: int
) -> tuple[float, int]:
    """The loop, for so many iterations."""
    from torch.nn.functional import mse_loss

    begun = time.perf_counter()
    for _ in range(steps):
        x, y = next(batches)
        loss = mse_loss(model(x), y)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
    return time.perf_counter() - begun, steps


def main() -> None:
    parser = argparse.ArgumentParser(description="time a loop of one's own beside the peers")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    result = measure(parser.parse_args().rounds)
    print(json.dumps(result["microseconds_per_step"], indent=1))
    for row in result["figures"]:
        print(f"{row['what']:<70}{row['median']:>8} [{row['min']}–{row['max']}]  {row['at_most']}")


if __name__ == "__main__":
    main()
