"""What a training does otherwise where its data is a stream: it opens one, counts steps in the
place of epochs, and keeps the positions of the shards in its snapshots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from echelon.config.schema import Config, TrainerConfig
from echelon.data.bad_samples import BadSampleList
from echelon.data.batches import BatchSource, make_source
from echelon.data.epoch_plan import EpochPlan, make_epoch_plan
from echelon.data.shard_reader import ShardPosition
from echelon.data.sharded_stream import find_stream
from echelon.data.stream_source import Positions, StreamPlan, StreamSource
from echelon.errors import EchelonError, Fault
from echelon.parallel.packed_tree import pack_tree, unpack_tree
from echelon.parallel.process_group import RankGroup
from echelon.snapshot.staging_buffer import copy_from_file, find_unsavable_values, to_plain_tree

STREAM_PART = "stream"
"""The part of a snapshot with the positions of the shards of a stream."""
_SHARDS_KEY = "stream_shards"
"""In the info of a snapshot: the number of shards."""
_NO_EPOCHS = "a stream has no epochs"


def open_train_data(
    config: Config,
    group: RankGroup,
    device: torch.device,
    data: Any,
    name: str,
    *,
    batch_size: int,
    workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    sampler: Any,
    batch_sampler: Any,
    options: Mapping[str, Any] | None,
    bad_samples: BadSampleList | None,
) -> tuple[BatchSource, EpochPlan]:
    """Return the source of the data to train with, and which batches it has."""
    if (stream := find_stream(data)) is None:
        source = make_source(data, name, workers, device, collate_fn, options, bad_samples)
        plan = make_epoch_plan(len(source), batch_size, config.seed, sampler, batch_sampler, data)
        return source, plan
    faults = [
        Fault(
            f"{name} is a stream, and there is a {which}, which gives indices",
            "leave it out: a stream has an order of its own",
        )
        for which, given in (("sampler", sampler), ("batch_sampler", batch_sampler))
        if given is not None
    ]
    faults += _find_epoch_faults(config.trainer)
    if faults:
        raise EchelonError(*faults)
    stream_plan = StreamPlan(batch_size, config.seed)
    return (
        StreamSource(
            stream,
            name,
            stream_plan,
            group.world.rank,
            group.world.size,
            workers,
            device,
            collate_fn,
            options,
            partial(_check_first_batch, name, group),
        ),
        stream_plan,
    )


# --- steps in the place of epochs ---


def _find_epoch_faults(trainer: TrainerConfig) -> Iterator[Fault]:
    """Yield the settings that count epochs. What nobody has set counts epochs too, and is left
    alone: a note says what it does."""
    usual = TrainerConfig()
    for action in ("save", "evaluate"):
        epochs = getattr(trainer, action).epochs
        if epochs not in (None, getattr(usual, action).epochs):
            yield Fault(
                f"trainer.{action}.epochs={epochs}, but {_NO_EPOCHS}",
                f"set trainer.{action}.steps or trainer.{action}.minutes",
            )


def require_steps(source: BatchSource, steps: int | None, remedy: str) -> None:
    """Raise where the length of a training over a stream is not given in steps."""
    if isinstance(source, StreamSource) and steps is None:
        raise EchelonError(
            Fault(
                f"{source.name} is a stream, and {_NO_EPOCHS}, so it has to be said how many steps "
                "the training has",
                remedy,
            )
        )


def require_no_epochs(plan: EpochPlan | None, epochs: int | None, call: str) -> None:
    """Raise where a user's loop over a stream counts epochs."""
    if isinstance(plan, StreamPlan) and epochs is not None:
        raise EchelonError(
            Fault(f"{call}(epochs={epochs}) is called, but {_NO_EPOCHS}", f"give {call}(steps=…)")
        )


def describe_samples(source: BatchSource) -> str | None:
    """Return what a stream consists of, in words; None for data with a length."""
    if not isinstance(source, StreamSource):
        return None
    shards = source.stream.shards
    return f"a stream of {shards} shards" if shards > 1 else "a stream"


