"""Where a training continues: its position before the experiment is built, its state afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from echelon.config.schema import Config
from echelon.data.data_layout import require_same_layout
from echelon.errors import EchelonError, Fault
from echelon.experiment.training_info import TrainingInfo, make_training_info
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.runs.run_folder import Run
from echelon.snapshot.finite_check import format_tensor_names
from echelon.snapshot.layout import STATE_PART
from echelon.snapshot.reader import Snapshot
from echelon.snapshot.state import (
    broadcast_tree,
    load_model,
    load_state,
    restore_rng_state,
    restore_state,
    seed_all,
    share_extra_state,
)
from echelon.train.loop import Training
from echelon.train.memory_copies import KeptLoop
from echelon.train.resume import choose_snapshot, find_resume_position
from echelon.train.train_data import restore_stream

BUILD_TIMEOUT_S = 3600.0
"""Ranks may take very different times to prepare data. A failure is reported at once all the
same."""


def find_training_info(
    config: Config, run: Run, group: RankGroup, kept: KeptLoop | None
) -> TrainingInfo:
    """Return what the experiment may know of its training. All ranks take part: rank 0 alone reads
    the position in the snapshot that the run will continue from, unless that is in memory."""
    world, position = group.world, [0, 0]
    if kept is not None and kept.has_copy:
        return make_training_info(config, world.rank, world.size, run.folder, *kept.position)
    if world.rank == 0:
        position = find_resume_position(config, run)
        if group.store is not None:
            group.set_value("position", json.dumps(position))
    group.wait_for_all("at its snapshot", BUILD_TIMEOUT_S)
    if world.rank != 0:
        position = json.loads(group.get_value("position"))
    return make_training_info(config, world.rank, world.size, run.folder, *position)


def restore_copy(training: Training, kept: KeptLoop) -> None:
    """Restores state and position from the copy in memory that the ranks have agreed on. A
    collective."""
    group, experiment = training.group, training.experiment
    info = kept.load_info(group)

    def load_part(name: str) -> Any:
        return kept.load_part(name, group) if name in info["part_names"] else None

    load_model(experiment, load_part("model"))
    optimizer, own_parts = load_part("optimizer"), load_part(STATE_PART)
    load_state(experiment, training.optimizer_flags, optimizer, own_parts)
    rng_rows, world = load_part("rng")["ranks"], group.world
    if len(rng_rows) == world.size:
        restore_rng_state(rng_rows[world.rank], *get_process_devices(world))
    else:  # other numbers than those of the beginning
        seed_all(hash((training.config.seed, info["step"], world.rank, world.size)) % 2**63)
    training.restore_progress(info)
    restore_stream(training.source, info, load_part, group)


def restore_snapshot(training: Training, report: Callable[[str], None]) -> None:
    """Restores state and position from the snapshot that this run continues from, if there is one.

    Only rank 0 reads files, and reports what it found; the others receive the state from it.
    """
    group, run = training.group, training.run

    def find_flaw(snapshot: Snapshot) -> str | None:
        if "parts" in snapshot.info:  # which is refused below
            return None
        names = training.finite_check.find_nonfinite_in_snapshot(snapshot)
        return f"not finite: {format_tensor_names(names)}" if names else None

    snapshot = (
        choose_snapshot(training.config, run, find_flaw, report) if group.world.rank == 0 else None
    )
    info: dict[str, Any] | None = None
    weights: dict[str, Any] = {}
    if snapshot is not None:
        if "parts" in snapshot.info:
            raise EchelonError(
                Fault(
                    f"{snapshot.folder} is of a training with a loop or a step of its own, which "
                    "cannot go on as an experiment with a loss",
                    "train it as it was begun, or start anew: trainer.resume=never",
                )
            )
        info = {**snapshot.info, "folder": str(snapshot.folder)}
        weights = snapshot.load_part("model")
        load_model(training.experiment, weights)  # DDP and FSDP broadcast the weights
    # Only rank 0 sees a damaged snapshot. The others wait in the store, which can report a failure,
    # before they enter a collective, which cannot.
    group.wait_for_all("restored", BUILD_TIMEOUT_S)
    info = group.broadcast_json(info)
    if info is None:
        return
    share_extra_state(training.experiment, weights, group)
    names = ("optimizer", "rng", STATE_PART)
    parts = {p: snapshot.load_part(p) for p in names if p in snapshot.parts} if snapshot else {}
    given = training.config.trainer.resume != "auto"
    note = require_same_layout(info, training.plan.layout, training.config.trainer.resume)
    if note is not None and group.world.rank == 0:
        report(note)
    restore_state(training.experiment, training.optimizer_flags, parts, group, given)
    training.restore_progress(info)

    def load_part(name: str) -> Any:
        return broadcast_tree(snapshot.load_part(name) if snapshot is not None else None, group)

    restore_stream(training.source, info, load_part, group)
