"""Builds what a training function with a loop of its own needs on this rank."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from echelon.config.schema import Config, ReplicaConfig, TrainerConfig, flatten
from echelon.errors import EchelonError, Fault
from echelon.experiment.error_hints import require_no_process_group
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.run_folder import Run
from echelon.snapshot.reader import Snapshot
from echelon.snapshot.state import broadcast_tree
from echelon.train.evaluations import Evaluations
from echelon.train.memory_copies import KeptLoop
from echelon.train.output_tee import OutputTee
from echelon.train.prepare import choose_backend
from echelon.train.restore import BUILD_TIMEOUT_S
from echelon.train.resume import choose_snapshot
from echelon.train.session_engine import SessionEngine
from echelon.train.stop_signals import StopSignals


class UsedSettings(NamedTuple):
    """Which settings of `trainer` a training without a loop of Echelon's reads."""

    what: str
    """What reads them, as a fault names it."""
    names: tuple[str, ...]
    """The beginnings of their names."""
    instead: Mapping[str, str]
    """What to do instead of setting others."""


SESSION_SETTINGS = UsedSettings(
    "a loop of your own",
    (
        *("epochs", "steps", "batch_size", "save.", "keep_last", "mirror", "log_steps"),
        *("resume", "eval_batch_size", "loader_workers", "bad_samples", "max_bad_samples"),
    ),
    {
        "trainer.clip": "give it to the step: session.step(optimizer, clip=…)",
        "trainer.best": "call session.best(NAME=…) where the loop evaluates",
        "trainer.best_is": "say it in the loop: session.best(NAME=…, higher_is_better=True)",
        "trainer.schedule": "step a torch.optim.lr_scheduler in the loop",
        "trainer.warmup_steps": "step a torch.optim.lr_scheduler in the loop",
        "trainer.precision": "compute under torch.autocast in the loop",
        "trainer.compile": "call torch.compile(model) in the function",
    },
)
"""What the others set is up to the loop."""


def prepare_session(
    config: Config,
    run: Run,
    group: RankGroup,
    stop: StopSignals,
    heartbeat: Heartbeat,
    output: OutputTee,
    settings: UsedSettings = SESSION_SETTINGS,
    evaluations: Evaluations | None = None,
    kept: KeptLoop | None = None,
) -> tuple[SessionEngine, dict[str, Any]]:
    """Return the engine of a session whose parts are about to come, and what the snapshot that it
    continues from says of itself. `evaluations` are those of an experiment; a user's loop evaluates
    by itself. `kept` is there where the ranks come from another round.

    The process group is opened here, because parts are brought to all ranks when they come.
    """
    _require_used_settings(config, settings)
    device = get_process_devices(group.world)[0]
    if group.world.size > 1:
        require_no_process_group()
    if kept is not None and kept.output is not None and group.world.rank != 0:
        kept.output.release_output()  # before rank 0 goes on with the files
        kept.output = None
    group.wait_for_all("built", BUILD_TIMEOUT_S)
    group.init_process_group(choose_backend(device, config.launch.share_devices))
    if kept is not None and kept.has_copy:
        info = kept.load_info(group)
        load_part: Callable[[str], Any] = partial(kept.load_part, group=group)
    else:
        info, load_part = _find_snapshot(config, run, group, settings)
    if evaluations is None:
        evaluations = Evaluations(None, config.trainer, None, ())
    engine = SessionEngine(
        config, run, group, stop, heartbeat, output, device, load_part, info, evaluations, kept
    )
    return engine, info


def _find_snapshot(
    config: Config, run: Run, group: RankGroup, settings: UsedSettings
) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Return what the snapshot that the run continues from says of itself, or nothing, and what
    loads its parts on all ranks. A collective."""
    snapshot: Snapshot | None = None
    info: dict[str, Any] | None = None
    if group.world.rank == 0:
        # A session never saves weights that are not finite, so what is intact can be used.
        snapshot = choose_snapshot(config, run, lambda snapshot: None, _print_message)
        info = None if snapshot is None else snapshot.info
        if snapshot is not None and "parts" not in snapshot.info:
            raise EchelonError(
                Fault(
                    f"{snapshot.folder} is of an experiment with a loss, which cannot go on as "
                    f"{settings.what}",
                    "train it as it was begun, or start anew: trainer.resume=never",
                )
            )
    group.wait_for_all("restored", BUILD_TIMEOUT_S)

    def load_part(name: str) -> Any:
        return broadcast_tree(None if snapshot is None else snapshot.load_part(name), group)

    return group.broadcast_json(info) or {}, load_part


def _require_used_settings(config: Config, settings: UsedSettings) -> None:
    """Raise a fault for every setting of the training that nothing reads."""
    given = flatten({"trainer": dataclasses.asdict(config.trainer)})
    given |= flatten({"replica": dataclasses.asdict(config.replica)})
    usual = flatten({"trainer": dataclasses.asdict(TrainerConfig())})
    usual |= flatten({"replica": dataclasses.asdict(ReplicaConfig())})
    used = tuple(f"trainer.{name}" for name in settings.names)
    faults = [
        Fault(
            f"{key}={value} has no effect on {settings.what}",
            settings.instead.get(key, "leave it out, or return an echelon.Experiment"),
        )
        for key, value in given.items()
        if value != usual.get(key) and not key.startswith(used)
    ]
    if faults:
        raise EchelonError(*faults)


def _print_message(text: str) -> None:
    print(text, file=sys.stderr)
