"""What it costs to feed a recommender, without a model: batches, the first one, and memory.

    python benchmarks/feeding.py [--rounds 9]

Made-up ratings (int32 user and item, float32 stars) of two sizes, in batches of 1,024, one thread.
Contestants take turns; a ratio is of two times of one round.
- tutorial: a per-sample Dataset and a shuffling DataLoader without workers, its start not counted.
- permuted: tensors cut by torch.randperm, its start not counted either.
- Echelon: what its training loop takes its batches from, drawing the order included.
The first batch is of an epoch over 20 million ratings, from the start of the epoch. Memory is the
growth of the resident set's peak in a fresh process that holds the data and has drawn a tiny epoch
before: once for feeding a pass over 2,000 batches, once for training the tower with RowAdam, its
weights, averages and gradients included (there is no way to train without these).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import Figure, Result, compute_ratios, environment, make_figure, measure_in_turns
from echelon.data.batches import make_source
from echelon.data.sample_order import EpochOrder
from ratings import SIZES, loader, parts, ratings

ROUNDS = 9
BATCH = 1024
TUTORIAL_BATCHES = 20
FAST_BATCHES = {"100k": 98, "20M": 2000}
AT_LEAST = 50.0
FIRST_BATCH_S = 0.2
MEMORY_MB = 300.0
CPU = torch.device("cpu")
Columns = tuple[Tensor, ...]

_epochs = count()


def feed_echelon(columns: Columns, epoch: int) -> Iterator[Any]:
    source = make_source(columns, "train_data", 0, CPU)
    order = EpochOrder(len(source), BATCH, 0, 1, seed=0, epoch=epoch)
    return (batch.data for batch in source.iter_batches(order, 0, CPU))


def feed_permuted_tensors(columns: Columns) -> Iterator[Any]:
    for rows in torch.randperm(len(columns[0])).split(BATCH):
        yield tuple(column[rows] for column in columns)


def seconds_per_batch(batches: Callable[[], Iterator[Any]], number: int) -> float:
    begun = time.perf_counter()
    taken = sum(1 for _ in islice(batches(), number))
    return (time.perf_counter() - begun) / taken


def seconds_to_first(batches: Callable[[], Iterator[Any]]) -> float:
    begun = time.perf_counter()
    next(batches())
    return time.perf_counter() - begun


def endless(epoch: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from epoch()


def measure(rounds: int = ROUNDS) -> Result:
    torch.set_num_threads(1)
    rows: list[Figure] = []
    per_second: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        columns = ratings(size)
        seconds = measure_in_turns(contestants(columns, FAST_BATCHES[name]), rounds)
        rows += [
            make_figure(
                f"{name} ratings: {who}, a batch, × the tutorial's",
                compute_ratios(taken, seconds["tutorial"]),
                1.0 / AT_LEAST if who == "Echelon" else None,
            )
            for who, taken in seconds.items()
            if who != "tutorial"
        ]
        rates = {n: make_figure(n, [BATCH / s for s in v], unit="/s") for n, v in seconds.items()}
        per_second[name] = {who: row["median"] for who, row in rates.items()}
    rows += [*first_batches(columns, rounds), *memory()]
    config = {"rounds": rounds, "batch": BATCH}
    return {"config": config, "figures": rows, "samples_per_s": per_second}


def contestants(columns: Columns, many: int) -> dict[str, Callable[[], float]]:
    """The order of torch's own is drawn before the clock: it takes seconds for 20 million."""
    loaded = endless(partial(loader, columns, BATCH))
    cut = endless(partial(feed_permuted_tensors, columns))
    next(loaded)
    next(cut)
    return {
        "tutorial": partial(seconds_per_batch, lambda: loaded, TUTORIAL_BATCHES),
        "Echelon": partial(seconds_per_batch, lambda: feed_echelon(columns, next(_epochs)), many),
        "permuted": partial(seconds_per_batch, lambda: cut, many),
    }


def first_batches(columns: Columns, rounds: int) -> list[Figure]:
    seconds = measure_in_turns(
        {
            "Echelon": partial(seconds_to_first, lambda: feed_echelon(columns, next(_epochs))),
            "permuted": partial(seconds_to_first, partial(feed_permuted_tensors, columns)),
            "tutorial": partial(seconds_to_first, lambda: iter(loader(columns, BATCH))),
        },
        min(rounds, 5),
    )
    goals = {"Echelon": FIRST_BATCH_S}
    return [
        make_figure(f"the first batch of 20M ratings: {who}", taken, goals.get(who), "s")
        for who, taken in seconds.items()
    ]


# --- memory, in a process of its own ------------------------------------------------------------


def memory() -> list[Figure]:
    rows = []
    for what, who in (
        ("feed", "Echelon"),
        ("feed", "permuted"),
        ("feed", "tutorial"),
        ("train", "Echelon"),
    ):
        command = [sys.executable, __file__, "--memory", what, who]
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment()
        )
        goal = MEMORY_MB if who == "Echelon" else None
        verb = {"feed": "feeding", "train": "training the tower on"}[what]
        said = f"memory beyond the data, {verb} 20M ratings: {who}"
        rows.append(make_figure(said, [float(told.stdout)], goal, "MB"))
    return rows


def peak_growth(what: str, who: str) -> float:
    torch.set_num_threads(1)
    columns = ratings(SIZES["20M"])
    feeds: dict[str, Callable[[Columns], Iterator[Any]]] = {
        "Echelon": partial(feed_echelon, epoch=0),
        "permuted": feed_permuted_tensors,
        "tutorial": lambda c: iter(loader(c, BATCH)),
    }
    step = _nothing
    tiny = tuple(column[:5000] for column in columns)
    if what == "train":
        train_step("100k")(tuple(column[:100] % 600 for column in columns))
    for _ in feeds[who](tiny):
        pass
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    if what == "train":
        step = train_step("20M")
    for batch in islice(feeds[who](columns), 2000 if who != "tutorial" else 20):
        step(batch)
    return (resident("VmHWM") - before) / 1e6


def _nothing(batch: Any) -> None: ...


def train_step(size: str) -> Callable[[Any], None]:
    model, optimizer = parts("tower", SIZES[size], ours=True)

    def step(batch: Any) -> None:
        user, item, stars = batch
        torch.nn.functional.mse_loss(model(user, item), stars.float()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    parser = argparse.ArgumentParser(description="time the feeding of a recommender")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--memory", nargs=2, metavar=("WHAT", "WHO"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print(peak_growth(*given.memory))
        return
    result = measure(given.rounds)
    print(json.dumps(result["samples_per_s"], indent=1))
    for row in result["figures"]:
        print(f"{row['what']:<70}{row['median']:>9} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
