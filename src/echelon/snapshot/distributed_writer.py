"""Snapshots of a sharded model: every rank of the first replica writes its own shards, rank 0
publishes the snapshot.

1. Rank 0 makes a hidden folder and broadcasts its name. 2. The ranks that write do so there in the
background, flush their files, and report sizes and checksums through the store. Collectives are not
used, because they belong to the training. 3. When they all have reported, rank 0 writes the
manifest and renames the folder. So a kill of any rank at any moment leaves the snapshots that were
there.

Where the ranks that write do not share a folder, rank 0 gathers everything and writes alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.snapshot.manifest import ManifestEntry
from echelon.snapshot.mirror import SnapshotMirror
from echelon.snapshot.part_files import write_parts
from echelon.snapshot.shards import extract_own_shard, format_shard_name, gather_full_tensors
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.snapshot.state import collect_parts, is_extra_state, pack_rng_state
from echelon.snapshot.writer import (
    SaveError,
    SaveResult,
    ShardedSave,
    SnapshotWriter,
    describe_save_error,
    make_hidden_path,
)
from echelon.utils.files import flush_to_disk

_POLL_S = 0.02


def is_folder_shared(folder: Path, group: RankGroup, writers: int | None = None) -> bool:
    """Return whether every rank, or every one of the first `writers`, sees a file in this folder
    that rank 0 has just written there. A collective."""
    rank = group.world.rank
    token_file = folder / f".writing-shared-{os.urandom(8).hex()}"
    if rank == 0:
        with contextlib.suppress(OSError):  # what is wrong there the first save will say
            token_file.write_text("shared\n", encoding="utf-8")
    name = group.broadcast_json(token_file.name)
    is_asked = writers is None or rank < writers
    is_visible = torch.tensor([int(not is_asked or (folder / name).exists())])
    dist.all_reduce(is_visible, dist.ReduceOp.MIN)
    if rank == 0:
        token_file.unlink(missing_ok=True)
    return bool(is_visible)


def collect_shards(
    experiment: Experiment, optimizer_flags: OptimizerFlags, group: RankGroup, shards: int
) -> dict[str, Any]:
    """Return the parts that this rank writes: its rows of every sharded tensor, under names with
    its rank; none beyond the first replica of so many `shards`. A collective; rank 0 also gets the
    random states of all ranks."""
    rank = group.world.rank
    rng_rows = group.gather(pack_rng_state(*get_process_devices(group.world)))
    parts = {
        format_shard_name(name, rank, shards): tree
        for name, tree in collect_own_shards(experiment, optimizer_flags, shards).items()
        if rank < shards
    }
    return parts | ({"rng": {"ranks": torch.stack(rng_rows)}} if rng_rows else {})


def collect_own_shards(
    experiment: Experiment, optimizer_flags: OptimizerFlags, shards: int
) -> dict[str, Any]:
    """Return the parts with this rank's rows of every sharded tensor. A collective."""
    shard = dist.get_rank() % shards
    trees = collect_parts(experiment, optimizer_flags)
    if shard != 0:  # it need not have the keys of shard 0, and could not be joined with it
        weights = trees["model"].items()
        trees["model"] = {k: None if is_extra_state(k) else v for k, v in weights}
    return {name: extract_own_shard(tree, shard) for name, tree in trees.items()}


def gather_full_state(
    experiment: Experiment, optimizer_flags: OptimizerFlags, group: RankGroup
) -> dict[str, Any]:
    """Return the full state on rank 0, gathered tensor by tensor, and an empty dict on other
    ranks. A collective."""
    rng_rows = group.gather(pack_rng_state(*get_process_devices(group.world)))
    parts = gather_full_tensors(collect_parts(experiment, optimizer_flags), keep=bool(rng_rows))
    return parts | {"rng": {"ranks": torch.stack(rng_rows)}} if rng_rows else {}


