"""Snapshots of a sharded model: every rank writes its own rows, rank 0 what makes them a snapshot.

Rank 0 makes the hidden folder and all write into it, each in the background. A rank tells the sizes
and checksums of its files once they are flushed; only when all have told does rank 0 write the
manifest and give the folder its name. So a kill of any rank at any moment leaves what was there.
The words go through the store, not through collectives, which belong to the training.

Where the ranks share no folder, rank 0 gathers everything and writes alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.train.experiment import Experiment
from echelon.train.group import Group
from echelon.train.optimizers import Ways
from echelon.train.pieces import cut, gathered, piece_name
from echelon.train.snapshots import Entry
from echelon.train.stages import devices_of
from echelon.train.staging import Stage
from echelon.train.state import parts_of, rng_row
from echelon.train.writer import (
    Begun,
    Saved,
    SaveFailed,
    Writer,
    hidden_folder,
    sentence,
    write_parts,
)
from echelon.utils.files import flush_to_disk

_POLL_S = 0.02


def folder_is_shared(folder: Path, group: Group) -> bool:
    """Whether every rank sees here what rank 0 wrote here."""
    rank = group.world.rank
    sign = folder / f".writing-shared-{os.urandom(8).hex()}"
    if rank == 0:
        with contextlib.suppress(OSError):  # what is wrong there the first save will say
            sign.write_text("shared\n", encoding="utf-8")
    name = group.broadcast_json(sign.name)
    seen = torch.tensor([int((folder / name).exists())])
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    if rank == 0:
        sign.unlink(missing_ok=True)
    return bool(seen)


def collect_rows(experiment: Experiment, ways: Ways, group: Group) -> dict[str, Any]:
    """This rank's rows, as parts of names of their own."""
    world = group.world
    rows = group.gather(rng_row(*devices_of(group.world)))
    parts = {
        piece_name(name, world.rank, world.size): cut(tree, world.rank)
        for name, tree in parts_of(experiment, ways).items()
    }
    return parts | ({"rng": {"ranks": torch.stack(rows)}} if rows else {})


def collect_whole(experiment: Experiment, ways: Ways, group: Group) -> dict[str, Any]:
    """All rows on rank 0, tensor by tensor; nothing elsewhere."""
    rows = group.gather(rng_row(*devices_of(group.world)))
    parts = gathered(parts_of(experiment, ways), keep=bool(rows))
    return parts | {"rng": {"ranks": torch.stack(rows)}} if rows else {}


class ShardedWriter:
    """The writers of all ranks, with the surface of `Writer`; results come out of rank 0's."""

    def __init__(self, root: Path, group: Group, writer: Writer | None) -> None:
        self._root = root
        self._group = group
        self._writer = writer
        self._stage = Stage()
        self._thread: threading.Thread | None = None

    def save(
        self, step: int, parts: Mapping[str, Any], info: Mapping[str, Any], best: bool = False
    ) -> None:
        """On every rank; each copies its state and writes it in the background."""
        beside = self._agreed_folder(step)
        if beside is None:
            return
        if self._writer is not None:
            others = Begun(beside, lambda: self._entries_of_others(beside))
            self._writer.save(step, parts, info, best, others)
        else:
            self._save_mine(beside, parts)

    def finished(self) -> list[Saved]:
        return self._writer.finished() if self._writer is not None else []

    def wait(self) -> list[Saved]:
        self._join()
        return self._writer.wait() if self._writer is not None else []

    def close(self) -> list[Saved]:
        self._join()
        self._stage.release()
        return self._writer.close() if self._writer is not None else []

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _agreed_folder(self, step: int) -> Path | None:
        name = None
        if self._writer is not None:
            beside = hidden_folder(self._root, step)
            try:
                os.mkdir(beside)
                name = beside.name
            except OSError as error:
                self._writer.fail(step, error)
        name = self._group.broadcast_json(name)
        return self._root / name if name is not None else None

    # --- a rank other than 0 ---

    def _save_mine(self, beside: Path, parts: Mapping[str, Any]) -> None:
        self._join()
        try:
            staged = self._stage.copy(parts)
        except OSError as error:  # no memory for the copy
            self._tell(beside, {"error": sentence(self._root, error)})
            return
        self._thread = threading.Thread(
            target=self._write, args=(beside, staged), name=f"save-{beside.name}"
        )
        self._thread.start()

    def _write(self, beside: Path, parts: Mapping[str, Any]) -> None:
        try:
            files = write_parts(beside, parts)
            flush_to_disk(beside)
            told: dict[str, Any] = {name: [e.size, e.checksum] for name, e in files.items()}
        except OSError as error:
            told = {"error": sentence(self._root, error)}
        except Exception as error:  # rank 0 would wait for ever
            told = {"error": f"{type(error).__name__}: {error}"}
        self._tell(beside, told)

    def _tell(self, beside: Path, told: Mapping[str, Any]) -> None:
        self._group.tell(_key(beside, self._group.world.rank), json.dumps(told))

    # --- rank 0 ---

    def _entries_of_others(self, beside: Path) -> dict[str, Entry]:
        store = self._group.store
        assert store is not None
        keys = {rank: _key(beside, rank) for rank in range(1, self._group.world.size)}
        while not store.check(list(keys.values())):
            if self._group.first_failure(_POLL_S):
                raise SaveFailed("another rank failed before it had written its part")
        entries: dict[str, Entry] = {}
        failed = []
        for rank, key in keys.items():
            told = json.loads(store.get(key))
            store.delete_key(key)
            if "error" in told:
                failed.append(f"rank {rank}: {told['error']}")
                continue
            entries |= {name: Entry(*entry) for name, entry in told.items()}
        if failed:
            raise SaveFailed("; ".join(failed))
        return entries


def _key(beside: Path, rank: int) -> str:
    return f"saved/{beside.name}/{rank}"
