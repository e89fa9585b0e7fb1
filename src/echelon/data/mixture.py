"""Several data sets as one, each with a weight: from which of them a sample comes, as a function of
position.

The draws of a training are numbered through all epochs. A pattern of 65,536 slots says which source
the draw of a number belongs to, and how many draws of that source came before it; so the weights
hold in every stretch of a training, not only on average, and any draw is found at once. The k-th
draw of a source is the k-th sample of its own shuffled passes: no sample comes again before all
others of its source have come.

The order is part of what a snapshot promises; `tests/data/test_mixture.py` pins some values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from echelon.data.chunk_order import ChunkedOrder, ChunkWindows, find_chunk_windows
from echelon.data.sample_order import EpochOrder, map_positions
from echelon.errors import EchelonError, Fault, suggest_nearest

PATTERN_SLOTS = 1 << 16
"""Weights are kept to a part in so many."""


class Mixture(Dataset[Any]):
    """Data sets of which a training draws with weights; made by `echelon.data.mix`.

    As a Dataset it has the samples of all sources, one source after the other. In a training it is
    drawn from as the weights say, `epoch_samples` times in an epoch.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float], epoch_samples: int | None
    ) -> None:
        _require_mixable(sources, weights, epoch_samples)
        self.names = list(sources)
        self.sources = list(sources.values())
        total = sum(weights.values())
        self.weights = [weights[name] / total for name in self.names]
        self.sizes = [len(source) for source in self.sources]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.epoch_samples = len(self) if epoch_samples is None else epoch_samples

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Any:
        source, number = self.find_source(row)
        return self.sources[source][number]

    def locate(self, row: int) -> str:
        """Return where a sample is, for a message."""
        source, number = self.find_source(row)
        own = getattr(self.sources[source], "locate", None)
        where = f"sample {number}" if own is None else str(own(number))
        return f"{self.names[source]}: {where}"

    def find_source(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and the number of its sample there."""
        if not 0 <= row < len(self):
            raise IndexError(f"there is no sample {row}: the sources have {len(self):,}")
        source = int(np.searchsorted(self._starts, row, side="right")) - 1
        return source, row - int(self._starts[source])

    def describe(self) -> str:
        """Return the sources with their weights and sizes: `web 0.7 of 1,000, code 0.3 of 50`."""
        parts = []
        for name, weight, source in zip(self.names, self.weights, self.sources, strict=True):
            packed = getattr(source, "grouping", "")
            parts.append(f"{name} {weight:.6g} of {packed or f'{len(source):,}'}")
        return f"{', '.join(parts)}; {self.epoch_samples:,} an epoch"


def mix(
    sources: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    epoch_samples: int | None = None,
) -> Mixture:
    """Return several data sets as one, of which a training draws with weights.

        data = echelon.data.mix(
            {"web": echelon.data.open("web/*.tar"), "code": echelon.data.open("code/*.tar")},
            weights={"web": 0.8, "code": 0.2},
        )
        echelon.Experiment(..., train_data=data)

    sources        Datasets with a length, by name
    weights        how much of the training comes from each; the numbers need not add up to 1.
                   Default: as many as they have samples
    epoch_samples  draws in an epoch; default: as many as there are samples in all

    Every stretch of a training has the weights, to one draw; a weight is kept to 1/65,536. Each
    source is passed through in a shuffled order of its own, and begins again when all its samples
    have come. The order is the same at any number of processes, and a run is resumed within it
    exactly.
    """
    given = {name: len(source) for name, source in sources.items()} if weights is None else weights
    return Mixture(sources, given, epoch_samples)


def _require_mixable(
    sources: Mapping[str, Any], weights: Mapping[str, float], epoch_samples: int | None
) -> None:
    """Raise all faults of what `mix` was given."""
    faults = []
    if not isinstance(sources, Mapping) or not sources:
        faults.append(Fault("echelon.data.mix is given no sources", "give {name: dataset, …}"))
    for name, source in sources.items():
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            what = f"the source {name} is a {type(source).__name__}, without a length or samples"
            faults.append(Fault(f"{what} by number", "give a Dataset with __len__ and __getitem__"))
        elif len(source) == 0:
            faults.append(Fault(f"the source {name} has no samples", "leave it out"))
    for name in weights:
        if name not in sources:
            hint = suggest_nearest(str(name), list(sources))
            faults.append(Fault(f"there is a weight of {name!r}, which is no source", hint))
    total = sum(weight for weight in weights.values() if weight > 0)
    for name in sources:
        if name not in weights:
            faults.append(Fault(f"the source {name} has no weight", "give every source one"))
        elif not weights[name] * PATTERN_SLOTS >= total / 2:
            what = f"the source {name} has the weight {weights[name]:g} of {total:g} in all"
            least = f"at least 1/{2 * PATTERN_SLOTS:,} of all"
            faults.append(Fault(what, f"give it {least}, or leave it out"))
    if epoch_samples is not None and epoch_samples < 1:
        faults.append(Fault(f"epoch_samples={epoch_samples}", "give at least one"))
    if faults:
        raise EchelonError(*faults)


@dataclass(frozen=True)
class DrawPattern:
    """Which source each of 65,536 draws in turn belongs to; then the pattern begins again."""

    owners: NDArray[np.int64]
    """By slot: the source."""
    ranks: NDArray[np.int64]
    """By slot: how many slots of the same source come before it."""
    counts: NDArray[np.int64]
    """By source: its slots."""


def make_pattern(weights: list[float]) -> DrawPattern:
    """Return the pattern of these weights: the slots of a source are as evenly spread as can be."""
    exact = np.array(weights) / sum(weights) * PATTERN_SLOTS
    counts = np.maximum(1, np.floor(exact).astype(np.int64))
    # The largest remainders get the slots that are left, the first of equal ones first.
    for source in np.argsort(counts - exact, kind="stable")[: PATTERN_SLOTS - counts.sum()]:
        counts[source] += 1
    counts[np.argmax(counts)] += PATTERN_SLOTS - counts.sum()  # where small ones were raised to 1
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    owners = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(times, kind="stable")
    return DrawPattern(owners[order], ranks[order], counts)


class MixtureDraws:
    """The draws of a mixture by number, through all epochs."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._pattern = make_pattern(mixture.weights)
        self._seed = seed
        self._sizes = mixture.sizes
        self._starts = np.concatenate([[0], np.cumsum(mixture.sizes)])
        self._windows: list[ChunkWindows | None] = [
            find_chunk_windows(source) for source in mixture.sources
        ]

    def find_rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the mixture for each draw, plus the size of the mixture for every pass
        over its source that is over: a sample draws other random numbers in each."""
        pattern = self._pattern
        slots, periods = numbers % PATTERN_SLOTS, numbers // PATTERN_SLOTS
        owners = pattern.owners[slots]
        of_source = periods * pattern.counts[owners] + pattern.ranks[slots]
        rows = np.empty_like(numbers)
        for source in np.unique(owners):
            mine = owners == source
            passes, places = np.divmod(of_source[mine], self._sizes[source])
            drawn = np.empty_like(places)
            for number in np.unique(passes):
                of_pass = passes == number
                drawn[of_pass] = self._shuffle(int(source), int(number), places[of_pass])
            rows[mine] = drawn + self._starts[source] + passes * int(self._starts[-1])
        return rows

    def _shuffle(self, source: int, number: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these places of a pass over one source."""
        size, windows, seed = self._sizes[source], self._windows[source], self._seed + source
        at = torch.from_numpy(places)
        if windows is not None:
            order = ChunkedOrder(size, 1, 0, 1, seed, number, windows=windows)
            return order.map_positions(at).numpy()
        return map_positions(at, size, seed, number, f"source {source}/").numpy()


@dataclass(frozen=True, kw_only=True)
class MixtureOrder(EpochOrder):
    """The indices of one rank through one epoch of a mixture."""

    draws: MixtureDraws
    rows: int
    """Of the mixture."""

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the rows of a run of global batches, joined, and how many belong to each."""
        for drawn, counts in self.iter_draws(first_batch):
            yield drawn % self.rows, counts

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the same with the numbers that samples are seeded by."""
        return super().iter_blocks(first_batch)

    def map_positions(self, positions: Tensor) -> Tensor:
        """Return the draws at these positions of the epoch."""
        numbers = positions.cpu().numpy() + self.epoch * self.size
        return torch.from_numpy(self.draws.find_rows(numbers)).to(positions.device)
