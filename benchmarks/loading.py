"""What loader processes give: samples per second over whole epochs, and what seeding costs.

    python benchmarks/loading.py [--rounds 9]

A Dataset whose sample takes half a millisecond, random numbers included, in batches of 32 with two
loader processes. A turn is four epochs, one after the other, from the request of the first batch to
the last batch. Contestants take turns; a ratio is of two times of one round.
- DataLoader: torch's, shuffling, with persistent_workers, its start not counted.
- started anew: the same without persistent_workers.
- Echelon: what its training loop takes its batches from, its start not counted.
Small and large batches are of samples that take no time: what is measured is how batches cross.
Seeding is what all three generators cost per sample, in the training process, with the state of its
own generators brought back after every batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common import Figure, Result, compute_ratios, make_figure, measure_in_turns
from echelon.data.batches import BatchOrder, DatasetSource
from echelon.data.sample_order import EpochOrder
from echelon.data.sample_seeds import derive_seeds, keep_generators, seed_generators

ROUNDS = 9
SAMPLES = 512
EPOCHS = 4
BATCH = 32
WORKERS = 2
SIDE = 224
SEEDING_US = 20.0
SEEDED_BATCHES = 200
CPU = torch.device("cpu")


class Pictures(Dataset[Tensor]):
    """A crop of a picture, blurred and with noise."""

    def __init__(self) -> None:
        self.picture = torch.rand(3, 2 * SIDE, 2 * SIDE)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        x, y = (int(torch.randint(SIDE, ())) for _ in range(2))
        crop = self.picture[:, x : x + SIDE, y : y + SIDE]
        return torch.nn.functional.avg_pool2d(crop, 2) + 0.1 * torch.randn(3, SIDE // 2, SIDE // 2)


class Rows(Dataset[tuple[Tensor, ...]]):
    """Samples that are there already."""

    def __init__(self, samples: int, *shapes: tuple[int, ...]) -> None:
        self.samples = samples
        self.columns = [torch.rand(8, *shape) for shape in shapes]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index % 8] for column in self.columns)


CROSSINGS = {
    "small batches (32 × 3 tensors of 100 numbers)": (Rows(6400, (100,), (100,), (100,)), 32),
    "large batches (64 × 3 × 224 × 224 numbers, 39 MB)": (Rows(640, (3, SIDE, SIDE), ()), 64),
}


def measure_crossing(name: str, rounds: int) -> Figure:
    """How long epochs take beside torch's, where samples cost nothing."""
    data, batch = CROSSINGS[name]
    source = DatasetSource(data, WORKERS)
    theirs: DataLoader[Any] = DataLoader(
        data, batch, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    seconds = measure_in_turns(
        {
            "DataLoader": partial(time_turn, lambda _: theirs),
            "Echelon": partial(
                time_turn,
                lambda epoch: source.iter_batches(
                    EpochOrder(len(data), batch, 0, 1, seed=0, epoch=epoch), 0, CPU
                ),
            ),
        },
        rounds,
    )
    source.close()
    ratios = compute_ratios(seconds["Echelon"], seconds["DataLoader"])
    return make_figure(f"{name}: Echelon, × a persistent DataLoader's", ratios, 0.9)


def time_turn(make_epoch: Callable[[int], Iterable[Any]]) -> float:
    begun = time.perf_counter()
    for epoch in range(EPOCHS):
        for _ in make_epoch(epoch):
            pass
    return time.perf_counter() - begun


def make_order(epoch: int) -> EpochOrder:
    return EpochOrder(SAMPLES, BATCH, 0, 1, seed=0, epoch=epoch)


def make_next_order(order: BatchOrder) -> EpochOrder | None:
    """Nothing is fetched for the next turn, while others are timed."""
    return make_order(order.epoch + 1) if order.epoch + 1 < EPOCHS else None


def time_seeding() -> float:
    """Microseconds per sample."""
    begun = time.perf_counter()
    for number in range(SEEDED_BATCHES):
        with keep_generators():
            for seed in derive_seeds(0, number, torch.arange(BATCH)):
                seed_generators(seed)
    return (time.perf_counter() - begun) / (SEEDED_BATCHES * BATCH) * 1e6


def measure(rounds: int = ROUNDS) -> Result:
    torch.set_num_threads(1)
    data = Pictures()
    source = DatasetSource(data, WORKERS)
    persistent: DataLoader[Tensor] = DataLoader(
        data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    anew: DataLoader[Tensor] = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS)
    seconds = measure_in_turns(
        {
            "DataLoader": partial(time_turn, lambda _: persistent),
            "started anew": partial(time_turn, lambda _: anew),
            "Echelon": partial(
                time_turn,
                lambda epoch: source.iter_batches(make_order(epoch), 0, CPU, make_next_order),
            ),
        },
        rounds,
    )
    source.close()
    rows: list[Figure] = [
        make_figure(
            f"{EPOCHS} epochs with {WORKERS} loader processes: {who}, × a persistent DataLoader's",
            compute_ratios(seconds[who], seconds["DataLoader"]),
            1.0 if who == "Echelon" else None,
        )
        for who in ("Echelon", "started anew")
    ]
    rows += [
        make_figure(f"samples per second: {who}", [EPOCHS * SAMPLES / s for s in taken], unit="/s")
        for who, taken in seconds.items()
    ]
    rows += [measure_crossing(name, rounds) for name in CROSSINGS]
    seeding = [time_seeding() for _ in range(rounds)]
    rows.append(make_figure("seeding a sample", seeding, SEEDING_US, "µs"))
    config = {
        "rounds": rounds,
        "batch": BATCH,
        "samples": SAMPLES,
        "epochs": EPOCHS,
        "workers": WORKERS,
    }
    return {"config": config, "figures": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="time the loading of samples")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for row in measure(parser.parse_args().rounds)["figures"]:
        print(f"{row['what']:<75}{row['median']:>9} {row['unit']} [{row['min']}–{row['max']}]")


if __name__ == "__main__":
    main()