def find_stream_notes(source: BatchSource, trainer: TrainerConfig) -> Iterator[str]:
    """Yield what one may not expect of a training over a stream."""
    if not isinstance(source, StreamSource):
        return
    processes, shards = source.readers.shape
    reads = int(source.readers.sum())
    if shards == 1 and processes > 1:
        yield (
            f"note: {source.name} is a stream that is not cut, so each of {processes} processes "
            "reads all of it and keeps its rows; echelon.data.stream(make_shard, shards=…) cuts it"
        )
    elif reads > shards:
        yield (
            f"note: the {shards} shards of {source.name} are read by {reads / shards:.1f} of the "
            f"{processes} processes each; shards and a batch size that are multiples of "
            f"{processes} are read once"
        )
    if trainer.save.steps is None and trainer.save.minutes is None:
        yield (
            f"note: {_NO_EPOCHS}, so snapshots are saved at the end and at a stop alone; set "
            "trainer.save.steps or trainer.save.minutes"
        )


# --- snapshots ---


def collect_stream_state(
    source: BatchSource | None, samples: int, group: RankGroup, to_all: bool = False
) -> dict[str, Any]:
    """Return the part of a snapshot with the positions of all shards, on rank 0 or on all ranks;
    nothing elsewhere, and for data with a length. A collective."""
    if not isinstance(source, StreamSource):
        return {}
    own = {
        shard: [*position[:-1], to_plain_tree(position.state, (STREAM_PART, shard))]
        for shard, position in source.collect_positions(samples).items()
    }
    of_ranks = [unpack_tree(row) for row in group.gather(pack_tree(own), to_all)]
    if not of_ranks:
        return {}
    merged = {shard: position for found in of_ranks for shard, position in found.items()}
    return {STREAM_PART: {"shards": [merged[shard] for shard in range(source.stream.shards)]}}


def describe_stream(source: BatchSource | None) -> dict[str, Any]:
    """Return what a snapshot says of its data in its info."""
    return {_SHARDS_KEY: source.stream.shards} if isinstance(source, StreamSource) else {}


def restore_stream(
    source: BatchSource,
    info: Mapping[str, Any],
    load_part: Callable[[str], Any],
    group: RankGroup,
) -> None:
    """Let a stream continue where the snapshot with this info was saved. A collective: `load_part`
    returns a part of it on all ranks."""
    if not info:
        return
    saved = info.get(_SHARDS_KEY)
    shards = source.stream.shards if isinstance(source, StreamSource) else None
    if saved != shards:
        found = {None: "data with a length", 1: "a stream"}
        of_snapshot, of_data = (found.get(n, f"a stream of {n} shards") for n in (saved, shards))
        raise EchelonError(
            Fault(
                f"the snapshot of step {info['step']} was trained with {of_snapshot}, and the data "
                f"is now {of_data}",
                "give the data that the run was begun with, or start anew: trainer.resume=never",
            )
        )
    if not isinstance(source, StreamSource):
        return
    saved_positions = copy_from_file(load_part(STREAM_PART)["shards"])
    positions = [ShardPosition(*position) for position in saved_positions]
    to_drop = sum(p.pass_samples for p in positions if p.state is None)
    if to_drop and group.world.rank == 0:
        print(
            f"note: {source.name} has no state that can be continued from, so its first "
            f"{to_drop:,} samples are read again and dropped",
            file=sys.stderr,
        )
    source.continue_from(int(info["samples"]), positions)


def _check_first_batch(
    name: str, group: RankGroup, positions: Positions, digests: Mapping[int, str]
) -> None:
    """Raise before the first step where the state of a shard is something that a snapshot cannot
    hold, or where ranks that read the same shard were given other samples. A collective."""
    _require_savable_states(positions)
    differing: list[Any] = []
    first: dict[str, list[Any]] = {}
    for rank, of_rank in enumerate(group.gather_json(digests)):
        for shard, digest in of_rank.items():  # whose numbers JSON has made texts
            known_rank, known = first.setdefault(shard, [rank, digest])
            if digest != known:
                differing.append([shard, known_rank, rank])
    if found := group.broadcast_json(differing[:1]):
        [(shard, one, other)] = found
        raise EchelonError(
            Fault(
                f"shard {shard} of {name} gives rank {other} another first sample than rank {one}",
                "let it give the same samples on every process: every process reads whole shards "
                "and keeps its share, so leave out what divides a stream among processes",
            )
        )


def _require_savable_states(positions: Positions) -> None:
    """Raise where the state of a shard is something that a snapshot cannot hold."""
    faults = [
        fault
        for shard, position in positions.items()
        for fault in find_unsavable_values(position.state, (STREAM_PART, f"shard {shard}"))
    ]
    if faults:
        raise EchelonError(faults[0])
