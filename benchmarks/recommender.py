"""What training a recommender costs, beside the tutorial's loop and the peers.

    python benchmarks/recommender.py [--only 100k/dot] [--batch 1024] [--rounds 9]

Two models, both with embeddings of 64: a dot product with biases, trained by SGD with sparse
gradients; and a tower 128 → 128 → 1, trained by Adam. Two sizes: that of ml-latest-small, and 20
million made-up, skewed ratings with tables of the size of ML-25M's. Batches of 1,024, one thread;
BENCH_THREADS=2 gives two, which a busy machine makes many times slower than one. Everybody trains
in turns in the same process, on the same tensors (int32 users and items), so that a slow moment of
the machine falls on all; a ratio is of two times of one round.

Echelon is what `echelon train` runs: this file is its experiment, started by the command line, and
all that is changed is that `train` is called between the others, on the training that `echelon
train` built. Metrics, progress, the stop check and the sign of life are on; there is one snapshot
per round, which counts as its own. The optimizers are RowSGD and RowAdam, which needs sparse
gradients of the tower's tables too.

The others:
- tutorial: a per-sample Dataset, a shuffling DataLoader without workers, a hand-written loop that
  reads nothing back. The dot product has the same model and torch.optim.SGD; the tower has dense
  tables and torch.optim.Adam.
- Lightning without logger, checkpoints, bar and summary; Accelerate: the same loader and models.
- permuted: the hand-written loop over tensors that are cut by torch.randperm, the best that a
  careful user has without us; with the models of the tutorial.
The loaders are started before the clock: torch's shuffle of 20 million takes seconds per epoch.

Tried for RowAdam, and left: sorting (torch.unique or coalesce: 0.7 and 1.4 ms for 16,384 rows,
where finding them by a kept table takes 0.05 ms); both averages in one table, to gather once (no
gain, and strided rows); glibc's thresholds (no page was faulted in to begin with); one count of
steps per table with torch's fused kernel (60 µs less per table, but a rare row's first update is
three times too long). DDP's own reduction of sparse gradients takes eight times as long as ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from common import Figure, Result, compute_ratios, environment, make_figure, measure_in_turns
from steps import optional, run_echelon_train

ROUNDS = 9
BATCH = 1024
THREADS = os.environ.get("BENCH_THREADS", "1")
"""Two are faster on an idle machine, and many times slower on one where others work too."""
SETTINGS = ("100k/dot", "100k/tower", "20M/dot", "20M/tower")
OURS, TUTORIAL, PERMUTED = "Echelon", "tutorial", "permuted"
AT_LEAST = {"100k/dot": 12.0, "100k/tower": 5.0, "20M/tower": 40.0}
"""Times as fast as the tutorial's loop."""
SLOW_STEPS = {"100k/dot": 25, "100k/tower": 25, "20M/dot": 25, "20M/tower": 12}
OUR_STEPS = {"100k/dot": 394, "100k/tower": 394, "20M/dot": 2000, "20M/tower": 1500}
"""Per round. Long enough that the snapshot at the end weighs less than it does in an epoch."""

Run = Callable[[], tuple[float, int]]


# --- the side that starts `echelon train` -------------------------------------------------------


def measure(
    rounds: int = ROUNDS, settings: tuple[str, ...] = SETTINGS, batch: int = BATCH
) -> Result:
    rows: list[Figure] = []
    per_second: dict[str, dict[str, float]] = {}
    for setting in settings:
        seconds = alternate(setting, rounds, batch)
        rows += figures(setting, seconds)
        rates = {n: make_figure(n, [batch / s for s in v], unit="/s") for n, v in seconds.items()}
        per_second[setting] = {name: row["median"] for name, row in rates.items()}
    config = {
        "rounds": rounds,
        "batch": batch,
        "threads": THREADS,
        "our_steps": OUR_STEPS,
        "their_steps": SLOW_STEPS,
    }
    return {"config": config, "figures": rows, "samples_per_s": per_second}


def figures(setting: str, seconds: dict[str, list[float]]) -> list[Figure]:
    """Times of a step, so that less is better, as in every other table."""
    size, kind = setting.split("/")
    names = {"dot": "dot product, sparse SGD", "tower": "tower, Adam"}
    goal = AT_LEAST.get(setting)
    return [
        make_figure(
            f"{size} ratings, {names[kind]}: {name}, a step, × the tutorial's",
            compute_ratios(taken, seconds[TUTORIAL]),
            1.0 / goal if goal and name == OURS else None,
        )
        for name, taken in seconds.items()
        if name != TUTORIAL
    ]


def overrides(setting: str, batch: int) -> list[str]:
    size, kind = setting.split("/")
    return [
        f"size={size}",
        f"model={kind}",
        f"trainer.batch_size={batch}",
        f"trainer.steps={OUR_STEPS[setting]}",
        f"launch.threads={THREADS}",
        "track.progress=lines",
    ]


def alternate(setting: str, rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds per step of everybody in every round, from inside `echelon train`."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-bench-"))
    answer = folder / "seconds.json"
    env = environment(
        BENCH_ANSWER=str(answer),
        BENCH_ROUNDS=str(rounds),
        BENCH_SLOW_STEPS=str(SLOW_STEPS[setting]),
        OMP_NUM_THREADS=THREADS,
        CUDA_VISIBLE_DEVICES="",
        COLUMNS="100",
    )
    here = Path(__file__).resolve()
    words = [f"experiment={here}:experiment", *overrides(setting, batch), f"run.dir={folder}/runs"]
    try:
        return run_echelon_train(words, env, folder, answer)
    finally:
        shutil.rmtree(folder)


# --- the side inside `echelon train` ------------------------------------------------------------


def experiment(cfg: Any) -> Any:
    """One of the models; and instead of once, `train` is called between the others."""
    from torch.nn.functional import mse_loss

    import echelon
    from echelon.train import worker
    from ratings import SIZES, parts, ratings

    if worker.train is not take_turns:
        globals()["_train"] = worker.train
        globals()["_asked"] = cfg
        worker.train = take_turns
    size = SIZES[cfg.size]
    model, optimizer = parts(cfg.model, size, ours=True)
    return echelon.Experiment(
        model=model, optimizer=optimizer, loss=mse_loss, train_data=ratings(size)
    )


def take_turns(t: Any) -> Any:
    """In the place of echelon.train.loop.train; Echelon's own is `_train`."""
    from echelon.errors import ExitCode

    contestants = {name: partial(time_steps, run) for name, run in lineup(t).items()}
    seconds = measure_in_turns(contestants, int(os.environ["BENCH_ROUNDS"]))
    Path(os.environ["BENCH_ANSWER"]).write_text(json.dumps(seconds))
    return ExitCode.OK


def time_steps(run: Run) -> float:
    gc.collect()
    seconds, steps = run()
    return seconds / steps


def lineup(t: Any) -> dict[str, Run]:
    from ratings import SIZES, loader, parts

    asked = globals()["_asked"]
    size, few, batch = SIZES[asked.size], int(os.environ["BENCH_SLOW_STEPS"]), t.config.trainer
    columns = t.source.tensors
    make = partial(parts, asked.model, size, ours=False)
    loaded = endless(loader(columns, batch.batch_size))
    cut = endless(Permuted(columns, batch.batch_size))
    contestants: dict[str, Run | None] = {
        TUTORIAL: train_bare_loop(make, loaded, few),
        OURS: partial(train_echelon, t, t.total_steps),
        PERMUTED: train_bare_loop(make, cut, few * (1 if asked.size == "20M" else 4)),
        "Accelerate": optional(accelerate, make, loaded, few),
        "Lightning, off": optional(lightning, make, loaded, few),
    }
    return {name: run for name, run in contestants.items() if run is not None}


class Permuted:
    def __init__(self, columns: tuple[Any, ...], batch: int) -> None:
        self.columns, self.batch = columns, batch

    def __iter__(self) -> Iterator[Any]:
        import torch

        for rows in torch.randperm(len(self.columns[0])).split(self.batch):
            yield tuple(column[rows] for column in self.columns)


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


class Next:
    """The next batches of those that everybody takes from in turn; to Lightning, a loader."""

    def __init__(self, batches: Iterator[Any], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self.steps)


def train_echelon(t: Any, steps: int) -> tuple[float, int]:
    t.total_steps = t.step + steps
    begun = time.perf_counter()
    globals()["_train"](t)
    taken = time.perf_counter() - begun
    t.writer.wait()
    return taken, steps


def train_bare_loop(make: Any, batches: Iterator[Any], steps: int) -> Run:
    from torch.nn.functional import mse_loss

    model, optimizer = make()
    next(batches)

    def run() -> tuple[float, int]:
        begun = time.perf_counter()
        for user, item, stars in islice(batches, steps):
            optimizer.zero_grad()
            mse_loss(model(user, item), stars).backward()
            optimizer.step()
        return time.perf_counter() - begun, steps

    return run


def accelerate(make: Any, batches: Iterator[Any], steps: int) -> Run:
    from accelerate import Accelerator
    from torch.nn.functional import mse_loss

    made = Accelerator(cpu=True)
    model, optimizer = made.prepare(*make())

    def run() -> tuple[float, int]:
        begun = time.perf_counter()
        for user, item, stars in islice(batches, steps):
            optimizer.zero_grad()
            made.backward(mse_loss(model(user, item), stars))
            optimizer.step()
        return time.perf_counter() - begun, steps

    return run


def lightning(make: Any, batches: Iterator[Any], steps: int) -> Run:
    import logging

    from lightning import LightningModule, Trainer
    from torch.nn.functional import mse_loss

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = make()

        def training_step(self, batch: Any, _: int) -> Any:
            user, item, stars = batch
            return mse_loss(self.model(user, item), stars)

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def on_train_start(self) -> None:
            self.begun = time.perf_counter()

        def on_train_end(self) -> None:
            self.taken = time.perf_counter() - self.begun

    module = Module()

    def run() -> tuple[float, int]:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, Next(batches, steps))
        return module.taken, steps

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="time a recommender's training beside the peers")
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, default=BATCH)
    given = parser.parse_args()
    settings = (given.only,) if given.only else SETTINGS
    result = measure(given.rounds, settings, given.batch)
    print(json.dumps(result["samples_per_s"], indent=1))
    for row in result["figures"]:
        times = f"{1 / row['median']:.1f} times as fast"
        print(f"{row['what']:<80}{row['median']:>9} [{row['min']}–{row['max']}]  {times}")


if __name__ == "__main__":
    main()
