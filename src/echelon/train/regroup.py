"""A training goes on in another round of its world: with fewer ranks, or with a replaced one.

Every rank leaves its training and prepares it anew for the new group. It keeps the experiment with
its weights; only ranks that are behind or new receive state, from the memory of one that has the
newest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echelon.config.schema import Config
from echelon.data.sharded_stream import find_stream
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.process_group import RankGroup
from echelon.runs.metrics_file import MetricsLine
from echelon.snapshot.finite_check import FiniteCheck
from echelon.snapshot.layout import STATE_PART
from echelon.snapshot.memory_snapshot import MemorySnapshot
from echelon.snapshot.state import broadcast_tree, load_model, load_state, seed_all
from echelon.train.loop import Training
from echelon.train.memory_copies import MemoryCopies, ShardCopies, WholeCopies
from echelon.train.step_boundary import StepBoundary

_MEET_TIMEOUT_S = 300.0


@dataclass
class KeptTraining:
    """What a rank keeps of the training that it leaves for another round."""

    snapshot: MemorySnapshot | None = None
    """None: this process is new, or its state is no longer whole."""
    optimizer_flags: OptimizerFlags | None = None
    finite_check: FiniteCheck | None = None
    first_weights: dict[str, Tensor] | None = None
    built_flags: dict[str, bool] | None = None
    base_rates: list[float] | None = None
    output: Training | None = None
    """The training that was left, where it was rank 0's: its trackers and its writer stay open."""
    last_line: MetricsLine | None = None
    """The newest line of metrics of the rank with the newest state."""

    def forget(self) -> None:
        """Let go of what was needed until the training was prepared again."""
        self.snapshot = self.output = None


def find_regroup_obstacle(t: StepBoundary) -> str | None:
    """Return why the ranks of a training cannot go on without one of them; None if they can. A
    collective."""
    config, world = t.config, t.group.world
    if len(world.devices) > 1:
        return "the model is on several devices"
    if world.nodes > 1 and world.size > 1 and not _is_run_folder_shared(t):
        return "not all machines see the run folder"
    if world.devices[0].startswith("cuda") and not config.launch.share_devices:
        return "NCCL leaves no whole state when a rank is lost"
    return None


def make_copies(config: Config, experiment: Experiment, group: RankGroup) -> MemoryCopies | None:
    """Return what keeps the state of a training in memory, where that is needed to go on without a
    rank: for steps of the user's own, models that the ranks hold together, and streams,
    whose position is spread over the ranks. None where the state itself is whole on every rank."""
    if config.replica.is_sharded:
        return ShardCopies(group, config.replica)
    is_needed = experiment.step is not None or find_stream(experiment.train_data) is not None
    return WholeCopies(group) if is_needed else None


def _is_run_folder_shared(t: StepBoundary) -> bool:
    # Imported here, as it brings what only sharded models need.
    from echelon.snapshot.distributed_writer import is_folder_shared

    return is_folder_shared(t.run.folder, t.group)


def leave_training(t: Training) -> KeptTraining:
    """Leave a training whose last step may be unfinished, and return what is kept of it."""
    assert isinstance(t.replica, DDPReplica)
    t.replica.abandon_step()
    t.close_sources()
    if t.profile is not None:
        t.profile.discard_profile()
    snapshot = t.keep_state()
    return KeptTraining(
        snapshot,
        t.optimizer_flags,
        t.finite_check,
        t.first_weights,
        t.built_flags,
        t.schedule.base_rates,
        t if t.group.world.rank == 0 else None,
    )


def restore_from_ranks(t: Training, kept: KeptTraining) -> None:
    """Give every rank the newest state that any of them has in its memory. A collective.

    A rank that is behind has lost its own state when it begins to load: were another rank lost
    meanwhile, it would take part as a new one.
    """
    group, own = t.group, kept.snapshot
    # Ranks may have made the same step, and not the same evaluation after it.
    place = (-1, -1) if own is None else (own.step, own.info.get("evaluated_step") or -1)
    texts = group.exchange("at the newest step", json.dumps(place), _MEET_TIMEOUT_S)
    places = [tuple(json.loads(text)) for text in texts]
    newest = max(places)
    source = places.index(newest)
    if newest[0] < 0:
        raise EchelonError(
            Fault(
                "every rank that had the state of the training is lost",
                "restart such a run from its newest snapshot: launch.max_restarts=3",
            ),
            exit=ExitCode.FAILED,
        )
    is_behind = place < newest
    has_own = own is not None and group.world.rank == source
    info = group.broadcast_json(dict(own.info) if own is not None and has_own else None, source)
    parts: dict[str, Any] = dict(own.parts) if own is not None else {}
    if min(places) < newest:
        sent = parts if has_own else {}
        parts = {
            name: broadcast_tree(sent.get(name), group, source)
            for name in ("model", "optimizer", STATE_PART)
        }
    if is_behind:
        kept.snapshot = None
    load_model(t.experiment, parts["model"])
    load_state(t.experiment, t.optimizer_flags, parts["optimizer"], parts.get(STATE_PART))
    t.restore_progress(info)
    kept.last_line = info["last_line"]
    # All ranks decide alike whether to save. What a lost rank 0 was writing may be nowhere.
    t.saved_step = group.broadcast_json(kept.output.saved_step if kept.output else None)
    # Other numbers than those of the beginning, and than those of the round before.
    seed_all(hash((t.config.seed, t.step, group.world.rank, group.world.size)) % 2**63)
