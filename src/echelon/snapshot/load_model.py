"""`echelon.load`: the trained model of a run, ready to use."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.loading import build_experiment, load_function, takes_session
from echelon.experiment.training_info import make_training_info
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import BEST_LINK, find_best, format_folder_name
from echelon.snapshot.manifest import InvalidSnapshotError
from echelon.snapshot.reader import (
    Snapshot,
    describe_existing_snapshots,
    find_newest_of_run,
    find_run_folder,
    load_trained_weights,
    verify_snapshot,
)
from echelon.snapshot.state import load_model, pack_rng_state, restore_rng_state, seed_all


def load(
    run: str | os.PathLike[str] = "latest",
    snapshot: Literal["best", "latest"] | int = "best",
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return the trained model of a run with its weights, in eval mode.

        model = echelon.load("runs/NAME")
        with torch.inference_mode():
            output = model(inputs)

    The model is built by the run's own experiment function with the settings of the run, so the
    function's file must still be there, and its data is opened as in a training. The weights are
    whole, whatever number of processes trained them. With trainer.ema they are the average, which
    was evaluated.

    Parameters:

    run       A run: its folder, its name in ./runs, or "latest".
    snapshot  "best": the best one by trainer.best, or the newest one of a run that evaluated
              nothing. "latest": the newest one. Or the number of a step whose snapshot is kept.
    device    Where the model is placed.

    Raises echelon.errors.EchelonError if there is no such run or snapshot, or if the experiment
    builds another model now. Files are verified by their checksums and loaded with
    weights_only=True; to load weights without running the experiment's code, use
    echelon.load_weights. The state of random numbers stays as it was.
    """
    found = Run(find_run_folder(os.fspath(run)))
    config = found.read_config()
    if config.program or not config.experiment.get("entry"):
        raise EchelonError(
            Fault(
                f"run {found.name} is a program of `echelon run`, whose model is not known here",
                "load the files that the program itself has written",
            )
        )
    if config.script is not None:
        raise _make_own_loop_error(config.script, run)
    weights = load_trained_weights(_choose_snapshot(found, snapshot))
    place = torch.device(device)
    rng_row = pack_rng_state()
    try:
        seed_all(config.seed)  # as in a training, so that the experiment draws what it drew there
        entry = found.get_entry_point(config, node=0)
        function = load_function(entry)
        if takes_session(function):
            raise _make_own_loop_error(entry, run)
        devices = (place,) * config.replica.devices
        get_info = partial(make_training_info, config, 0, 1, found.folder)
        experiment, _ = build_experiment(
            function, entry, config.experiment_settings, devices, get_info
        )
    finally:
        restore_rng_state(rng_row)
    load_model(experiment, weights)
    model: nn.Module = experiment.model
    return model.to(place).eval()


def _make_own_loop_error(what: str, run: str | os.PathLike[str]) -> EchelonError:
    return EchelonError(
        Fault(
            f"{what} has a training loop of its own, and calling it would train again",
            f"build the model yourself: model.load_state_dict(echelon.load_weights("
            f"{os.fspath(run)!r}))",
        )
    )


def _choose_snapshot(run: Run, which: str | int) -> Snapshot:
    """Return the snapshot that is asked for, verified."""
    root = run.snapshots_folder
    if which == "latest":
        return find_newest_of_run(root)
    if which == "best":
        folder = find_best(root)
        if folder is None:
            return find_newest_of_run(root)
    elif isinstance(which, int):
        folder = root / format_folder_name(which)
    else:
        raise EchelonError(
            Fault(f"snapshot={which!r} is not a snapshot", 'give "best", "latest" or a step')
        )
    try:
        return verify_snapshot(folder)
    except InvalidSnapshotError as error:
        reason = f"is damaged: {error}" if folder.is_dir() else "is not there"
        raise EchelonError(
            Fault(
                f"the snapshot {_describe(folder, which)} {reason}",
                describe_existing_snapshots(root),
            ),
            exit=ExitCode.NOT_FOUND,
        ) from None


def _describe(folder: Path, which: str | int) -> str:
    return f"{folder} ({BEST_LINK})" if which == "best" else str(folder)
