"""Random numbers in a Dataset's `__getitem__`, as a function of (seed, epoch, sample).

Augmentation draws from the generators of `random`, numpy and torch. Their state in a loader process
depends on what that process did before: on the number of processes and ranks, and on where a run
was resumed. So all three are seeded before every sample, and what a sample draws depends on nothing
else. A generator that the Dataset keeps for itself is not known here.

The seeds are part of what a snapshot promises; `tests/data/test_sample_seeds.py` pins some.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from hashlib import shake_128
from typing import Any

import numpy as np
import torch

_LOW_BITS = 0xFFFF_FFFF
_COLLATE_BITS = 0x5851_F42D_4C95_7F2D
"""Any constant does: it keeps what a collate_fn draws from repeating what a sample drew."""


def derive_seeds(seed: int, epoch: int, samples: Any) -> list[int]:
    """Return a seed of 64 bits for each sample of an epoch, from an array of their numbers.

    This is splitmix64, whose increments are multiples of an odd number: no two samples of an epoch
    have the same seed. It takes some nanoseconds a sample.
    """
    digest = shake_128(f"samples/{seed}/{epoch}".encode()).digest(8)
    mixed = np.asarray(samples).astype(np.uint64)
    mixed *= np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed += np.frombuffer(digest, "<u8")
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    seeds: list[int] = mixed.tolist()
    return seeds


def derive_collate_seed(first_seed: int) -> int:
    """Return the seed of what is drawn while a share is collated, from its first sample's seed."""
    return first_seed ^ _COLLATE_BITS


def derive_batch_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of 64 bits of what a rank draws while it transforms its share of a batch."""
    digest = shake_128(f"batches/{seed}/{step}/{rank}".encode()).digest(8)
    return int.from_bytes(digest, "little")


def seed_generators(seed: int) -> None:
    """Seeds `random`, numpy and torch's generator of the CPU, in about ten microseconds.

    numpy and torch run the same algorithm and take 32 bits each: they get different ones, so that
    they do not draw the same numbers. `torch.manual_seed` would also visit every GPU.
    """
    random.seed(seed)
    np.random.seed(seed & _LOW_BITS)
    torch.default_generator.manual_seed(seed >> 32)


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Brings the three generators back to where they were before the block.

    The training process draws its own numbers from them, for dropout and the like.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
