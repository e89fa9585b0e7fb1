"""NDCG@k for the case that one item is relevant.

torchmetrics' own metric keeps the scores of every item for every user until the end: 40 GB for
MovieLens 25M. This one keeps two numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class SingleTargetNDCG(Metric):
    """The mean of 1 / log2(rank + 1) over users, where ranks beyond k count as 0."""

    full_state_update = False
    higher_is_better = True

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.gain: Tensor
        self.users: Tensor
        self.add_state("gain", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("users", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, target: Tensor) -> None:
        """Add scores of shape [users, items] and the target item of each user."""
        target_scores = scores.gather(1, target[:, None])
        # Ties and NaN count as above the target: otherwise constant scores would be perfect.
        above = (~(scores < target_scores)).sum(1) - 1
        self.gain += (1 / torch.log2(above.double() + 2))[above < self.k].sum()
        self.users += len(target)

    def compute(self) -> Tensor:
        """Return the mean over all users so far."""
        return self.gain / self.users
