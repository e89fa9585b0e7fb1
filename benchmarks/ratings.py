"""Made-up ratings, models and the tutorial's data set, for feeding.py and recommender.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Size(NamedTuple):
    ratings: int
    users: int
    items: int


SIZES = {
    "100k": Size(100_836, 610, 9_724),  # ml-latest-small
    "20M": Size(20_000_000, 162_541, 59_047),  # the tables of ML-25M
}
WIDTH, HIDDEN = 64, 128


def ratings(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """User, item (int32), rating (float32): skewed, as a few of each have most of the ratings.

    Made in pieces, so that making them leaves no peak of memory behind.
    """
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.empty(size.ratings, dtype=torch.int32) for _ in range(2))
    stars = torch.empty(size.ratings)
    for start in range(0, size.ratings, 1 << 20):
        piece = slice(start, start + (1 << 20))
        for column, most in ((users, size.users), (items, size.items)):
            drawn = torch.rand(len(column[piece]), generator=generator)
            column[piece] = (drawn**3 * most).clamp_(max=most - 1)
        stars[piece] = torch.rand(len(stars[piece]), generator=generator) * 4.5 + 0.5
    return users, items, stars


class PerSample(Dataset[Any]):
    """As a tutorial has it."""

    def __init__(self, columns: tuple[Tensor, ...]) -> None:
        self.users, self.items, self.stars = columns

    def __len__(self) -> int:
        return len(self.stars)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.users[index], self.items[index], self.stars[index]


def loader(columns: tuple[Tensor, ...], batch: int, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(PerSample(columns), batch, shuffle=True, num_workers=workers)


class Dot(nn.Module):
    """A bias and an embedding per user and per item; trained by SGD with sparse gradients."""

    def __init__(self, size: Size, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.Embedding(size.users, WIDTH, sparse=sparse)
        self.items = nn.Embedding(size.items, WIDTH, sparse=sparse)
        self.user_bias = nn.Embedding(size.users, 1, sparse=sparse)
        self.item_bias = nn.Embedding(size.items, 1, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        dot = (self.users(user) * self.items(item)).sum(1)
        found: Tensor = dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)
        return found


class Tower(nn.Module):
    """Embeddings, 128 → 128 → 1; trained by Adam."""

    def __init__(self, size: Size, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(size.users, WIDTH, sparse=sparse)
        self.items = nn.Embedding(size.items, WIDTH, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        found: Tensor = self.tower(torch.cat((self.users(user), self.items(item)), 1)).squeeze(1)
        return found


def parts(kind: str, size: Size, ours: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer: torch's own, or ours. The tower's is dense Adam for everybody
    else, as torch has no optimizer for a model of both kinds of gradients."""
    from echelon.optim import RowAdam, RowSGD

    if kind == "dot":
        model: nn.Module = Dot(size)
        if ours:
            return model, RowSGD(model.parameters(), lr=0.05)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)
    model = Tower(size, sparse=ours)
    if ours:
        return model, RowAdam(model.parameters(), lr=1e-3)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)