class DistributedSnapshotWriter:
    """The writers of the first `shards` ranks, with the methods of SnapshotWriter; only rank 0
    returns results."""

    def __init__(
        self, root: Path, group: RankGroup, shards: int, writer: SnapshotWriter | None
    ) -> None:
        self._root = root
        self._group = group
        self._shards = shards
        self._writer = writer
        self._staging_buffer = StagingBuffer()
        self._thread: threading.Thread | None = None

    def mirror_to(self, mirror: SnapshotMirror) -> None:
        """Give every snapshot to a mirror once it is on disk; rank 0 does it alone."""
        if self._writer is not None:
            self._writer.mirror_to(mirror)

    def save(
        self, step: int, parts: Mapping[str, Any], info: Mapping[str, Any], is_best: bool = False
    ) -> None:
        """Copy what this rank writes and write it in the background. Every rank calls it, at the
        same step."""
        hidden = self._agree_on_folder(step)
        if hidden is None:
            return
        if self._writer is not None:
            shared_save = ShardedSave(hidden, lambda: self._wait_for_other_ranks(hidden))
            self._writer.save(step, parts, info, is_best, shared_save)
        elif self._group.world.rank < self._shards:
            self._save_own_shards(hidden, parts)

    def record_evaluation(self, step: int, info: Mapping[str, Any], is_best: bool) -> None:
        """Add to a snapshot what an evaluation has found since; rank 0 does it alone."""
        if self._writer is not None:
            self._writer.record_evaluation(step, info, is_best)

    def take_results(self) -> list[SaveResult]:
        """Return how saves ended since the last call; empty on ranks other than 0."""
        return self._writer.take_results() if self._writer is not None else []

    def wait(self) -> list[SaveResult]:
        """Wait for the save under way and return its result; empty on ranks other than 0."""
        self._join_thread()
        return self._writer.wait() if self._writer is not None else []

    def close(self) -> list[SaveResult]:
        """Wait for the save under way, free the staging buffer, and return results."""
        self._join_thread()
        self._staging_buffer.free_memory()
        return self._writer.close() if self._writer is not None else []

    def _join_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _agree_on_folder(self, step: int) -> Path | None:
        """Return the hidden folder that rank 0 has made; None on all ranks if it could not."""
        name = None
        if self._writer is not None:
            hidden = make_hidden_path(self._root, step)
            try:
                os.mkdir(hidden)
                name = hidden.name
            except OSError as error:
                self._writer.record_failure(step, error)
        name = self._group.broadcast_json(name)
        return self._root / name if name is not None else None

    # --- a rank other than 0 ---

    def _save_own_shards(self, hidden: Path, parts: Mapping[str, Any]) -> None:
        self._join_thread()
        try:
            finish_copy = self._staging_buffer.begin_copy(parts)
        except OSError as error:  # no memory for the copy
            self._report(hidden, {"error": describe_save_error(self._root, error)})
            return
        self._thread = threading.Thread(
            target=self._write_own_shards, args=(hidden, finish_copy), name=f"save-{hidden.name}"
        )
        self._thread.start()

    def _write_own_shards(self, hidden: Path, finish_copy: Callable[[], Mapping[str, Any]]) -> None:
        try:
            files = write_parts(hidden, finish_copy())
            flush_to_disk(hidden)
            report: dict[str, Any] = {name: [e.size_bytes, e.checksum] for name, e in files.items()}
        except OSError as error:
            report = {"error": describe_save_error(self._root, error)}
        except Exception as error:  # rank 0 would wait for ever
            report = {"error": f"{type(error).__name__}: {error}"}
        self._report(hidden, report)

    def _report(self, hidden: Path, report: Mapping[str, Any]) -> None:
        self._group.set_value(_make_store_key(hidden, self._group.world.rank), json.dumps(report))

    # --- rank 0 ---

    def _wait_for_other_ranks(self, hidden: Path) -> dict[str, ManifestEntry]:
        """Return the files of the other ranks that write once they are on disk. Raises SaveError if
        one could not write or a rank has failed, since it would be waited for for ever."""
        store = self._group.store
        assert store is not None
        keys = {rank: _make_store_key(hidden, rank) for rank in range(1, self._shards)}
        while not store.check(list(keys.values())):
            if self._group.wait_for_failure(_POLL_S):
                raise SaveError("another rank failed before it had written its part")
        entries: dict[str, ManifestEntry] = {}
        errors = []
        for rank, key in keys.items():
            report = json.loads(store.get(key))
            store.delete_key(key)
            if "error" in report:
                errors.append(f"rank {rank}: {report['error']}")
                continue
            entries |= {name: ManifestEntry(*entry) for name, entry in report.items()}
        if errors:
            raise SaveError("; ".join(errors))
        return entries


def _make_store_key(hidden: Path, rank: int) -> str:
    return f"saved/{hidden.name}/{rank}"
