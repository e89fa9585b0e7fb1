"""How a round is over is said once, by whoever comes first: its last rank, or a leader who has lost
one of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from echelon.world.rounds import Round, RoundStore
from echelon.world.sealed_store import SealedStore

THREE = Round(0, (0, 1, 2))


@pytest.fixture
def rounds() -> RoundStore:
    return RoundStore(SealedStore.open(dist.HashStore(), {}), 0)


def test_all_ranks_have_ended(rounds: RoundStore) -> None:
    for _ in THREE.slots:
        assert not rounds.have_all_ended(THREE)
        rounds.count_ended(THREE)
    assert rounds.have_all_ended(THREE)
    assert not rounds.supersede(THREE.number)


def test_a_rank_that_ends_after_another_was_missed_has_not_ended(rounds: RoundStore) -> None:
    for _ in range(2):
        rounds.count_ended(THREE)
    assert rounds.supersede(THREE.number)
    rounds.count_ended(THREE)
    assert not rounds.have_all_ended(THREE)
    assert rounds.supersede(THREE.number)  # the same leader may lose one more
