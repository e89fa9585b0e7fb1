"""Reads one shard of a stream, sample by sample and pass after pass."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from echelon.data.sample_seeds import derive_seeds, seed_generators
from echelon.data.sharded_stream import ShardedStream
from echelon.errors import EchelonError, ExitCode, Fault

_SHARD_BITS = 40
"""A pass over a shard has fewer samples than that many bits can count."""
_SEED_BLOCK = 256
_ITERATOR, _ITERABLE = "iterator", "iterable"
_CONTINUE_REMEDY = "read the stream as when the run was begun, or start anew: trainer.resume=never"


class ShardPosition(NamedTuple):
    """Where a shard can be continued: after the samples that it has given."""

    samples: int = 0
    """Samples of all passes."""
    pass_number: int = 0
    pass_samples: int = 0
    """Samples of this pass."""
    state: Any = None
    """What the `state_dict` of the iterable or of its iterator returned there, under the name of
    that; None where the pass is to be read from its beginning."""


class ShardReader:
    """One shard and where it is.

    What a sample draws from `random`, numpy and torch depends on (seed, pass, shard, number) alone,
    as in `sample_seeds.py`. So the generators are changed by every call; the training process
    calls in `keep_generators`.
    """

    def __init__(self, stream: ShardedStream, shard: int, seed: int, name: str) -> None:
        self._stream, self._shard, self._seed, self._name = stream, shard, seed, name
        self._position = ShardPosition()
        self._iterable: Any = None
        self._iterator: Iterator[Any] | None = None
        """Of the current pass; None before it has begun."""
        self._seeds: Iterator[int] = iter(())

    @property
    def has_state(self) -> bool:
        """Whether the shard can say where it is, once it has been read from."""
        return self._find_stateful() is not None

    def get_position(self, with_state: bool) -> ShardPosition:
        """Return the position, with the shard's own state where it has one and is asked for it."""
        found = self._find_stateful() if with_state else None
        if found is None:
            return self._position
        name, part = found
        seed_generators(self._make_seed(0))
        with self._name_error("its state_dict failed before"):
            # A copy: it may be what the shard goes on to count in.
            return self._position._replace(state={name: copy.deepcopy(part.state_dict())})

    def continue_from(self, position: ShardPosition, samples: int) -> None:
        """Go to a saved position, and from there on to the number of samples that the shard has
        given."""
        self._position = position._replace(state=None)
        to_drop = samples - position.samples
        if position.state is not None:
            self._begin_pass(position.state)
        else:  # the pass is read from its beginning
            to_drop += position.pass_samples
            self._position = ShardPosition(
                position.samples - position.pass_samples, position.pass_number, 0
            )
        for _ in range(to_drop):
            self.take_sample()

    def take_sample(self) -> tuple[Any, int]:
        """Return the next sample, and the seed that its random numbers came from."""
        while True:
            if self._iterator is None:
                self._begin_pass({})
            assert self._iterator is not None
            seed = next(self._seeds)
            seed_generators(seed)
            with self._name_error("it failed at"):
                sample = next(self._iterator, _END)
            if sample is not _END:
                samples, pass_number, pass_samples, _ = self._position
                self._position = ShardPosition(samples + 1, pass_number, pass_samples + 1)
                return sample, seed
            self._end_pass()

    def _begin_pass(self, state: Mapping[str, Any]) -> None:
        """Open the shard for a pass: at its beginning, or at a state."""
        seed_generators(self._make_seed(0))
        with self._name_error("it failed to begin before"):
            iterable = self._stream.make_shard(self._shard, self._stream.shards)
            if not hasattr(iterable, "__iter__"):
                raise self._make_error(
                    f"is made as {type(iterable).__name__}, which is not iterable",
                    "let make_shard return a generator, an IterableDataset or a list",
                )
            if iterable is self._iterable and isinstance(iterable, Iterator):
                raise self._make_error(
                    f"ended after {self._position.samples:,} samples, and a "
                    f"{type(iterable).__name__} can be read once",
                    "give echelon.data.stream(function) that makes it for every pass, or set fewer "
                    "steps",
                )
            if callable(set_epoch := getattr(iterable, "set_epoch", None)):
                set_epoch(self._position.pass_number)
            self._iterable = iterable
            if _ITERABLE in state:
                self._require_stateful(iterable).load_state_dict(state[_ITERABLE])
            self._iterator = iter(iterable)
            if _ITERATOR in state:
                self._require_stateful(self._iterator).load_state_dict(state[_ITERATOR])
        self._seeds = self._iter_seeds(self._position.pass_samples)

    def _end_pass(self) -> None:
        samples, pass_number, pass_samples, _ = self._position
        if not pass_samples:
            raise self._make_error(
                f"gives no samples in pass {pass_number + 1}",
                "give every shard at least one sample, or make fewer shards",
            )
        self._position = ShardPosition(samples, pass_number + 1, 0)
        self._iterator = None

    def _find_stateful(self) -> tuple[str, Any] | None:
        """Return what knows where the shard is: the iterator, as for torchdata, or the iterable."""
        if self._iterator is None or not self._stream.uses_state:
            return None
        parts = {_ITERATOR: self._iterator, _ITERABLE: self._iterable}
        return next(((name, part) for name, part in parts.items() if _is_stateful(part)), None)

    def _require_stateful(self, part: Any) -> Any:
        if not _is_stateful(part):
            raise self._make_error(
                f"({type(part).__name__}) has no load_state_dict, but the snapshot has its state",
                _CONTINUE_REMEDY,
            )
        return part

    def _make_seed(self, number: int) -> int:
        return derive_seeds(self._seed, self._position.pass_number, self._number(number))[0]

    def _iter_seeds(self, taken: int) -> Iterator[int]:
        """Yield the seeds of the samples of a pass. Number 0 is what is drawn when it begins."""
        for first in itertools.count(taken + 1, _SEED_BLOCK):
            numbers = self._number(first) + np.arange(_SEED_BLOCK, dtype=np.uint64)
            yield from derive_seeds(self._seed, self._position.pass_number, numbers)

    def _number(self, number: int) -> Any:
        return np.array([(self._shard << _SHARD_BITS) + number], np.uint64)

    def _name_error(self, what: str) -> _ErrorNote:
        return _ErrorNote(lambda: self._describe(what))

    def _describe(self, what: str) -> str:
        _, pass_number, pass_samples, _ = self._position
        where = f"sample {pass_samples} of pass {pass_number + 1}"
        return f"in shard {self._shard} of {self._stream.shards} of {self._name}: {what} {where}"

    def _make_error(self, what: str, do: str) -> EchelonError:
        which = f"shard {self._shard} of {self._stream.shards} of {self._name}"
        return EchelonError(Fault(f"{which} {what}", do), exit=ExitCode.FAILED)


_END = object()


class _ErrorNote:
    """Adds to an error of the user's code where it happened."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, EchelonError):
            if hasattr(error, "add_note"):
                error.add_note(self._describe())
            else:  # before Python 3.11
                print(self._describe(), file=sys.stderr)


def _is_stateful(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )
