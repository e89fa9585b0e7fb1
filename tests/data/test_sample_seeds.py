"""What a sample draws: the same wherever and whenever it is fetched, and nobody else's numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from random_samples import SIZE, GroupedSamples, RandomSamples, collate_with_draw, draw_numbers
from torch.utils.data import StackDataset, Subset

from echelon.data.batches import DatasetSource, EvalOrder
from echelon.data.sample_order import EpochOrder
from echelon.data.sample_seeds import derive_seeds
from echelon.snapshot.state import pack_rng_state

CPU = torch.device("cpu")
BATCH = 5
Draws = dict[int, tuple[float, ...]]


def draw_epoch(
    data: Any, workers: int = 0, world_size: int = 1, first: int = 0, seed: int = 0, epoch: int = 0
) -> Draws:
    """What every sample drew, over all ranks."""
    found: Draws = {}
    for rank in range(world_size):
        order = EpochOrder(SIZE, BATCH, rank, world_size, seed, epoch)
        source = DatasetSource(data, workers)
        for batch in source.iter_batches(order, first, CPU):
            for index, *draws in batch.data.tolist() if batch.sample_count else []:
                found[int(index)] = tuple(draws)
        source.close()
    return found


def test_seeds_are_a_promise_to_old_snapshots() -> None:
    assert derive_seeds(0, 0, torch.tensor([0, 1, 10**12])) == [
        1489488776630319588,
        9507414834736001726,
        15815905767601947706,
    ]
    assert derive_seeds(7, 3, torch.tensor([5])) == [13696561017860291999]


def test_no_two_samples_epochs_or_seeds_share_a_seed() -> None:
    keys = list(itertools.product(range(3), range(-1, 3)))
    seeds = [s for key in keys for s in derive_seeds(*key, torch.arange(1000))]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("workers", "world_size"), [(0, 2), (0, 3), (1, 1), (2, 3)])
@pytest.mark.slow
def test_a_sample_draws_the_same_at_any_number_of_processes(workers: int, world_size: int) -> None:
    whole = draw_epoch(RandomSamples())
    assert sorted(whole) == list(range(SIZE))
    assert len({draw for draws in whole.values() for draw in draws}) == 3 * SIZE
    assert draw_epoch(RandomSamples(), workers, world_size) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_draws_the_same_after_a_resume(workers: int) -> None:
    whole, resumed = draw_epoch(RandomSamples()), draw_epoch(RandomSamples(), workers, first=2)
    assert len(resumed) == SIZE - 2 * BATCH
    assert resumed.items() <= whole.items()


def test_another_epoch_or_seed_draws_other_numbers() -> None:
    keys = ((0, 0), (0, 1), (1, 0))
    drawn = [draw_epoch(RandomSamples(), seed=seed, epoch=epoch) for seed, epoch in keys]
    assert len({draw for found in drawn for draws in found.values() for draw in draws}) == 9 * SIZE


def test_every_evaluation_draws_the_same() -> None:
    source = DatasetSource(RandomSamples(), 0)
    order = EvalOrder(SIZE, BATCH, 0, 1)
    first, again = (
        torch.cat([batch.data for batch in source.iter_batches(order, 0, CPU)]) for _ in range(2)
    )
    assert torch.equal(first, again)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_training_process_draws_as_if_there_were_no_data(workers: int) -> None:
    before = pack_rng_state()
    draw_epoch(RandomSamples(), workers)
    assert torch.equal(pack_rng_state(), before)
    assert draw_numbers() != draw_numbers()


def test_a_sample_that_fails_leaves_the_generators_alone() -> None:
    class Failing(RandomSamples):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError("no such file")

    before = pack_rng_state()
    with pytest.raises(OSError, match="no such file"):
        draw_epoch(Failing())
    assert torch.equal(pack_rng_state(), before)


def test_samples_that_are_fetched_together_are_seeded_by_the_first() -> None:
    """So they draw the same after a resume and in any process, but not at another world size."""
    whole = draw_epoch(GroupedSamples())
    assert draw_epoch(GroupedSamples(), workers=2) == whole
    assert draw_epoch(GroupedSamples(), first=2).items() <= whole.items()
    shared = draw_epoch(GroupedSamples(), world_size=2)
    same = {index for index in whole if whole[index] == shared[index]}
    assert 0 < len(same) < SIZE


def test_torchs_containers_fetch_one_by_one() -> None:
    """Their __getitems__ only passes the indices on."""
    backwards = list(range(SIZE))[::-1]
    subset = Subset(RandomSamples(), backwards)
    alone = draw_epoch(RandomSamples())
    assert draw_epoch(subset, world_size=2) == {
        backwards[place]: draws for place, draws in alone.items()
    }
    stacked: StackDataset[Any] = StackDataset(RandomSamples())
    source = DatasetSource(stacked, 0)
    order = EpochOrder(SIZE, BATCH, 0, 1, 0, 0)
    [rows] = next(source.iter_batches(order, 0, CPU)).data
    assert {int(i): tuple(draws) for i, *draws in rows.tolist()}.items() <= alone.items()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collation_is_seeded_by_its_first_sample(workers: int) -> None:
    order = EpochOrder(SIZE, BATCH, 0, 1, 0, 0)
    whole, resumed = (
        [batch.data for batch in source.iter_batches(order, first, CPU)]
        for source, first in (
            (DatasetSource(RandomSamples(), 0, collate_fn=collate_with_draw), 0),
            (DatasetSource(RandomSamples(), workers, collate_fn=collate_with_draw), 1),
        )
    )
    assert [draws for _, draws in resumed] == [draws for _, draws in whole[1:]]
    drawn = {draw for rows, draws in whole for draw in (*draws, *rows[:, 1:].flatten().tolist())}
    assert len(drawn) == 3 * SIZE + 3 * len(whole)
